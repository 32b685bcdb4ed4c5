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

Caps of a rank and microbatch, in positions of a phase: max_rank_tokens is hard. `PlanSpec.room`,
what the memory of a rank was predicted to hold, is kept where a plan is found; one example that
has more raises it. Without either, divisions that are not alike are planned with a cap of the LLM's
positions: the longest example, or USUAL times an even share, which is what a rank of microbatches
that are alike holds.

Invariants: see assert_invariants. The plan takes no longer than that of microbatches that are
alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from orchmllm.plan import balance as balancing
from orchmllm.plan.assign import PHASES, PlanSpec, assign_phases, at_least, group_layouts
from orchmllm.plan.balance import POLICIES, CapError, core
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan, build_plan, plan_step

MOST_PLANNED = 2**14  # examples of a step whose divisions are planned before one is chosen
USUAL = 1.1  # times an even share, what the fullest rank of a microbatch holds
PACKABLE = 0.98  # of a cap is what examples of different lengths can be packed into

Plans = list[tuple[np.ndarray, StepPlan]]


class Division(NamedTuple):
    """micro: (n,) microbatch of each example. spec: by which each microbatch is planned. rank: (n,)
    of each example, below the caps, for microbatches of which the policy finds no plan."""

    micro: np.ndarray
    spec: PlanSpec
    rank: np.ndarray | None = None


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
        f"{phase} {cap}" for phase, cap in with_caps(layout, spec).hard_caps.items()))


def assert_invariants(layout: BatchLayout, plans: Plans, spec: PlanSpec) -> None:
    """Raises AssertionError where the plan of a step is not one:

    - Every example is in one microbatch, with all its items; no microbatch has others.
    - In every phase each item is processed by one rank of its group of ranks.
    - No rank holds more positions than a phase's max_rank_tokens.
    - With spec.fills every rank of every microbatch has an example, where there are enough."""
    at = np.concatenate([positions for positions, _ in plans])
    assert np.array_equal(np.sort(at), np.arange(layout.num_examples)), "not every example once"
    enough = layout.num_examples >= len(plans) * layout.num_ranks and not spec.group_size
    for positions, plan in plans:
        assert np.array_equal(plan.layout.example_id, layout.example_id[positions])
        for phase in spec.phases:
            move, size = plan.rearrangement(phase), spec.group_size or layout.num_ranks
            items = plan.layout.item_lengths(phase)
            assert np.array_equal(np.sort(move.order), np.arange(len(items))), f"{phase}: an item"
            assert (move.source_rank[move.order] // size == move.target_rank // size).all()
            cap = spec.balance.enabled and getattr(spec.balance, phase).max_rank_tokens
            assert not cap or plan.positions(phase).max(initial=0) <= cap, f"{phase}: above the cap"
        assert not (spec.fills and enough) or plan.llm.target_sizes.all(), "a rank has no example"


def _counts(layout: BatchLayout, spec: PlanSpec) -> Iterator[int]:
    """Numbers of microbatches that may be the fewest that the caps allow. Without balancing: the
    one for which no rank's share is above them, cut in order. Raises ValueError without a cap."""
    capped = with_caps(layout, spec)
    caps = capped.hard_caps
    if not caps:
        raise ValueError("as few microbatches as the caps allow are asked for, and there is none: "
                         "set balance.llm.max_rank_tokens or fsdp.memory_gb")
    sizes = {phase: _positions(layout, phase) for phase in caps}
    for phase, cap in caps.items():
        longest = layout.item_lengths(phase).max(initial=0)
        if longest > cap:
            raise CapError(f"balance.{phase}.max_rank_tokens = {cap} is below the {longest} "
                           "positions of one item: no number of microbatches helps")
    least = max(1, *(-(-int(sizes[phase].sum()) // (cap * layout.num_ranks))
                     for phase, cap in caps.items()))
    if spec.balance.enabled:
        yield from range(least, 4 * least + 9)
        return
    most = max(int(layout.examples_per_rank.max(initial=0)), least)
    for count in range(least, most):
        slot = layout.rank_of_example * count + layout.in_order(count)
        if all(np.bincount(slot, sizes[phase]).max() <= cap for phase, cap in caps.items()):
            yield count
            return
    yield most


def with_caps(layout: BatchLayout, spec: PlanSpec, num_microbatches: int = 1) -> PlanSpec:
    """The spec with the caps that follow from memory, or from what is usual; see above."""
    balance = spec.balance
    for phase in spec.phases:
        policy = getattr(balance, phase)
        if policy.max_rank_tokens or "max_rank_tokens" not in POLICIES[policy.policy].options:
            continue
        cap, usual = spec.room.get(phase, 0), phase == "llm" and num_microbatches > 1
        if not cap and not usual:
            continue
        lengths = layout.item_lengths(phase)
        cap = cap or int(USUAL * lengths.sum() / (layout.num_ranks * num_microbatches))
        cap = max(cap, int(_positions(layout, phase).max(initial=0)), 1)
        balance = replace(balance, **{phase: replace(policy, max_rank_tokens=cap)})
    return spec if balance is spec.balance else replace(spec, balance=balance)


def divisions(
    layout: BatchLayout, spec: PlanSpec, count: int, hard: bool
) -> Sequence[Division]:
    """Divisions into `count` microbatches, the best first. hard: caps of memory are kept or there
    is none. Of more than MOST_PLANNED examples the one with the least bound is the best, and no
    usual cap is kept."""
    if not spec.balance.enabled:
        return [Division(layout.in_order(count), spec)]
    large = layout.num_examples > MOST_PLANNED
    capped = with_caps(layout, spec, 1 if large else count)
    if count == 1 and capped is spec and not spec.hard_caps:
        return [Division(np.zeros(layout.num_examples, np.int64), spec)]
    found = _found(layout, spec, capped, count, large)
    alike = found[0][1]._replace(spec=capped if spec.room else spec)
    loose = [] if hard else [alike._replace(spec=spec)]
    if large or count == 1:
        best = min(found[1:] or found, key=itemgetter(0))[1]
        return [best, *(one for _, one in found if one.rank is not None), *loose]
    if spec.room or spec.hard_caps:  # divisions that look for no cap may be below it, too
        free = replace(spec, room={}, balance=replace(spec.balance, **{
            p: replace(getattr(spec.balance, p), max_rank_tokens=0) for p in spec.hard_caps}))
        found += [(bound, Division(one.micro, capped)) for bound, one in _found(
            layout, free, with_caps(layout, free, count), count, large)]
    least, chosen = np.inf, []
    for bound, division in [(0.0, alike), *sorted(found[1:], key=itemgetter(0))]:
        if bound < least:
            time = _time_of_ranks(layout, division, count)
            if time < least:
                least, chosen = time, [division]
    return [*chosen, *loose]


def _planned(
    layout: BatchLayout, division: Division, k: int,
    planner: Callable[[BatchLayout, PlanSpec], StepPlan],
) -> tuple[np.ndarray, StepPlan]:
    """Microbatch k of a division, see plan_microbatches."""
    inside = division.micro == k
    part, at = layout.select(inside), np.flatnonzero(inside)
    try:
        return at, planner(part, division.spec)
    except CapError:
        if division.rank is None:
            raise
    return at, build_plan(part, *_below_caps(part, division.spec, division.rank[at]), division.spec)


def _below_caps(
    layout: BatchLayout, spec: PlanSpec, rank: np.ndarray
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """What assign_phases returns, where every item is on the rank of its example (n,). Raises
    CapError if that is above a cap."""
    encode = {phase: rank[layout.item_owner(phase)] for phase in spec.encoders}
    for phase, cap in spec.hard_caps.items():
        if np.bincount(rank, _positions(layout, phase), layout.num_ranks).max() > cap:
            raise CapError(f"balance.{phase}: max_rank_tokens = {cap}: no plan found")
    return encode, rank


def _found(
    layout: BatchLayout, spec: PlanSpec, capped: PlanSpec, count: int, large: bool
) -> list[tuple[float, Division]]:
    """(what a division takes at least, division): the one that is alike first, then others. Those
    of each group of ranks for themselves."""
    if 0 < spec.group_size < layout.num_ranks:
        groups = [(first, _found(part, inside, replace(inside, balance=capped.balance), count,
                                 large)) for first, part, inside in group_layouts(layout, spec)]
        return [_joined([(first, *found[min(k, len(found) - 1)]) for first, found in groups],
                        capped) for k in range(max(len(found) for _, found in groups))]
    costs, longest, sizes, caps = _tables(layout, capped, count)
    alike = np.arange(layout.num_examples) % count
    if large and not len(caps):  # alike by their number
        sums, most = (table.reshape(len(costs), -1, count) for table in (costs, longest))
        time = np.maximum(sums.sum(axis=1) / layout.num_ranks, most.max(axis=1)).sum()
        if time * layout.num_ranks <= 1.001 * costs.sum() and not spec.fills:
            return [(time, Division(alike, capped))]  # nothing waits
    costs, longest = costs[:, :layout.num_examples].T, longest[:, :layout.num_examples].T
    if len(caps) or not large:
        alike = balancing.assign_microbatches(costs, count)
    if spec.fills:
        alike = at_least(alike, layout.tokens_per_example, count, layout.num_ranks)
    room = np.maximum((PACKABLE * layout.num_ranks * caps).astype(np.int64),
                      sizes.sum(axis=0) // count)
    shorten = partial(
        core().shorten_step, costs.ravel(), longest.ravel(), sizes.ravel(), room,
        num_ranks=layout.num_ranks, num_microbatches=count,
        least=layout.num_ranks if spec.fills else 1)
    found = [(0.0, Division(alike, capped))]
    starts = [(alike, False), (alike, True)]
    slot = None if large and not len(caps) else _slots(
        costs.sum(axis=1), sizes, caps, count * layout.num_ranks)
    if slot is not None:
        micro, rank = np.divmod(slot, layout.num_ranks)
        found.append((0.0, Division(micro, capped, rank)))
        starts.append((micro, False))
    for micro, cut in starts:
        moved, bound = shorten(micro_of=micro, cut=cut)
        found.append((bound, Division(moved, capped)))
    return found


def _slots(cost: np.ndarray, sizes: np.ndarray, caps: np.ndarray, num_slots: int
           ) -> np.ndarray | None:
    """(n,) slot of each example, those of the largest cost first; None where no packing is found.
    The most expensive examples are packed first; where that fails those that are the largest for
    their cap; and where that fails these into the first slot that has room. cost: (n,), sizes:
    (n, c), caps: (c,)."""
    share = np.zeros(len(cost)) if not len(caps) else (sizes / caps).max(axis=1)
    largest, as_given = np.argsort(-share, kind="stable"), np.arange(len(cost))
    for order, first in ((as_given, cost), (as_given, (2**30 * share).astype(np.int64)),
                         (largest, np.zeros_like(cost))):
        packed = core().fill_slots(first, sizes[order].ravel(), caps, num_slots)
        if packed is not None:
            held, place = np.zeros((2, num_slots), np.int64)
            slot = at_least(packed[np.argsort(order)], cost, num_slots, 1)
            np.add.at(held, slot, cost)
            place[np.argsort(-held, kind="stable")] = np.arange(num_slots)
            return place[slot]
    return None


def _joined(
    parts: Sequence[tuple[int, float, Division]], spec: PlanSpec
) -> tuple[float, Division]:
    """(first rank, bound, division) of each group of ranks -> those of all."""
    known = all(division.rank is not None for _, _, division in parts)
    return max(bound for _, bound, _ in parts), Division(
        np.concatenate([division.micro for *_, division in parts]), spec,
        np.concatenate([first + division.rank for first, _, division in parts]) if known else None)


def _positions(layout: BatchLayout, phase: str) -> np.ndarray:
    """(n,) positions of each example in a phase."""
    if phase == "llm":
        return layout.tokens_per_example
    return np.bincount(layout.item_owner(phase), layout.item_lengths(phase),
                       layout.num_examples).astype(np.int64)


def _tables(
    layout: BatchLayout, spec: PlanSpec, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(costs of each example (phases, n), that of its most expensive item (phases, n), its
    positions (n, c) in the c phases that have a cap, these caps (c,), or the positions of one
    example where that is more: its items may go to several ranks). Of the first two n is filled up
    to a multiple of `count` with zeros."""
    n = layout.num_examples
    costs = np.zeros((len(spec.phases), n + -n % count), np.int64)
    longest, sizes, caps = np.zeros_like(costs), [], []
    for row, phase in enumerate(spec.phases):
        cost = spec.costs[phase](layout.item_lengths(phase))
        if phase == "llm":
            costs[row, :n] = longest[row, :n] = cost
        elif len(cost):
            owner = layout.item_owner(phase)
            first = np.flatnonzero(np.diff(owner, prepend=-1))  # of each example's items
            costs[row, owner[first]] = np.add.reduceat(cost, first)
            longest[row, owner[first]] = np.maximum.reduceat(cost, first)
        if cap := getattr(spec.balance, phase).max_rank_tokens:
            sizes.append(_positions(layout, phase))
            caps.append(max(cap, int(sizes[-1].max(initial=0))))
    return costs, longest, np.stack(sizes, axis=1) if sizes else np.zeros(
        (n, 0), np.int64), np.array(caps, np.int64)


def _time_of_ranks(layout: BatchLayout, division: Division, count: int) -> float:
    """What the ranks take of a step, waiting for the slowest one in every microbatch and phase;
    infinite where the caps allow no plan."""
    spec = division.spec
    phases = {phase: replace(getattr(spec.balance, phase), nodewise=False) for phase in PHASES}
    spec = replace(spec, balance=replace(spec.balance, **phases))  # nodes do not change the loads
    time = 0.0
    for k in range(count):
        inside = division.micro == k
        part = layout.select(inside)
        try:
            try:
                encode, llm = assign_phases(part, spec)
            except CapError:
                if division.rank is None:
                    raise
                encode, llm = _below_caps(part, spec, division.rank[inside])
        except CapError:
            return np.inf
        time += sum(float(spec.costs[phase].of_ranks(
            part.item_lengths(phase), llm if phase == "llm" else encode[phase],
            part.num_ranks).max(initial=0)) for phase in spec.phases)
    return time
