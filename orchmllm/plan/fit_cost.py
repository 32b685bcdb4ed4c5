"""Cost models fitted to measured phase times (method: least squares beside the derived model).

A balanced plan gives every rank the same predicted cost, so measured steps alone cannot tell the
linear from the quadratic part, nor either from what a batch costs anyway. So the derived model is
the prior: a phase's time is
    seconds * speed = overhead + u * linear + v * quadratic
with u, v near 1 and overhead near 0 (standard deviation a half each, overhead in units of the mean
time), u, v and overhead >= 0. The less the residual, the more the measurements count.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from orchmllm.plan.cost import CostModel

PRIOR = 0.5  # standard deviation of u - 1, v - 1 and of the overhead
LEAST_NOISE = 1e-3  # of a measured time, relative


@dataclass(frozen=True)
class Measured:
    """k batches of a phase. linear, quadratic (k,): sums over their items of the derived model's
    two parts. seconds (k,)."""

    linear: np.ndarray
    quadratic: np.ndarray
    seconds: np.ndarray


def fit_costs(
    derived: Mapping[str, CostModel], measured: Mapping[str, Measured],
    scaled_only: Collection[str] = (),
) -> dict[str, CostModel]:
    """phase -> model with fitted integers, in the derived unit: FLOP at the mean speed of all
    phases together, so that the sum of all predictions stays what it was. scaled_only: phases whose
    cost is not a sum over items (padding): they get one factor for both parts. A phase without
    items or time keeps its model. Raises ValueError for a time that is not one."""
    factors, seconds, flop = {}, 0.0, 0.0
    for phase, m in measured.items():
        if not np.all(np.isfinite(m.seconds) & (m.seconds >= 0)):
            index = int(np.argmax(~(np.isfinite(m.seconds) & (m.seconds >= 0))))
            raise ValueError(f"measured[{phase!r}].seconds[{index}] = {m.seconds[index]} is not a "
                             "time")
        cost = float(np.sum(m.linear) + np.sum(m.quadratic))
        if cost <= 0 or m.seconds.sum() <= 0:
            continue
        per_flop = float(m.seconds.sum()) / cost
        u, v = (1.0, 1.0) if phase in scaled_only else _shape(m, per_flop)
        factors[phase] = u * per_flop, v * per_flop
        seconds += factors[phase][0] * float(m.linear.sum())
        seconds += factors[phase][1] * float(m.quadratic.sum())
        flop += cost
    return {phase: _scaled(model, *(f * flop / seconds for f in factors[phase]))
            if phase in factors else model for phase, model in derived.items()}


def _shape(m: Measured, per_flop: float) -> tuple[float, float]:
    """(u, v): the non-negative least squares of the module's docstring, by trying every subset."""
    scale = float(np.mean(m.seconds)) or 1.0
    design = np.stack([np.ones(len(m.seconds)), m.linear * per_flop / scale,
                       m.quadratic * per_flop / scale], axis=1)
    times = m.seconds / scale
    noise = _noise(design, times) / PRIOR
    design = np.concatenate([design, noise * np.eye(3)])
    times = np.concatenate([times, noise * np.array([0.0, 1.0, 1.0])])
    best, least = np.array([0.0, 1.0, 1.0]), np.inf
    for active in (list(c) for k in (3, 2, 1) for c in combinations(range(3), k)):
        x = np.zeros(3)
        x[active] = np.linalg.lstsq(design[:, active], times, rcond=None)[0]
        error = float(np.sum((design @ x - times) ** 2))
        if (x >= 0).all() and x[1] + x[2] > 0 and error < least:
            best, least = x, error
    return float(best[1]), float(best[2])


def _noise(design: np.ndarray, times: np.ndarray) -> float:
    """Relative standard deviation of what no choice of the three explains."""
    left = len(times) - design.shape[1]
    if left < 1:
        return PRIOR
    x = np.linalg.lstsq(design, times, rcond=None)[0]
    return max(LEAST_NOISE, float(np.sqrt(np.sum((design @ x - times) ** 2) / left)))


def _scaled(model: CostModel, u: float, v: float) -> CostModel:
    """Every item keeps a cost: an item of cost zero would never be moved."""
    return replace(model, linear=max(1, round(u * model.linear)),
                   quadratic=round(v * model.quadratic), constant=round(u * model.constant))
