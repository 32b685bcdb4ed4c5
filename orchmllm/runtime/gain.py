"""How much shorter balancing makes a step. Phases run one after the other and all ranks wait for
the slowest one in each, so a step takes the sum of the slowest ranks' times; waiting for data, the
optimizer and what hides behind computing are not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def predicted(phases: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    """`phases` of a row of metrics -> cost as sampled and as processed, in kFLOP, by the cost
    model. Moving rows costs nothing here. Numbers, or arrays with one number for each row."""
    before, after = (sum(p[f"imbalance_{when}"] * p["mean_cost_kflop"] for p in phases.values())
                     for when in ("before", "after"))
    return before, after


def measured(phases: Mapping[str, Mapping[str, Any]], times: Mapping[str, Any]) -> tuple[Any, Any]:
    """`phases` and `measured` of a row (the same step) -> seconds as sampled and as processed.

    As processed: what the slowest ranks took, moving rows included. As sampled, a phase that was
    processed so took just that; of others nothing was measured: their measured mean times the
    imbalance that the batch was sampled with."""
    before, slowest = times["slowest_s"]["exchange"] * 0.0, times["slowest_s"]
    for p, stats in phases.items():
        mean = slowest[p] / np.maximum(times["imbalance"][p], 1e-12)
        before = before + np.where(stats["imbalance_before"] == stats["imbalance_after"],
                                   slowest[p], stats["imbalance_before"] * mean)
    return before, sum(slowest.values())


class Gain:
    """Sums over the steps of a run, in constant memory."""

    def __init__(self) -> None:
        self._phases: dict[int, dict] = {}  # of the newest two steps
        self._cost, self._seconds = np.zeros(2), np.zeros(2)
        self._step_s = self._wait_s = 0.0
        self._unbalanced = 0  # steps that were sampled so by over 5% in some phase

    def add(self, row: dict) -> None:
        """row: of metrics; on a GPU it holds the times of the step before."""
        step = row["step"]
        self._phases = {k: v for k, v in self._phases.items() if k == step - 1}
        self._phases[step] = row["phases"]
        self._cost += predicted(row["phases"])
        self._unbalanced += any(p["imbalance_before"] > 1.05 for p in row["phases"].values())
        times = row["measured"]
        if times and times["step"] in self._phases:
            self._seconds += measured(self._phases[times["step"]], times)
        self._step_s += row["step_s"]
        self._wait_s += row["data_wait_s"]

    def predicted(self) -> float:
        """Share of the phases' time that balancing saved, 0 without any cost."""
        return saved(*self._cost)

    def warning(self) -> str:
        """What to change where balancing is on and had no effect in any step; '' where it had, or
        where all steps were sampled balanced."""
        if not self._unbalanced or self._cost[0] != self._cost[1]:
            return ""
        return ("warning: balancing had no effect: none of the "
                f"{self._unbalanced} steps that were sampled unbalanced became shorter. Lower "
                "balance.*.tolerance or balance.min_gain, set balance.whole_examples=false, raise "
                "train.batch_size, or set balance.enabled=false")

    def describe(self) -> str:
        """One line."""
        wait = f"data wait {100 * self._wait_s / max(self._step_s, 1e-9):.1f}%"
        if self._cost[0] == self._cost[1]:  # one rank, or balancing is off
            return f"balancing moved nothing; {wait}"
        seconds = f"{100 * saved(*self._seconds):.1f}%" if self._seconds[0] else "not"
        return (f"balancing saved {100 * self.predicted():.1f}% of the step (predicted), {seconds} "
                f"measured; {wait}")


def saved(before: float, after: float) -> float:
    """Share that is saved."""
    return float(1 - after / before) if before else 0.0
