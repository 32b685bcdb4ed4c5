"""What memory lets a rank hold of a microbatch: caps for the planner (PlanSpec.room), what keeping
below them costs, and the fewest microbatches that do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import PlanSpec
from orchmllm.plan.balance import CapError
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.room import MOST, PARTS, Limit
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.fits import MISSED, decide, joined, largest_fitting, scaled
from orchmllm.sharding.loads import Loads, loads_of
from orchmllm.sharding.memory import Choice, MemoryModel


def room_of(
    memory: MemoryModel, loads: Loads, choice: Choice, budget_bytes: float
) -> tuple[Limit, ...]:
    """Limits below which the memory of a rank is predicted to hold its positions of a microbatch,
    one for each moment of a step that may be the highest; () if nothing fits, as without a
    budget. Rows, tokens and arriving features grow with positions as on the fullest ranks of
    `loads`.

    At every moment the bytes of a phase alone are taken to grow along a straight line, from none to
    as many positions as fit. What is predicted is nowhere above this line, but for the loss: what
    that takes for any number of targets counts as always there."""
    full = {p: int(np.max(x.positions)) for p, x in loads.phases.items() if np.max(x.positions)}

    alone = {p: loads.each(lambda q, values, p=p: np.array([(q == p) * np.max(values)]))
             for p in loads.phases}  # of a rank with the most of a phase, and no other phase

    def peaks(phase: str, factor: float) -> np.ndarray:
        """(moments,) of a rank with `factor` times that."""
        return np.concatenate([*memory.peaks(scaled(alone[phase], factor), choice).values()])

    fits = {p: largest_fitting(memory, alone[p], choice, budget_bytes, PARTS, MOST * PARTS) / PARTS
            for p in full}
    if not all(fits.values()):
        return ()
    nothing, each = peaks("llm", 0.0), {}
    always = nothing.copy()
    for phase, factor in fits.items():
        half, whole = peaks(phase, factor / 2), peaks(phase, factor)
        more = np.maximum(2 * half - whole - nothing, 0.0)
        each[phase] = np.maximum(whole - nothing - more, 0.0) / (factor * full[phase])
        always += more
    if always.max() >= budget_bytes:
        return ()
    return tuple(_highest([
        Limit(int(budget_bytes - kept), {p: math.ceil(each[p][k]) for p in full})
        for k, kept in enumerate(always)]))


def _highest(limits: Sequence[Limit]) -> list[Limit]:
    """Without those that others imply."""
    shares = [{p: n / limit.most for p, n in limit.each.items()} for limit in limits]
    return [limit for i, limit in enumerate(limits) if any(limit.each.values()) and not any(
        all(n <= other.get(p, 0.0) for p, n in shares[i].items())
        and (shares[i] != other or k < i) for k, other in enumerate(shares) if k != i)]


def fewest(layouts: Sequence[BatchLayout], spec: PlanSpec) -> int:
    """Microbatches of the step that needs the most of them; 0 if one cannot be planned so."""
    try:
        return max(len(plan_microbatches(layout, spec, 0)) for layout in layouts)
    except CapError:
        return 0


def described(layouts: Sequence[BatchLayout], spec: PlanSpec, num_microbatches: int) -> str:
    """The caps of memory in words, what they cost in steps of so many microbatches (0: as few as
    they allow), and the fewest that keep them. layouts: of some steps."""
    least = fewest(layouts, spec)
    alone = {p: min(limit.most // limit.each[p] for limit in spec.room if limit.each.get(p))
             for p in spec.phases if any(limit.each.get(p) for limit in spec.room)}
    held = ", ".join(f"{p} {n:,}" for p, n in alone.items())
    text = f"memory of a rank and microbatch: at most {held} positions, each phase alone"
    if not least:
        return f"{text}; no number of microbatches keeps below that"
    count = num_microbatches or least
    with_caps, without = (sum(
        int(plan.planned_cost(phase).max()) for layout in layouts
        for _, plan in plan_microbatches(layout, one, count) for phase in spec.phases)
        for one in (spec, spec.without_room))
    return (f"{text}; a step is predicted to take {with_caps / max(without, 1):.3f} times as long "
            f"as without this; the fewest microbatches that keep it: {least}"
            + (f" (train.accumulation_steps={num_microbatches})" if num_microbatches else ""))


def open_count(recipe: Recipe, spec: PlanSpec) -> int:
    """Microbatches of a step as long as memory does not say how many `auto` stands for: 0, as few
    as the caps of positions allow, or one where there are no caps."""
    return recipe.train.accumulation_steps or int(not spec.hard_caps)


def planned_loads(recipe: Recipe, layouts: Sequence[BatchLayout], spec: PlanSpec) -> Loads:
    """Of all microbatches of these steps."""
    count = open_count(recipe, spec)
    return joined([loads_of(plan) for layout in layouts
                   for _, plan in plan_microbatches(layout, spec, count)])


def with_count(
    recipe: Recipe, layouts: Sequence[BatchLayout], spec: PlanSpec, memory: MemoryModel,
    budget_bytes: float
) -> tuple[Recipe, PlanSpec, str]:
    """(the recipe with a number in place of train.accumulation_steps=auto; the spec with the room
    of a rank in a microbatch, without one where nothing fits; that in words). layouts: of some
    steps. Raises ValueError where no number of microbatches keeps below that."""
    count = recipe.train.accumulation_steps
    loads = planned_loads(recipe, layouts, spec)
    try:
        choice = chosen(recipe, layouts, spec, memory, loads, budget_bytes, MISSED)
    except ValueError:
        if not count:
            raise
        return recipe, spec, ""  # what follows says so
    room = room_of(memory, loads, choice, budget_bytes / MISSED)
    spec = replace(spec, room=room)
    text = described(layouts, spec, count) if room and spec.balance.enabled else ""
    if count:
        return recipe, spec, text
    count = fewest(layouts, spec)
    if not count:
        raise ValueError("train.accumulation_steps=auto: no number of microbatches keeps below the "
                         "caps of a rank: give more memory, or shorter examples")
    return replace(recipe, train=replace(
        recipe.train, accumulation_steps=count,
        batch_size=-(-recipe.train.batch_size // count))), spec, text


def chosen(
    recipe: Recipe, layouts: Sequence[BatchLayout], spec: PlanSpec, memory: MemoryModel,
    loads: Loads, budget_bytes: float, taken: float, **known
) -> dict[str, str]:
    """`decide`; where that finds nothing for `loads`, the plans of some steps, but memory limits
    what a rank holds such that it fits, all that is open is recomputed: in as many microbatches as
    that takes with train.accumulation_steps=auto, in as many as the recipe says if the steps have
    such plans."""
    try:
        return decide(recipe, memory, loads, budget_bytes, taken=taken, **known)
    except ValueError:
        asked = {p: recipe.fsdp.checkpointing(p) for p in memory.phases}
        full = {p: "full" if c == "auto" else c for p, c in asked.items()}
        room, count = room_of(memory, loads, full, budget_bytes / taken), (
            recipe.train.accumulation_steps)
        if not room or count and not all(
                is_below(plan, room) for layout in layouts
                for _, plan in plan_microbatches(layout, replace(spec, room=room), count)):
            raise
        return full


def is_below(plan: StepPlan, room: tuple[Limit, ...]) -> bool:
    """Whether a microbatch that was planned by these limits of memory is below them."""
    return plan.spec.room == room and plan.is_within_caps
