"""What each rank processes of a planned microbatch, summed up for the prediction of its memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from orchmllm.models.flops import Lengths, item_rank, planned_lengths
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.step import StepPlan


@dataclass(frozen=True)
class Loads:
    """What each of d ranks processes in one microbatch: phase -> Lengths of (d,) sums.
    received: phase of media -> (d,) rows that arrive, features for the rank's LLM sequences or
    states for its generator. pairs: phase
    -> (d,) sums of the items' squared positions, which attention costs. gathered: (d,) positions of
    shared examples, whose keys and values a rank gets in every layer."""

    phases: Mapping[str, Lengths]
    received: Mapping[str, np.ndarray]
    pairs: Mapping[str, np.ndarray] = field(default_factory=dict)
    gathered: np.ndarray | float = 0.0

    def each(self, change: Callable[[str, np.ndarray], np.ndarray]) -> Loads:
        """With change(phase, values) in place of the values of every phase; features arrive in the
        LLM's."""
        return Loads({p: Lengths(change(p, x.rows), change(p, x.positions), change(p, x.tokens))
                      for p, x in self.phases.items()},
                     {p: change("llm", x) for p, x in self.received.items()},
                     {p: change(p, x) for p, x in self.pairs.items()},
                     change("llm", np.asarray(self.gathered)))


def loads_of(plan: StepPlan) -> Loads:
    """The loads of a planned microbatch."""
    d = plan.layout.num_ranks
    received, nothing = {}, np.zeros(d)
    phases = dict.fromkeys(EVERY_PHASE, Lengths(nothing, nothing, nothing))
    pairs = dict.fromkeys(EVERY_PHASE, nothing)
    for phase in plan.spec.phases:
        rank = item_rank(plan, phase)
        lengths = planned_lengths(plan, phase)
        before = 0.0 if lengths.before is None else lengths.before.astype(float)
        *sums, pairs[phase] = (np.bincount(rank, values, d) for values in (
            lengths.rows, lengths.positions, lengths.tokens,
            (before + lengths.positions)**2 - before**2))
        phases[phase] = Lengths(*sums)
        if phase in plan.feature:
            owner = plan.feature[phase]
            tokens = plan.moved_tokens(phase)[owner.order]
            received[phase] = np.bincount(owner.target_rank, tokens, d)
    return Loads(phases, received, pairs, gathered_positions(plan))


def gathered_positions(plan: StepPlan) -> np.ndarray:
    """(d,) positions of the examples that each rank shares."""
    if plan.pieces is None:
        return np.zeros(plan.layout.num_ranks)
    positions = plan.layout.tokens_per_example * (np.bincount(plan.pieces.example) > 1)
    return np.bincount(plan.texts.target_rank, positions[plan.texts.order], plan.layout.num_ranks)
