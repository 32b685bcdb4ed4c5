"""How much shorter balancing makes a step, by the cost model. Phases run one after the other and
all ranks wait for the slowest one in each, so a step takes the sum of the slowest ranks' times;
waiting for data, the optimizer and what hides behind computing are not part of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def predicted(phases: Mapping[str, Mapping[str, Any]]) -> tuple[Any, Any]:
    """`phases` of a row of metrics -> cost as sampled and as processed, in kFLOP. Moving rows costs
    nothing here. Numbers, or arrays with one number for each row."""
    before, after = (sum(p[f"imbalance_{when}"] * p["mean_cost_kflop"] for p in phases.values())
                     for when in ("before", "after"))
    return before, after


def saved(before: float, after: float) -> float:
    """Share that is saved."""
    return float(1 - after / before) if before else 0.0
