"""What memory lets a rank hold of a microbatch: caps for the planner (PlanSpec.room), what keeping
below them costs, and the fewest microbatches that do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from orchmllm.config.recipe import Recipe
from orchmllm.models.flops import Lengths, padded_phases
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.balance import CapError
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.sharding.fits import MISSED, decide, joined, largest_fitting, scaled
from orchmllm.sharding.memory import Choice, Loads, MemoryModel, loads_of

MOST = 64  # times the fullest rank's load: what nobody would call a cap
PARTS = 1024  # of that load


def room_of(
    memory: MemoryModel, loads: Loads, choice: Choice, budget_bytes: float, most: float = MOST
) -> dict[str, int]:
    """Phase -> positions of a rank and microbatch that are predicted to fit: of all phases together
    as many as the fullest ranks of `loads` have, times one factor, which is at most `most`; {} if
    nothing fits."""
    def fullest(values: np.ndarray) -> np.ndarray:
        return np.array([np.max(values)], float)

    one = Loads({p: Lengths(fullest(x.rows), fullest(x.positions), fullest(x.tokens))
                 for p, x in loads.phases.items()},
                {p: fullest(x) for p, x in loads.received.items()},
                {p: fullest(x) for p, x in loads.pairs.items()})
    factor = largest_fitting(lambda k: memory.peak(scaled(one, k / PARTS), choice), budget_bytes,
                             int(most * PARTS)) / PARTS
    return {p: cap for p in PHASES if (cap := int(factor * one.phases[p].positions[0]))}


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
    held = ", ".join(f"{p} {n:,}" for p, n in spec.room.items())
    text = f"memory of a rank and microbatch: at most {held} positions"
    if not least:
        return f"{text}; no number of microbatches keeps below that"
    count = num_microbatches or least
    with_caps, without = (sum(
        int(plan.planned_cost(phase).max()) for layout in layouts
        for _, plan in plan_microbatches(layout, one, count) for phase in spec.phases)
        for one in (spec, replace(spec, room={})))
    return (f"{text}; a step is predicted to take {with_caps / max(without, 1):.3f} times as long "
            f"as without this; the fewest microbatches that keep it: {least}"
            + (f" (train.accumulation_steps={num_microbatches})" if num_microbatches else ""))


def with_count(
    recipe: Recipe, layouts: Sequence[BatchLayout], spec: PlanSpec, memory: MemoryModel,
    budget_bytes: float
) -> tuple[Recipe, PlanSpec, str]:
    """(the recipe with a number in place of train.accumulation_steps=auto; the spec with the room
    of a rank in a microbatch, without one where nothing fits; that in words). layouts: of some
    steps. Raises ValueError where no number of microbatches keeps below that."""
    pad, count = padded_phases(recipe.model), recipe.train.accumulation_steps
    loads = joined([loads_of(plan, pad) for layout in layouts
                    for _, plan in plan_microbatches(layout, spec, count or 1)])
    try:
        choice = chosen(recipe, memory, loads, budget_bytes, MISSED)
    except ValueError:
        if not count:
            raise
        return recipe, spec, ""  # what follows says so
    room = room_for(recipe, memory, loads, budget_bytes, MISSED, choice)
    spec = replace(spec, room=room)
    text = described(layouts, spec, count) if room and spec.balance.enabled else ""
    if count:
        return recipe, spec, text
    count = fewest(layouts, spec)
    if not count:
        raise ValueError("train.accumulation_steps=auto: no number of microbatches keeps below the "
                         f"caps of a rank ({room}): give more memory, or shorter examples")
    return replace(recipe, train=replace(
        recipe.train, accumulation_steps=count,
        batch_size=-(-recipe.train.batch_size // count))), spec, text


def room_for(
    recipe: Recipe, memory: MemoryModel, loads: Loads, budget_bytes: float, taken: float,
    choice: Choice,
) -> dict[str, int]:
    """room_of by the recipe's `choice`, {} without a budget. Where `auto` recomputes as little as
    the loads allow, these are the room. taken: see decide."""
    if not budget_bytes:
        return {}
    auto = "auto" in map(recipe.fsdp.checkpointing, PHASES)
    return room_of(memory, loads, choice, budget_bytes / taken, 1.0 if auto else MOST)


def chosen(recipe: Recipe, memory: MemoryModel, loads: Loads, budget_bytes: float, taken: float,
           **known) -> dict[str, str]:
    """`decide`; where the microbatches of train.accumulation_steps=auto are what has to give, all
    that is open is recomputed."""
    try:
        return decide(recipe, memory, loads, budget_bytes, taken=taken, **known)
    except ValueError:
        asked = {p: recipe.fsdp.checkpointing(p) for p in PHASES}
        full = {p: "full" if c == "auto" else c for p, c in asked.items()}
        if recipe.train.accumulation_steps or not room_of(memory, loads, full,
                                                          budget_bytes / taken):
            raise
        return full
