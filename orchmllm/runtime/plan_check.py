"""What the plans of a step really did: the figures of the log, and the comparison with what was
processed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter

import numpy as np

from orchmllm.data.loading.step_loader import Step
from orchmllm.plan.step import PHASES, StepPlan, imbalance


def check_processed(step: Step, rank: int, processed: Mapping[str, Sequence[int]]) -> None:
    """Raises RuntimeError if a rank processed other items than its plans say. processed: phase ->
    lengths of the items of all microbatches, in their order."""
    planned: dict[str, list[int]] = {p: [] for p in PHASES}
    for micro in step.micro:
        for phase in PHASES:
            planned[phase] += micro.rank_plan.exchange(phase).lengths.tolist()
    if planned != processed:
        raise RuntimeError(f"step {step.index}: rank {rank} processed other items than its plan "
                           "says; this is a bug in orchmllm")


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


def cost_coefficients(plans: Sequence[StepPlan]) -> dict[str, dict[str, int]]:
    """Per phase, the FLOP of a position and of a pair of positions that a step was planned by."""
    return {phase: {"linear": model.linear, "quadratic": model.quadratic}
            for phase, model in plans[0].spec.costs.items()}
