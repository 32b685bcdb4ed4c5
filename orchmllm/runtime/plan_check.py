"""What the plans of a step really did: the figures of the log, and a guard against a balancer that
silently does nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from orchmllm.data.loading.step_loader import Step
from orchmllm.plan.step import PHASES, StepPlan, imbalance

CANARY_STEPS = 10  # unbalanced steps without any rearrangement after which a run is stopped


class Canary:
    """Raises RuntimeError if balancing is on and is not applied. enabled: balance.enabled of the
    recipe, read independently of the planner."""

    def __init__(self, enabled: bool, rank: int, world_size: int) -> None:
        self.enabled, self.rank, self.world_size = enabled, rank, world_size
        self._unmoved = 0

    def check(self, step: Step, processed: Mapping[str, Sequence[int]]) -> None:
        """What this rank processed (phase -> item lengths of all microbatches) is what the plan
        gave it, and plans do rearrange."""
        planned: dict[str, list[int]] = {p: [] for p in PHASES}
        for micro in step.micro:
            for phase in PHASES:
                planned[phase] += micro.rank_plan.exchange(phase).lengths.tolist()
        if planned != processed:
            raise RuntimeError(f"step {step.index}: rank {self.rank} processed other items than "
                               "its plan says; this is a bug in orchmllm")
        if not self.enabled or self.world_size == 1:
            return
        on = [plan for plan in step.plans if plan.spec.balance.enabled]
        if len(on) < len(step.plans) and not step.plans[0].spec.balance.min_gain:
            raise RuntimeError("balance.enabled is true, but the plan was made without balancing")
        if any(plan.can_improve for plan in on):
            moved = any(plan.rearranges for plan in on)
            self._unmoved = 0 if moved else self._unmoved + 1
        if self._unmoved >= CANARY_STEPS:
            self.finish()

    def finish(self) -> None:
        """At the end of a run, however short."""
        if self._unmoved:
            raise RuntimeError(
                f"balance.enabled is true and the last {self._unmoved} unbalanced steps could have "
                "been balanced, but no plan rearranged anything; set balance.enabled=false to run "
                "unbalanced")


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
