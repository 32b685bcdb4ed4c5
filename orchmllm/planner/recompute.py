"""Which layers keep their activations in a given memory (OmniBal 4.3). Under FSDP the choice is the
same on all ranks, which balanced batches and caps make predictable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class LayerKind:
    """`count` equal layers. kept_bytes: that one keeps beyond its input if it is not recomputed;
    recompute_ms: that keeping them saves."""

    name: str
    count: int
    kept_bytes: float
    recompute_ms: float


def choose_recompute(kinds: Sequence[LayerKind], *, free_bytes: float,
                     in_flight: int = 1) -> dict[str, int]:
    """name -> layers that keep their activations: the most time saved within free_bytes, exact, by
    enumeration; the fewest bytes among equals. in_flight: microbatches held at once.

    Raises ValueError for negative values and for more than 5,000,000 combinations."""
    for k in kinds:
        if k.count < 0 or k.kept_bytes < 0 or k.recompute_ms < 0:
            raise ValueError(f"{k.name}: count, kept_bytes and recompute_ms must be >= 0")
    ordered = sorted(kinds, key=lambda k: k.count)
    if not ordered:
        return {}
    *first, last = ordered
    shape = [k.count + 1 for k in first]
    if np.prod(shape, dtype=float) > 5e6:
        raise ValueError(f"{len(kinds)} kinds of layers have too many combinations: join some")
    kept = np.indices(shape).reshape(len(first), int(np.prod(shape, dtype=np.int64)))
    size = np.array([k.kept_bytes * in_flight for k in first]) @ kept
    saved = np.array([k.recompute_ms for k in first]) @ kept
    room = np.maximum(free_bytes, 0.0) - size
    each = last.kept_bytes * in_flight
    most = np.floor(room / each * (1 + 1e-12)) if each else np.full(len(room), np.inf)
    most = np.minimum(most, last.count) * (last.recompute_ms > 0)
    saved = np.where(room >= 0, saved + np.where(room >= 0, most, 0) * last.recompute_ms, -1.0)
    pick = np.lexsort((size + most * each, -saved))[0]
    chosen = {k.name: int(n) for k, n in zip(first, kept[:, pick], strict=True)}
    return {k.name: {**chosen, last.name: int(most[pick])}[k.name] for k in kinds}
