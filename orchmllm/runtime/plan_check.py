"""What the plans of a step really did: the figures of the log, the comparison with what was
processed, and whether balancing had any effect."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from orchmllm.data.loading.step_loader import Step
from orchmllm.plan.step import PHASES, StepPlan, imbalance


class PlanCheck:
    """Compares what this rank processed with its plans, and notices a run in which balancing never
    has an effect. enabled: balance.enabled of the recipe."""

    def __init__(self, enabled: bool, rank: int, world_size: int) -> None:
        self._rank = rank
        self._nothing_moved = enabled and world_size > 1  # until a plan moves something
        self._unmoved = 0  # steps that could have been balanced

    def check(self, step: Step, processed: Mapping[str, Sequence[int]]) -> None:
        """processed: phase -> lengths of the items of all microbatches, in their order. Raises
        RuntimeError if they are not those of the plan."""
        planned: dict[str, list[int]] = {p: [] for p in PHASES}
        for micro in step.micro:
            for phase in PHASES:
                planned[phase] += micro.rank_plan.exchange(phase).lengths.tolist()
        if planned != processed:
            raise RuntimeError(f"step {step.index}: rank {self._rank} processed other items than "
                               "its plan says; this is a bug in orchmllm")
        if self._nothing_moved:
            self._nothing_moved = not any(plan.rearranges for plan in step.plans)
            self._unmoved += any(plan.can_improve for plan in step.plans)

    def warning(self) -> str:
        """What a user should know of the balancing of the steps so far; '' for nothing."""
        if not (self._nothing_moved and self._unmoved):
            return ""
        return (f"warning: balance.enabled is true, but balancing had no effect: {self._unmoved} "
                "steps were sampled unbalanced, and no plan moved anything. Lower "
                "balance.*.tolerance and balance.min_gain, set balance.whole_examples=false or "
                "raise train.batch_size; or set balance.enabled=false")


def combined_stats(plans: Sequence[StepPlan]) -> dict[str, dict[str, float]]:
    """Per phase, over a step's microbatches: imbalance before and after (sum of the slowest rank's
    cost / sum of the mean), that mean in kFLOP, and bytes moved between ranks and between nodes."""
    out = {}
    for phase in PHASES:
        before, after = np.array([plan.phase_cost(phase) for plan in plans], float).swapaxes(0, 1)
        stats = [plan.stats[phase] for plan in plans]
        out[phase] = {
            "imbalance_before": imbalance(before),
            "imbalance_after": imbalance(after),
            "mean_cost_kflop": float(before.mean(axis=1).sum()),
            **{name: sum(map(itemgetter(name), stats)) for name in stats[0]},
        }
    return out
