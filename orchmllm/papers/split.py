"""Which layers form which pipeline stage (OmniBal 4.2, balanced model partitioning)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations_with_replacement, product

import numpy as np

from orchmllm.papers.pipeline import simulate

METHODS = ("even", "parameters", "profile", "exact", "search")


@dataclass(frozen=True)
class Split:
    """cuts (N - 1,): first layer of every stage but the first. layers, stage_ms (N,): of each
    stage, forward and backward of a microbatch. simulated_ms: of an iteration."""

    cuts: tuple[int, ...]
    layers: tuple[int, ...]
    stage_ms: np.ndarray
    simulated_ms: float


def split_layers(forward_ms: np.ndarray, backward_ms: np.ndarray,
                 boundary_bytes: np.ndarray | None = None, *, num_stages: int,
                 num_microbatches: int, method: str = "search",
                 parameters: np.ndarray | None = None, bytes_per_s: float = np.inf,
                 radius: int = 2) -> Split:
    """Stages of consecutive layers. forward_ms, backward_ms (L,): of a microbatch; embedding and
    head belong to the first and the last layer. boundary_bytes (L - 1,): that layer k hands on.

    method: `even` in layers, `parameters` (L,) in parameters, `profile` in time, each by the
    nearest cuts; `exact`: the least longest stage, then the least sum of squares, by dynamic
    programming; `search`: from there by simulated time, two cuts at a time moved by up to `radius`.

    Raises ValueError for an unknown method and for fewer layers than stages."""
    time = np.asarray(forward_ms, float) + np.asarray(backward_ms, float)
    count = len(time)
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; choose one of {', '.join(METHODS)}")
    if not 1 <= num_stages <= count:
        raise ValueError(f"num_stages {num_stages} must be 1 to {count}, the number of layers")
    moved = np.zeros(count - 1) if boundary_bytes is None else np.asarray(boundary_bytes, float)

    def made(cuts: tuple[int, ...]) -> Split:
        at = [0, *cuts]
        stages = [np.add.reduceat(np.asarray(x, float), at) for x in (forward_ms, backward_ms)]
        comm = 1e3 * moved[np.array(cuts, np.int64) - 1] / bytes_per_s
        total = simulate(*(np.repeat(x[:, None], num_microbatches, axis=1) for x in stages),
                         comm_ms=comm)
        return Split(cuts, tuple(np.diff([*at, count]).tolist()), sum(stages), total)

    if method in ("even", "parameters", "profile"):
        weight = {"even": np.ones(count), "parameters": parameters, "profile": time}[method]
        return made(_nearest(np.asarray(weight, float), num_stages))
    best = made(_exact(time, num_stages))
    while method == "search" and num_stages > 1:
        around = {_shifted(best.cuts, pair, by) for pair in combinations_with_replacement(
            range(num_stages - 1), 2) for by in product(range(-radius, radius + 1), repeat=2)}
        found = min((made(c) for c in sorted(around) if 0 < c[0] and c[-1] < count and all(
            np.diff(c) > 0)), key=lambda s: s.simulated_ms)
        if found.simulated_ms >= best.simulated_ms * (1 - 1e-12):
            break
        best = found
    return best


def _shifted(cuts: tuple[int, ...], pair: tuple[int, int], by: tuple[int, int]) -> tuple[int, ...]:
    out = list(cuts)
    for k, d in zip(pair, by, strict=True):
        out[k] += d
    return tuple(out)


def _nearest(weight: np.ndarray, num_stages: int) -> tuple[int, ...]:
    """Cuts nearest to equal shares of a weight, each stage with a layer at least."""
    total, cuts = np.concatenate([[0.0], np.cumsum(weight)]), []
    for k in range(1, num_stages):
        low = (cuts[-1] if cuts else 0) + 1
        high = len(weight) - (num_stages - k)
        aim = np.abs(total[low:high + 1] - total[-1] * k / num_stages)
        cuts.append(low + int(aim.argmin()))
    return tuple(cuts)


def _exact(time: np.ndarray, num_stages: int) -> tuple[int, ...]:
    total = np.concatenate([[0.0], np.cumsum(time)])
    stage = total[None, :] - total[:, None]  # [i, j]: layers i to j - 1
    stage[np.tril_indices(len(total))] = np.inf
    longest = stage[0]
    for _ in range(num_stages - 1):
        longest = np.maximum(longest[:, None], stage).min(axis=0)
    cost = np.where(stage <= longest[-1] * (1 + 1e-12), stage, np.inf)**2
    best, before = cost[0], []
    for _ in range(num_stages - 1):
        table = best[:, None] + cost
        before.append(table.argmin(axis=0))
        best = table.min(axis=0)
    cuts = [len(time)]
    for back in reversed(before):
        cuts.append(int(back[cuts[-1]]))
    return tuple(reversed(cuts[1:]))
