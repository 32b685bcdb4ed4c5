"""balance.calibrate_steps: the planner's costs, fitted to the phase times of a run's own steps.

After a first step, which is slower, so many steps are measured. One rank fits, all get its integers
(orchmllm.plan.fit_cost) and plan by them from the first step on that no rank can have planned yet.
They are part of the checkpoint, so a run that resumes plans as the one before.

Times are those of orchmllm.runtime.measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.config.balance import BalanceConfig
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.balance import POLICIES
from orchmllm.plan.cost import CostModel
from orchmllm.plan.fit_cost import Measured, fit_costs
from orchmllm.plan.step import PHASES, StepPlan

FIELDS = ("linear", "quadratic", "constant")


class FittedCosts(NamedTuple):
    """costs: phase -> FIELDS of its cost model. first_step: from which on plans use them."""

    first_step: int
    costs: dict[str, list[int]]

    def models(self, derived: Mapping[str, CostModel]) -> dict[str, CostModel]:
        """phase -> model."""
        return {phase: replace(model, **dict(zip(FIELDS, self.costs[phase], strict=True)))
                for phase, model in derived.items()}

    def describe(self, derived: Mapping[str, CostModel]) -> str:
        """One line: coefficients over those of the derived models."""
        parts = (f"{phase} {c[0] / max(d.linear, 1):.3g} and {c[1] / max(d.quadratic, 1):.3g}"
                 for (phase, c), d in zip(self.costs.items(), derived.values(), strict=True))
        return (f"costs fitted, used from step {self.first_step}; linear and quadratic part over "
                f"the derived: {', '.join(parts)}")


class Calibration:
    """Measures steps of an orchestrator until there are `balance.calibrate_steps` of them (0:
    never), and changes the costs that it plans by. derived: the models that all measured steps are
    planned by."""

    def __init__(self, balance: BalanceConfig, orchestrator: Orchestrator) -> None:
        self.derived, self._orchestrator = orchestrator.spec.costs, orchestrator
        self._num_steps, self._done = balance.calibrate_steps, True  # until restart()
        self._scaled_only = [p for p in PHASES if self.derived[p].padded
                             or POLICIES[getattr(balance, p).policy].padded]

    def restart(self, fitted: FittedCosts | None) -> None:
        """Steps come (again) and are planned by the derived models. fitted: costs that were fitted
        before, which replace them where they did."""
        self._orchestrator.reset_costs()
        self._seen, self._samples = -1, {phase: [] for phase in PHASES}  # -1: one to warm up
        self._done = not self._num_steps
        if fitted is not None and not self._done:
            self._use(fitted)

    def _use(self, fitted: FittedCosts) -> None:
        self._done = True
        self._orchestrator.change_costs(fitted.models(self.derived), fitted.first_step)

    def add(self, plans: Sequence[StepPlan], seconds: np.ndarray, next_step: int
            ) -> FittedCosts | None:
        """A measured step: its microbatches' plans, seconds (d, phases) of all ranks (the first
        ones are those of this rank's plans) -> the fit, once, when this was the last step it needs:
        the costs of all that are not planned yet. Collective then. next_step: the first that no
        rank has planned."""
        if self._done:
            return None
        self._seen += 1
        if self._seen and dist.get_rank() == 0:
            for i, phase in enumerate(PHASES):
                sums = sum(_sums(plan, phase, self.derived[phase]) for plan in plans)
                self._samples[phase].append(np.column_stack([sums, seconds[: len(sums), i]]))
        if self._seen < self._num_steps:
            return None
        fitted = FittedCosts(next_step, self._fit())
        self._use(fitted)
        return fitted

    def _fit(self) -> dict[str, list[int]]:
        """Coefficients, the same on all ranks: those of rank 0."""
        device = self._orchestrator.device
        shared = torch.zeros(len(PHASES), len(FIELDS), dtype=torch.int64, device=device)
        if dist.get_rank() == 0:
            measured = {p: Measured(*np.concatenate(x).T) for p, x in self._samples.items()}
            models = fit_costs(self.derived, measured, self._scaled_only)
            shared = torch.tensor([[getattr(models[p], f) for f in FIELDS] for p in PHASES],
                                  dtype=torch.int64, device=device)
        dist.broadcast(shared, 0)
        return dict(zip(PHASES, shared.tolist(), strict=True))


def coefficients(costs: Mapping[str, CostModel]) -> dict[str, dict[str, int]]:
    """What a row of metrics.jsonl says of them."""
    return {phase: {"linear": model.linear, "quadratic": model.quadratic}
            for phase, model in costs.items()}


def _sums(plan: StepPlan, phase: str, model: CostModel) -> np.ndarray:
    """(d, 2) linear and quadratic part of the phase's items on each rank."""
    move = plan.rearrangement(phase)
    lengths = plan.item_lengths(phase)[move.order]
    out = np.zeros((plan.layout.num_ranks, 2))
    if model.padded:  # one number: it is fitted by a factor
        out[:, 0] = model.of_ranks(lengths, move.target_rank, plan.layout.num_ranks)
        return out
    np.add.at(out, move.target_rank,
              np.stack([model.linear_part(lengths), model.quadratic_part(lengths)], axis=1))
    return out
