"""Slow twin of `orchmllm._core.lower_bound`; docs/balancing.md has the proofs."""

from __future__ import annotations

from bisect import bisect_right
from math import gcd

import numpy as np

TRIES = 256
MAX_LIGHTEST = 4096


def lower_bound(weight: np.ndarray, num_ranks: int) -> int:
    """Least possible maximum load, from below: max(mean, longest), rounded up to a multiple of the
    gcd of the weights and on to the first value that both conditions allow."""
    weights = [int(w) for w in weight]
    divisor = gcd(*weights)
    if divisor == 0:
        return 0
    limit = max(-(-sum(weights) // (divisor * num_ranks)) * divisor, max(weights))
    least = limit
    for _ in range(TRIES):
        if steps_allow(weights, num_ranks, limit) and heavy_allow(weights, num_ranks, limit, least):
            break
        limit += divisor
    return limit


def common_step(weight: list[int]) -> int:
    """Largest step up to 64 that 15 of 16 sampled weights are multiples of."""
    positive = [w for w in weight if w > 0]
    sample = positive[::max(1, len(positive) // 1024)]
    return next((step for step in range(64, 1, -1)
                 if 16 * sum(w % step != 0 for w in sample) <= len(sample)), 1)


def steps_allow(weights: list[int], num_ranks: int, limit: int) -> bool:
    """Whether remainders modulo the common step leave enough of num_ranks * limit unwasted."""
    step = common_step(weights)
    while step > 1:
        over = limit % step
        if sum(weights) > num_ranks * (limit - over) + most_gained(
                [w % step for w in weights if w % step], over):
            return False
        step = step // 2 if step % 2 == 0 else 1
    return True


def most_gained(remainders: list[int], over: int) -> int:
    """The most that groups of items with these remainders can gain, `over` a group: a small one
    (<= over) its remainder, two large ones `over`, a large and a small one `over`."""
    small = sorted(r for r in remainders if r <= over)
    large = len(remainders) - len(small)
    return max(sum(small[pairs:]) + (pairs + (large - pairs) // 2) * over
               for pairs in range(min(large, len(small)) + 1))


def heavy_allow(weights: list[int], num_ranks: int, limit: int, least: int) -> bool:
    """Whether items beside which only one other fits leave enough unwasted. least: first limit."""
    items = sorted(w for w in weights if w > 0)
    lightest, wasted = items[0], 0
    if lightest > min(least // 4, MAX_LIGHTEST):
        return True
    for w in sorted((w for w in items if w > limit - 2 * lightest), reverse=True):
        fits = bisect_right(items, limit - w)
        wasted += limit - w - (items.pop(fits - 1) if fits else 0)
    return sum(weights) + wasted <= num_ranks * limit
