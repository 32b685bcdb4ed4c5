"""Times of the stages of a pipeline."""

from __future__ import annotations

import numpy as np


def times(stages: int, slots: int, seed: int, cv: float = 0.6) -> tuple[np.ndarray, np.ndarray]:
    """Encoder (stage 0) and generator (the last) vary, correlated by 0.7; backward is twice."""
    rng = np.random.default_rng(seed)
    s = np.sqrt(np.log(1 + cv * cv))
    z = rng.normal(size=(2, slots))
    z[1] = 0.7 * z[0] + np.sqrt(0.51) * z[1]
    forward = np.ones((stages, slots))
    forward[0], forward[-1] = np.exp(s * z - s * s / 2)
    return forward, 2 * forward
