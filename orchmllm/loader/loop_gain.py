"""What balancing gains in a loop that is not ours: every Nth step is planned as sampled, and the
time that the loop spends on it is compared with that of the balanced steps before it."""

from __future__ import annotations

from orchmllm.batch import UNKNOWN, Step
from orchmllm.plan.cost import CostModel
from orchmllm.plan.gain import Gain, GainMeter
from orchmllm.plan.step import sampled_costs


def costs_of(step: Step) -> tuple[int, int]:
    """Predicted cost of a step's slowest ranks, as sampled and as planned, in kFLOP."""
    spec = step.plans[0].spec
    before = sampled_costs(step.layout, spec, "llm", len(step.plans))
    return (int(before.max(axis=1).sum()),
            sum(int(plan.planned_cost("llm").max()) for plan in step.plans))


class LoopGain:
    """gains: those measured so far, the newest last, in all passes over a loader."""

    def __init__(self) -> None:
        self.gains: list[Gain] = []
        self._meter, self._model = GainMeter(), None
        # Of steps whose time is not known yet: cost model, costs, and whether as sampled.
        self._waiting: dict[int, tuple[CostModel, tuple[int, int], bool]] = {}

    def committed(self, step: Step) -> None:
        """After COMMIT of each step, in their order; it says how long the slowest rank's loop took
        for an earlier step (Step.loop)."""
        self._waiting[step.index] = (
            step.plans[0].spec.costs["llm"], costs_of(step), step.as_sampled)
        index, microseconds = step.loop
        if microseconds == UNKNOWN:
            return
        model, costs, as_sampled = self._waiting.pop(index)
        if model != self._model:  # the policy was chosen anew: costs before are in another unit
            self._meter, self._model = GainMeter(), model
        if gain := self._meter.add(*costs, microseconds, as_sampled):
            self.gains.append(gain)
