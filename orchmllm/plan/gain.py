"""What balancing gains, as a share of the time that the steps would take as sampled: predicted by
the cost models, and measured by steps that run as sampled (balance.measure_every).

Objective: a figure that is not taken for what it is not. What is predicted is never called
measured, and a step as sampled is compared with the balanced steps before it by the time of a unit
of predicted cost, since no two steps have the same examples.

Invariants: a balanced step counts in one comparison, that with the first step as sampled after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Gain(NamedTuple):
    """Of some balanced steps. measured: beside the step as sampled that came after them."""

    predicted: float
    measured: float


class GainMeter:
    """Compares balanced steps with the step as sampled that follows them: the time that this one
    took for each unit of its predicted cost says what they would have taken as sampled."""

    def __init__(self) -> None:
        self._balanced = np.zeros(3)  # cost as sampled, cost as planned, seconds

    def add(self, before: float, after: float, seconds: float, as_sampled: bool) -> Gain | None:
        """A step, in their order: its predicted cost as sampled and as planned, in any unit, and
        the seconds of its slowest ranks. Returns the gain of the balanced steps since the last one
        as sampled if this is one, None if there were none or nothing was measured."""
        if not as_sampled:
            self._balanced += before, after, seconds
            return None
        (cost, planned, took), self._balanced = self._balanced.tolist(), np.zeros(3)
        if not (cost and took and before and seconds):
            return None
        return Gain(1 - planned / cost, 1 - took / (seconds / before * cost))


def slowest_costs(phases: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    """Figures of the phases (orchmllm.plan.step.phase_figures) -> cost as sampled and as processed,
    in kFLOP: phases run one after the other, and all ranks wait for the slowest one in each; moving
    rows costs nothing here. Numbers, or arrays with one number for each step."""
    before, after = (sum(p[f"imbalance_{when}"] * p["mean_cost_kflop"] for p in phases.values())
                     for when in ("before", "after"))
    return before, after


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """(lower quartile, median, upper quartile)."""
    return tuple(np.quantile(values, (0.25, 0.5, 0.75)).tolist())


def describe(gains: Sequence[Gain]) -> str:
    """The gains of some comparisons (>= 1) in words: medians, with the quartiles."""
    said = []
    for name, values in zip(Gain._fields, zip(*gains, strict=True), strict=True):
        low, middle, high = (100 * share for share in spread(values))
        said.append(f"{middle:.1f}% ({low:.1f} to {high:.1f}%) as {name}")
    return (f"balancing saved {', '.join(said)} (medians and quartiles; compared with steps as "
            f"sampled: {len(gains)})")
