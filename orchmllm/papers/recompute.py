"""Which layers keep their activations in a given memory (OmniBal 4.3). Under FSDP the choice is the
same on all ranks, which balanced batches and caps make predictable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True)
class LayerKind:
    """`count` equal layers. kept_bytes: that one keeps beyond its input if it is not recomputed;
    recompute_ms: that keeping them saves."""

    name: str
    count: int
    kept_bytes: float
    recompute_ms: float


def choose_recompute(kinds: Sequence[LayerKind], *, free_bytes: float) -> dict[str, int]:
    """name -> layers that keep their activations: the most time saved within free_bytes, exact, by
    enumeration; the fewest bytes among equals."""
    *first, last = sorted(kinds, key=lambda k: k.count)  # of the last as many as there is room for
    found = []
    for counts in product(*(range(k.count + 1) for k in first)):
        room = max(free_bytes, 0.0) - sum(
            n * k.kept_bytes for n, k in zip(counts, first, strict=True))
        if room >= 0:
            most = min(last.count, int(room / last.kept_bytes * (1 + 1e-12))) if (
                last.kept_bytes) else last.count
            found.append(dict(zip((k.name for k in (*first, last)), (
                *counts, most * (last.recompute_ms > 0)), strict=True)))
    best = max(found, key=lambda kept: (sum(kept[k.name] * k.recompute_ms for k in kinds),
                                        -sum(kept[k.name] * k.kept_bytes for k in kinds)))
    return {k.name: best[k.name] for k in kinds}
