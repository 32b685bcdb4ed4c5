"""Which microbatch of a step each example is in.

All ranks meet in every microbatch. Objective: the sum over microbatches and phases of the slowest
rank's cost.

Microbatches that are alike (longest-processing-time-first on the phases' costs) make every one of
them wait for a long example of its own, so they are only the first candidate. The second is what
moves of single examples make of them: they gather long examples where others of their length are
(StepShortening in cpp/step_shortening.hpp). For that, every microbatch and phase is taken to last
max(mean rank, longest item); both candidates are then planned, and the shorter one is chosen.

Invariants:
- Every example is in one microbatch.
- The chosen candidate takes no longer than the microbatches that are alike, by the plans of both.
- With spec.fills every microbatch has an example for each rank, where there are enough.
- No rank gets more LLM positions in a microbatch than max_rank_tokens. Where the recipe sets none,
  the second candidate is planned with a cap of its own: the longest example or USUAL times an even
  share, which is what a rank of the first candidate holds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from operator import itemgetter

import numpy as np

from orchmllm.plan import balance as balancing
from orchmllm.plan.assign import (
    PHASES,
    PlanSpec,
    assign_phases,
    at_least,
    example_costs,
    group_layouts,
)
from orchmllm.plan.balance import POLICIES, CapError, core
from orchmllm.plan.layout import BatchLayout

MOST_PLANNED = 2**14  # examples of a step whose candidates are planned before one is chosen
USUAL = 1.1  # times an even share, what the fullest rank of a microbatch holds
PACKABLE = 0.98  # of a cap is what examples of different lengths can be packed into


def assign_microbatches(
    layout: BatchLayout, spec: PlanSpec, num_microbatches: int
) -> tuple[np.ndarray, PlanSpec]:
    """((n,) microbatch of each example, the spec by which each microbatch is to be planned).
    Without balancing every rank's share is cut in order. Of more than MOST_PLANNED examples the
    second candidate is taken without a plan, and without a cap of its own."""
    if not spec.balance.enabled:
        sizes = layout.examples_per_rank
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        slot = np.arange(layout.num_examples) - first
        return slot * num_microbatches // np.maximum(sizes[layout.rank_of_example], 1), spec
    large = layout.num_examples > MOST_PLANNED
    capped = spec if large else _with_cap(layout, spec, num_microbatches)
    alike, *shorter = _candidates(layout, spec, capped, num_microbatches)
    if large:
        return shorter[0], spec
    return min([(alike, spec), *((micro, capped) for micro in shorter)],
               key=lambda one: _time_of_ranks(layout, *one, num_microbatches))


def _with_cap(layout: BatchLayout, spec: PlanSpec, num_microbatches: int) -> PlanSpec:
    """The spec with a cap of the LLM's positions, where it has none and its policy takes one."""
    llm = spec.balance.llm
    if llm.max_rank_tokens or "max_rank_tokens" not in POLICIES[llm.policy].options:
        return spec
    tokens = layout.tokens_per_example
    even = tokens.sum() / (layout.num_ranks * num_microbatches)
    llm = replace(llm, max_rank_tokens=max(int(USUAL * even), int(tokens.max(initial=0)), 1))
    return replace(spec, balance=replace(spec.balance, llm=llm))


def cut_step(
    layout: BatchLayout, spec: PlanSpec, num_microbatches: int
) -> tuple[list[tuple[np.ndarray, BatchLayout]], PlanSpec]:
    """((ascending positions in the step, layout) of the examples of each microbatch, the spec by
    which each is to be planned)."""
    if num_microbatches == 1:
        return [(np.arange(layout.num_examples), layout)], spec
    micro, spec = assign_microbatches(layout, spec, num_microbatches)
    return [(np.flatnonzero(micro == k), layout.select(micro == k))
            for k in range(num_microbatches)], spec


def _candidates(
    layout: BatchLayout, spec: PlanSpec, capped: PlanSpec, num_microbatches: int
) -> list[np.ndarray]:
    """Microbatch of each example (n,), those of each group of ranks for themselves: microbatches
    that are alike; what moves make of them, and of the sorted examples that were cut, below the
    caps of `capped`, the one that is shorter by the costs first."""
    if 0 < spec.group_size < layout.num_ranks:
        groups = [_candidates(part, inside, replace(inside, balance=capped.balance),
                              num_microbatches) for _, part, inside in group_layouts(layout, spec)]
        return [np.concatenate(parts) for parts in zip(*groups, strict=True)]
    costs = example_costs(layout, spec)
    alike = balancing.assign_microbatches(costs, num_microbatches)
    if spec.fills:
        alike = at_least(alike, layout.tokens_per_example, num_microbatches, layout.num_ranks)
    longest, sizes, room = _tables(layout, capped, num_microbatches)
    shorten = partial(
        core().shorten_step, costs.ravel(), longest.ravel(), sizes.ravel(), room, alike,
        layout.num_ranks, num_microbatches, least=layout.num_ranks if spec.fills else 1)
    moved = shorten(cut=False)
    nothing_waits = moved[1] <= 1.001 * float(costs.sum())
    shorter = sorted([moved, moved if nothing_waits else shorten(cut=True)], key=itemgetter(1))
    return [alike, *(micro for micro, _ in shorter)]


def _tables(
    layout: BatchLayout, spec: PlanSpec, num_microbatches: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(cost of the longest item of each example (n, phases), its positions (n, c) of the c phases
    that have a cap, positions (c,) for which a microbatch has room: PACKABLE of what its ranks may
    hold, or an even share)."""
    longest = np.zeros((layout.num_examples, len(spec.phases)), np.int64)
    sizes, room = np.zeros((layout.num_examples, 0), np.int64), []
    for column, phase in enumerate(spec.phases):
        lengths, owner = layout.item_lengths(phase), layout.item_owner(phase)
        np.maximum.at(longest[:, column], owner, spec.costs[phase](lengths))
        if cap := getattr(spec.balance, phase).max_rank_tokens:
            size = np.bincount(owner, lengths, layout.num_examples).astype(np.int64)
            sizes = np.column_stack([sizes, size])
            room.append(max(int(PACKABLE * cap * layout.num_ranks),
                            int(lengths.sum()) // num_microbatches))
    return longest, sizes, np.array(room, np.int64)


def _time_of_ranks(
    layout: BatchLayout, micro: np.ndarray, spec: PlanSpec, num_microbatches: int
) -> float:
    """What the ranks take of a step, waiting for the slowest one in every microbatch and phase;
    infinite where the caps allow no plan. micro: (n,)."""
    phases = {phase: replace(getattr(spec.balance, phase), nodewise=False) for phase in PHASES}
    spec = replace(spec, balance=replace(spec.balance, **phases))  # nodes do not change the loads
    time = 0.0
    for k in range(num_microbatches):
        part = layout.select(micro == k)
        try:
            encode, llm = assign_phases(part, spec)
        except CapError:
            return np.inf
        time += sum(float(spec.costs[phase].of_ranks(
            part.item_lengths(phase), llm if phase == "llm" else encode[phase],
            part.num_ranks).max(initial=0)) for phase in spec.phases)
    return time
