"""How many positions collated batches have: what is seen of each batch, and what that says of the
positions that an example of a length takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import PACKED, PADDED, Microbatch
from orchmllm.plan.cost import CostModel

KNOTS = 64  # pairs of a length and its positions that are kept
Seen = tuple[int, int]


def tensor_in(batch: Any, name: str) -> Tensor | None:
    """The tensor that a batch has by this key or attribute, None where there is none."""
    try:
        value = batch[name]
    except (TypeError, KeyError, IndexError):
        value = getattr(batch, name, None)
    return value if isinstance(value, torch.Tensor) else None


def geometry_of(micro: Microbatch, batch: Any) -> tuple[int, Seen]:
    """(PADDED if a batch of several examples has a row for each, PACKED if they are joined, 0 where
    that does not show; the length of its longest example, and the positions that this one has)."""
    lengths = micro.plan.layout.tokens_per_example[micro.rank_plan.examples]
    longest, n = int(lengths.max(initial=0)), len(lengths)
    ids = tensor_in(batch, "input_ids")
    kind, size = _of_shape(ids.shape, n) if ids is not None and ids.dim() else _of_any(
        batch, lengths)
    if kind == PADDED:
        return PADDED, (longest, size)
    if kind == PACKED:
        return PACKED, (longest, _cut(lengths, size))
    return 0, (0, 0)


def _of_shape(shape: tuple[int, ...], n: int) -> tuple[int, int]:
    """By the input_ids, of any length."""
    if n < 2:
        return 0, 0
    if len(shape) > 1 and shape[0] == n:
        return PADDED, shape[1]
    return (PACKED, max(shape[:2])) if len(shape) == 1 or shape[0] == 1 else (0, 0)


def _of_any(batch: Any, lengths: np.ndarray) -> tuple[int, int]:
    """By the tensors whose sizes agree with the lengths."""
    longest, total = int(lengths.max(initial=0)), int(lengths.sum())
    values = batch.values() if isinstance(batch, Mapping) else (
        batch if isinstance(batch, list | tuple) else [batch])
    shown = 0, 0
    for shape in (value.shape for value in values if isinstance(value, Tensor)):
        # Some more for special tokens and multiples of 8, not any size: lengths may have another
        # unit.
        if (len(shape) > 1 and shape[0] == len(lengths) and longest <= shape[1] <= (
                1.25 * longest + 8) and shape[0] * shape[1] > 1.1 * total):
            return PADDED, shape[1]
        if 1.1 * longest < total <= max(shape[:2], default=0) <= 1.25 * total + 8:
            shown = PACKED, total
    return shown


def _cut(lengths: np.ndarray, total: int) -> int:
    """The number of positions at which each example was cut, if they have `total` together; that of
    the longest if nothing was."""
    low, high = 0, int(lengths.max(initial=0))
    while low < high:
        middle = (low + high) // 2
        if np.minimum(lengths, middle).sum() >= total:
            high = middle
        else:
            low = middle + 1
    return high


class Fit:
    """The positions of an example by its length, from pairs that all ranks have seen. knots: the
    same, sorted by length; positions never fall."""

    def __init__(self, knots: list[Seen] = ()) -> None:
        self.knots = [tuple(knot) for knot in knots]

    def add(self, seen: np.ndarray) -> None:
        """seen (n, 2): pairs, (0, 0) for none. Of more than KNOTS, some at equal distances in
        their order are kept, with the first and the last."""
        known = dict(self.knots)
        full = len(known) >= KNOTS
        first, last = self.knots[0][0] if full else 0, self.knots[-1][0] if full else 0
        for length, positions in {(a, b) for a, b in seen.tolist() if a}:
            if length in known or not full or not first <= length <= last:
                known[length] = max(known.get(length, 0), positions)
        lengths = sorted(known)
        sizes = np.maximum.accumulate([known[length] for length in lengths] or [0]).tolist()
        kept = np.unique(np.linspace(0, len(lengths) - 1, KNOTS).round().astype(int)).tolist()
        self.knots = [(lengths[k], sizes[k]) for k in kept] if lengths else []

    @property
    def is_length(self) -> bool:
        """Whether an example has as many positions as its length says, but for special tokens and
        multiples of 8."""
        return all(abs(b - a) <= 8 + a // 50 for a, b in self.knots)

    def __call__(self, lengths: np.ndarray) -> np.ndarray:
        """(n,) -> (n,) int64."""
        known, sizes = np.array(self.knots).T
        out = np.interp(lengths, known, sizes)
        constant = len(sizes) > 1 and sizes[0] == sizes[-1]
        below, above = lengths < known[0], lengths > known[-1]
        if not constant:
            out[below] = lengths[below] * sizes[0] / known[0]
        elif sizes[0] <= known[0]:  # cut, not filled up
            out[below] = np.minimum(lengths[below], sizes[0])
        if len(sizes) == 1 and sizes[0] >= known[0] or len(sizes) > 1 and sizes[-1] > sizes[-2]:
            out[above] = lengths[above] * sizes[-1] / known[-1]
        return np.rint(out).astype(np.int64)


@dataclass(frozen=True)
class FittedCost(CostModel):
    """The cost of an example by the positions that it has in a collated batch. knots: of a Fit."""

    knots: tuple[Seen, ...] = ()

    def __call__(self, lengths: np.ndarray, frames: np.ndarray | None = None) -> np.ndarray:
        """(n,) -> (n,), as CostModel. Raises what that raises."""
        return super().__call__(Fit(self.knots)(np.asarray(lengths, np.int64)), frames)
