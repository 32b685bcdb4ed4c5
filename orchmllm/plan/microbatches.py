"""Which microbatch of a step each example is in.

All ranks meet in every microbatch. Objective: the sum over microbatches and phases of the slowest
rank's cost.

Microbatches that are alike (longest-processing-time-first on the phases' costs) make every one of
them wait for a long example of its own, so they are only the first candidate. The second is what
moves of single examples make of them: they gather long examples where others of their length are
(StepShortening in cpp/microbatches.hpp). For that, every microbatch and phase is taken to last
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
    if num_microbatches == 1:
        return np.zeros(layout.num_examples, np.int64), spec
    plan = partial(_in_groups, layout, spec, num_microbatches)
    if layout.num_examples > MOST_PLANNED:
        return min(plan(spec, False), plan(spec, True), key=itemgetter(1))[0], spec
    capped = _with_cap(layout, spec, num_microbatches)
    candidates = [(plan(None, False)[0], spec), (plan(capped, False)[0], capped),
                  (plan(capped, True)[0], capped)]
    return min(candidates, key=lambda one: _time_of_ranks(layout, *one, num_microbatches))


def _with_cap(layout: BatchLayout, spec: PlanSpec, num_microbatches: int) -> PlanSpec:
    """The spec with a cap of the LLM's positions, where it has none and its policy takes one."""
    llm = spec.balance.llm
    if llm.max_rank_tokens or "max_rank_tokens" not in POLICIES[llm.policy].options:
        return spec
    tokens = layout.tokens_per_example
    even = tokens.sum() / (layout.num_ranks * num_microbatches)
    llm = replace(llm, max_rank_tokens=max(int(USUAL * even), int(tokens.max(initial=0)), 1))
    return replace(spec, balance=replace(spec.balance, llm=llm))


def _in_groups(
    layout: BatchLayout, spec: PlanSpec, num_microbatches: int, capped: PlanSpec | None, cut: bool
) -> tuple[np.ndarray, int]:
    """(microbatch of each example (n,), how long the step is predicted to take) of one candidate,
    of each group of ranks for itself: without `capped` microbatches that are alike, else what moves
    make of them, or of the sorted examples that are cut, below the caps of `capped`."""
    if 0 < spec.group_size < layout.num_ranks:
        micro, times = zip(*(
            _in_groups(part, inside, num_microbatches, capped and replace(capped, group_size=0),
                       cut) for _, part, inside in group_layouts(layout, spec)), strict=True)
        return np.concatenate(micro), sum(times)
    costs = example_costs(layout, spec)
    alike = balancing.assign_microbatches(costs, num_microbatches)
    if spec.fills:
        alike = at_least(alike, layout.tokens_per_example, num_microbatches, layout.num_ranks)
    if capped is None:
        return alike, 0
    return _shortened(layout, capped, costs, alike, num_microbatches, cut)


def _shortened(
    layout: BatchLayout, spec: PlanSpec, costs: np.ndarray, micro: np.ndarray,
    num_microbatches: int, cut: bool,
) -> tuple[np.ndarray, int]:
    """(`micro` (n,) after the moves that shorten the step, its time by the costs). costs: (n,
    phases). cut: start from the sorted examples. A microbatch gets no more positions of a phase
    than PACKABLE of what its ranks may hold, or an even share."""
    longest, sizes, room = np.zeros_like(costs), [], []
    for column, phase in enumerate(spec.phases):
        lengths, owner = layout.item_lengths(phase), layout.item_owner(phase)
        np.maximum.at(longest[:, column], owner, spec.costs[phase](lengths))
        if cap := getattr(spec.balance, phase).max_rank_tokens:
            size = np.zeros(layout.num_examples, np.int64)
            np.add.at(size, owner, lengths)
            sizes.append(size)
            room.append(int(max(PACKABLE * cap * layout.num_ranks,
                                lengths.sum() / num_microbatches)))
    size = np.stack(sizes, axis=1) if sizes else np.zeros((layout.num_examples, 0), np.int64)
    return core().shorten_step(
        costs.ravel(), longest.ravel(), size.ravel(), np.array(room, np.int64), micro,
        layout.num_ranks, num_microbatches, least=layout.num_ranks if spec.fills else 1, cut=cut)


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
