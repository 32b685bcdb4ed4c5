"""The plan of a whole step: which microbatch and which rank every item is processed in.

All ranks meet in every microbatch. Objective: the sum over microbatches and phases of the slowest
rank's cost. It is at least the sum of max(mean rank, longest item), the *bound* of a division.

Divisions of a step into microbatches that are tried:
1. Microbatches that are alike (longest-processing-time-first on the phases' costs): every one of
   them waits for a long example of its own.
2. What moves of single examples make of them, and of the sorted examples that were cut: long
   examples gather where others of their length are (cpp/step_shortening.hpp).
3. Slots: examples are packed into one slot for each rank of each microbatch, below all caps
   (cpp/slots.hpp), and slots of like cost share a microbatch; and what moves make of these.
Those whose bound is below the shortest plan so far are planned; the shortest plan is the result.

Limits of a rank and microbatch: max_rank_tokens, positions of a phase, is hard. `PlanSpec.room`,
bytes of all phases together at some moments of a step, is kept where a plan is found; else ranks
may hold as much as the largest example of their microbatch where that is more. Without either,
divisions that are not alike are planned with a cap of the LLM's positions: the longest example, or
USUAL times an even share, which is what a rank of microbatches that are alike holds.

Invariants: see assert_invariants. The plan takes no longer than that of microbatches that are
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import numpy as np

from orchmllm.plan.assign import (
    EVERY_PHASE,
    PlanSpec,
    assign_phases,
    most_shares,
    positions_of,
)
from orchmllm.plan.balance import CapError
from orchmllm.plan.divisions import (
    MOST_PLANNED,
    Division,
    divided,
    example_positions,
    sizes_and_caps,
    with_caps,
)
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan, build_plan, plan_step

WORTH = 1.01  # times its bound: what a division of many examples has to be below to be planned

Plans = list[tuple[np.ndarray, StepPlan]]


def plan_microbatches(
    layout: BatchLayout, spec: PlanSpec, num_microbatches: int,
    planner: Callable[[BatchLayout, PlanSpec], StepPlan] = plan_step,
) -> Plans:
    """[(ascending positions in the step of a microbatch's examples, its plan)].

    num_microbatches: of the step; 0: as few as the caps allow. Without balancing every rank's share
    is cut in order. Raises CapError where no plan is found below the caps."""
    error: CapError | None = None
    for count in [num_microbatches] if num_microbatches else _counts(layout, spec):
        for division in divisions(layout, spec, count, hard=not num_microbatches):
            try:
                return [_planned(layout, division, k, planner) for k in range(count)]
            except CapError as e:
                error = e
    raise error or CapError("no division of the step keeps below the caps of a rank: " + ", ".join(
        [f"{phase} {cap}" for phase, cap in spec.hard_caps.items()] + ["memory"] * bool(spec.room)))


def assert_invariants(layout: BatchLayout, plans: Plans, spec: PlanSpec) -> None:
    """Raises AssertionError where the plan of a step is not one:

    - Every example is in one microbatch, with all its items; no microbatch has others.
    - In every phase each item is processed by one rank of its group of ranks. Items of the LLM are
      the pieces of examples, which cover each of them once.
    - No rank holds more positions than a phase's max_rank_tokens, or than its memory has room for
      by spec.room, unless the step has no plan below that.
    - With spec.fills every rank of every microbatch has an example, where there are enough, they
      are divided by balancing, and ranks share none: those that share several may leave too few of
      the others."""
    at = np.concatenate([positions for positions, _ in plans])
    assert np.array_equal(np.sort(at), np.arange(layout.num_examples)), "not every example once"
    fills = spec.fills and spec.balance.enabled and not spec.group_size and (
        layout.num_examples >= len(plans) * layout.num_ranks)
    for positions, plan in plans:
        assert np.array_equal(plan.layout.example_id, layout.example_id[positions])
        for phase in spec.phases:
            move, size = plan.rearrangement(phase), spec.group_size or layout.num_ranks
            items = (plan.parts if phase == "llm" else plan.layout).item_lengths(phase)
            assert np.array_equal(np.sort(move.order), np.arange(len(items))), f"{phase}: an item"
            assert (move.source_rank[move.order] // size == move.target_rank // size).all()
        if (pieces := plan.pieces) is not None:
            ends = np.append(pieces.start[1:], 0)
            whole = plan.layout.tokens_per_example[pieces.example]
            assert (np.where(ends > 0, ends, whole) == pieces.end).all(), "an example's pieces"
        if spec.balance.enabled:
            assert not plan.spec.room or plan.spec.room in [
                one.room for one in _limited(plan.layout, spec)], "planned by other limits"
            for one in (plan, replace(plan, spec=spec.without_room)):
                assert one.is_within_caps, "a rank is above a cap"
        assert not fills or plan.pieces or plan.llm.target_sizes.all(), "a rank has no example"


def _counts(layout: BatchLayout, spec: PlanSpec) -> Iterator[int]:
    """Numbers of microbatches that may be the fewest that the caps allow. Without balancing: the
    one for which no rank's share is above them, cut in order. Raises ValueError without a cap."""
    if not spec.hard_caps and not spec.room:
        raise ValueError("as few microbatches as the caps allow are asked for, and there is none: "
                         "set balance.llm.max_rank_tokens or fsdp.memory_gb")
    for phase, cap in spec.hard_caps.items():
        longest = layout.item_lengths(phase).max(initial=0)
        shares = most_shares(spec.balance, spec.ranks_per_node, layout.num_ranks)
        if longest > cap * (shares if phase == "llm" else 1):
            raise CapError(f"balance.{phase}.max_rank_tokens = {cap} is below the {longest} "
                           "positions of one item: no number of microbatches helps")
    held = example_positions(layout, spec)
    sizes, caps = sizes_and_caps(held, with_caps(layout, spec, held))
    least = max(1, *(-(-sizes.sum(axis=0) // caps // layout.num_ranks)).tolist())
    if spec.balance.enabled:
        yield from range(least, 4 * least + 9)
        return
    most = max(int(layout.examples_per_rank.max(initial=0)), least)
    for count in range(least, most):
        slot = layout.rank_of_example * count + layout.in_order(count)
        if all(np.bincount(slot, size).max() <= cap
               for size, cap in zip(sizes.T, caps, strict=True)):
            yield count
            return
    yield most


def _limited(layout: BatchLayout, spec: PlanSpec) -> Iterator[PlanSpec]:
    """The spec of a microbatch, and where one of its examples has more than the memory of a rank
    holds, another one that allows so much."""
    yield spec
    if not spec.room:
        return
    held = example_positions(layout, spec)
    room = tuple(replace(limit, most=max(limit.most, int(np.max(limit.taken(held), initial=0))))
                 for limit in spec.room)
    if room != spec.room:
        yield replace(spec, room=room)


def divisions(
    layout: BatchLayout, spec: PlanSpec, count: int, hard: bool
) -> Iterator[Division]:
    """Divisions into `count` microbatches, the best first. hard: caps of memory are kept or there
    is none. Of more than MOST_PLANNED examples only the one with the least bound is compared with
    the one that is alike, and no usual cap is kept. Into one microbatch nothing is divided unless
    its plan breaks a cap."""
    if not spec.balance.enabled:
        yield Division(layout.in_order(count), spec)
        return
    large, limited = layout.num_examples > MOST_PLANNED, spec.room or spec.hard_caps
    if count == 1:
        yield Division(np.zeros(layout.num_examples, np.int64), spec)
        if not limited:
            return
    found = divided(layout, spec, count, large)
    alike = found[0][1]
    if not spec.room:
        alike = alike._replace(spec=spec)
    loose = [] if hard else [alike._replace(spec=spec.without_room)]
    if large or count == 1:
        bound, best = min(found[1:] or found, key=itemgetter(0))
        if count > 1 and len(found) > 1:  # few examples a rank may not get near the bound
            best = _shortest(layout, [(0.0, alike), (WORTH * bound, best)], count) or best
        packed = [one for _, one in found if one.rank is not None]
        raised = [one._replace(raises=True) for one in (best, *packed)] if spec.room else []
        yield from [*[best] * (count > 1), *packed, *raised, *loose]
        return
    if limited:  # divisions that look for no cap may be below it, too
        free = spec.without_room.capped(dict.fromkeys(spec.hard_caps, 0))
        found += [(bound, one._replace(spec=replace(one.spec, room=spec.room).capped(
            {phase: min(cap, one.spec.hard_caps.get(phase, cap))  # theirs is the usual one
             for phase, cap in spec.hard_caps.items()})))
            for bound, one in divided(layout, free, count, large)]
    found = [(0.0, alike), *sorted(found[1:], key=itemgetter(0))]
    best = _shortest(layout, found, count)
    if best is None and spec.room:
        best = _shortest(
            layout, [(bound, one._replace(raises=True)) for bound, one in found], count)
    yield from [best, *loose] if best else loose


def _shortest(
    layout: BatchLayout, found: Sequence[tuple[float, Division]], count: int
) -> Division | None:
    """The division of which ranks take least, None where the caps allow no plan of any. found:
    (what it takes at least, division), those that take least first."""
    least, best = np.inf, None
    for bound, division in found:
        if bound < least:
            time = _time_of_ranks(layout, division, count)
            if time < least:
                least, best = time, division
    return best


def _planned(
    layout: BatchLayout, division: Division, k: int,
    planner: Callable[[BatchLayout, PlanSpec], StepPlan],
) -> tuple[np.ndarray, StepPlan]:
    """Microbatch k of a division, see plan_microbatches."""
    def make(part: BatchLayout, spec: PlanSpec, rank: np.ndarray | None) -> StepPlan:
        plan = planner(part, spec) if rank is None else build_plan(
            part, *_below_caps(part, spec, rank), spec)
        if spec.balance.enabled and not plan.is_within_caps:
            raise CapError("a rank has no memory for the example that it was given")
        return plan

    return np.flatnonzero(division.micro == k), _first(layout, division, k, make)


def _first(
    layout: BatchLayout, division: Division, k: int,
    make: Callable[[BatchLayout, PlanSpec, np.ndarray | None], Any],
) -> Any:
    """make(layout, spec, rank) of microbatch k by the first of its limits and, for each of them, by
    the policies alone (rank: None) or by the division's ranks that raises no CapError; the last of
    these otherwise."""
    inside, error = division.micro == k, CapError()
    part = layout.select(inside)
    for spec in _limited(part, division.spec) if division.raises else (division.spec,):
        for rank in (None,) if division.rank is None else (None, division.rank[inside]):
            try:
                return make(part, spec, rank)
            except CapError as e:
                error = e
    raise error


def _below_caps(
    layout: BatchLayout, spec: PlanSpec, rank: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What assign_phases returns, where every item is on the rank of its example (n,). Raises
    CapError if that is above a cap."""
    encode = {phase: rank[layout.item_owner(phase)] for phase in spec.of_media}
    if not spec.allows(positions_of(layout, encode, rank, spec)):
        raise CapError("no plan found in which every rank keeps below its caps")
    return encode, rank


def _time_of_ranks(layout: BatchLayout, division: Division, count: int) -> float:
    """What the ranks take of a step, waiting for the slowest one in every microbatch and phase;
    infinite where the caps allow no plan."""
    def time(part: BatchLayout, spec: PlanSpec, rank: np.ndarray | None) -> float:
        try:
            encode, llm = (assign_phases(part, spec) if rank is None
                           else _below_caps(part, spec, rank))
        except CapError:
            if rank is not None or spec.balance.llm.max_shares == 1:
                raise
            plan = plan_step(part, spec)  # which may share an example that is too long
            return sum(float(plan.planned_cost(phase).max(initial=0)) for phase in spec.phases)
        return sum(float(spec.costs[phase].of_ranks(
            part.item_lengths(phase), llm if phase == "llm" else encode[phase],
            part.num_ranks).max(initial=0)) for phase in spec.phases)

    spec = division.spec
    phases = {phase: replace(getattr(spec.balance, phase), nodewise=False)
              for phase in EVERY_PHASE}
    division = division._replace(  # nodes do not change the loads
        spec=replace(spec, balance=replace(spec.balance, **phases)))
    try:
        return sum(_first(layout, division, k, time) for k in range(count))
    except CapError:
        return np.inf
