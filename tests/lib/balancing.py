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


def some_held(rng: np.random.Generator, weight: np.ndarray, d: int) -> np.ndarray:
    """(d,) up to three times the mean load of the items, on few or many ranks."""
    most = 1 + int(weight.sum()) // d * int(rng.integers(1, 4))
    return rng.integers(0, most, d) * (rng.random(d) < rng.random())


def most_held(weight: np.ndarray, rank_of: np.ndarray, num_ranks: int, held: np.ndarray) -> int:
    """The largest load with what ranks hold before; held: (ranks,), or () for nothing."""
    load = loads(weight, rank_of, num_ranks)
    return int((load + held if len(held) else load).max())


@cache
def assignments(n: int, d: int) -> np.ndarray:
    """All (d ** n, n) assignments."""
    return np.array(list(product(range(d), repeat=n)), np.int64).reshape(-1, n)


def brute_force(weight: np.ndarray, d: int, cost) -> int:
    """Least maximum over ranks of cost((m, n) mask of a rank's items in each assignment)."""
    ranks = assignments(len(weight), d)
    return int(np.max([cost(ranks == r) for r in range(d)], axis=0).min())


def least_moved(weight: np.ndarray, home: np.ndarray, num_ranks: int, cap: int) -> int:
    """The weight that has to leave its node at least, of nodes of 8 ranks, if no load may be above
    the cap: the sum over nodes of the larger of what is too much in the mean, and what is too much
    of indivisible items."""
    return sum(_node_least(weight[home // 8 == node], 8, cap) for node in range(num_ranks // 8))


def _node_least(weight: np.ndarray, ranks: int, cap: int) -> int:
    """For some numbers of heaviest items: how many of them the ranks can keep, and the weight of
    as many of the lightest as are left over."""
    heaviest = np.sort(weight)[::-1]
    least = max(0, int(weight.sum()) - ranks * cap)
    steps = np.flatnonzero(heaviest[:-1] >= 2 * heaviest[1:]) + 1
    for count in steps:
        held = np.concatenate([[0], np.cumsum(heaviest[:count][::-1])])
        keep = next(k for k in range(count, -1, -1) if _may_hold(held, k, ranks, cap))
        least = max(least, int(held[count - keep]))
    return least


def _may_hold(held: np.ndarray, count: int, ranks: int, cap: int) -> bool:
    """Whether ranks may be able to hold so many items; held[k]: what the lightest k weigh. With
    count = q * ranks + r (0 < r <= ranks), some x of 1..r ranks hold q * x + r items or more: where
    none does, fewer than `count` are held."""
    if count == 0:
        return True
    q, r = divmod(count - 1, ranks)
    x = np.arange(1, r + 2)
    return bool(held[count] <= ranks * cap and (held[q * x + r + 1] <= x * cap).any())
