"""Which layers keep their activations in a given memory (OmniBal 4.3). Under FSDP the choice is the
same on all ranks, which balanced batches and caps make predictable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from orchmllm.sharding.choice import cheapest


@dataclass(frozen=True)
class LayerKind:
    """`count` equal layers. kept_bytes: that one keeps beyond its input if it is not recomputed;
    recompute_ms: that keeping them saves."""

    name: str
    count: int
    kept_bytes: float
    recompute_ms: float


def choose_recompute(kinds: Sequence[LayerKind], *, free_bytes: float) -> dict[str, int]:
    """name -> layers that keep their activations: the most time saved within free_bytes, exact; the
    fewest of those that save nothing."""
    kept = [np.arange(k.count if k.recompute_ms else 0, -1, -1) for k in kinds]  # fastest first
    found = cheapest([-n * k.recompute_ms for n, k in zip(kept, kinds, strict=True)],
                     [n[:, None] * k.kept_bytes for n, k in zip(kept, kinds, strict=True)],
                     np.array([max(free_bytes, 0.0) * (1 + 1e-12)]))
    return {k.name: int(n[i]) for k, n, i in zip(kinds, kept, found, strict=True)}
