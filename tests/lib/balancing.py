"""Drawn problems of one phase, and their best solution by brute force."""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

thorough = settings(max_examples=150)


@st.composite
def problems(draw, max_items: int = 120, max_ranks: int = 20):
    """(weight, home, num_ranks, ranks_per_node): zeros, giants, steps of 32, few or many items."""
    d = draw(st.integers(1, max_ranks))
    n = draw(st.integers(0, max_items))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(
        ["small", "lognormal", "steps", "odd steps", "huge", "two", "giant"]))
    weight = {
        "small": lambda: rng.integers(0, 12, n), "lognormal": lambda: rng.lognormal(5, 1, n),
        "steps": lambda: rng.integers(1, 30, n) * 32 + (rng.random(n) < .05),
        "odd steps": lambda: rng.integers(0, 30, n) * 32 + rng.integers(0, 32, n) * (
            rng.random(n) < .05),
        "huge": lambda: rng.integers(0, 2**50, n), "two": lambda: rng.choice([100, 1500], n),
        "giant": lambda: np.where(np.arange(n) == n // 2, 10**6, rng.integers(0, 100, n)),
    }[kind]().astype(np.int64)
    return weight, rng.integers(0, d, n), d, draw(st.sampled_from([1, 2, 3, 8, 64]))


def loads(weight: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> np.ndarray:
    out = np.zeros(num_ranks, np.int64)
    np.add.at(out, rank_of, weight)
    return out


@cache
def assignments(n: int, d: int) -> np.ndarray:
    """All (d ** n, n) assignments."""
    return np.array(list(product(range(d), repeat=n)), np.int64).reshape(-1, n)


def brute_force(weight: np.ndarray, d: int, cost) -> int:
    """Least maximum over ranks of cost((m, n) mask of a rank's items in each assignment)."""
    ranks = assignments(len(weight), d)
    return int(np.max([cost(ranks == r) for r in range(d)], axis=0).min())
