"""Slow, obvious twin of policy `conv_transformer` of the C++ core (cpp/conv_transformer.hpp)."""

from __future__ import annotations

import numpy as np


def conv_transformer(
    weight: np.ndarray, pad: np.ndarray, home: np.ndarray, num_ranks: int
) -> np.ndarray:
    """OrchMLLM Algorithm 5, repaired: small max of sum(weight) + count * longest pad."""
    rank_of = np.array(home, np.int64)
    items = sorted((i for i in range(len(weight)) if weight[i] > 0),
                   key=lambda i: (-weight[i], i))
    if not items:
        return rank_of
    mean = -(-sum(int(weight[i]) + int(pad[i]) for i in items) // num_ranks)
    least = max(mean, int(weight[items[0]]) + int(pad[items[0]]))
    for rank, batch in enumerate(_longest_first(weight, pad, items, num_ranks, least)):
        rank_of[batch] = rank
    return rank_of


def _longest_first(
    weight: np.ndarray, pad: np.ndarray, items: list[int], num_ranks: int, low: int
) -> list[list[int]]:
    """Batches opened with the heaviest item left that take the heaviest that still fits, under
    about the lowest bound that does for num_ranks."""

    def fill(bound: int) -> list[list[int]] | None:
        left, batches = list(items), []
        while left and len(batches) < num_ranks:
            extra, room, batch = int(pad[left[0]]), bound, []
            for i in left:
                if int(weight[i]) + extra <= room:
                    batch.append(i)
                    room -= int(weight[i]) + extra
            chosen = set(batch)
            left = [i for i in left if i not in chosen]
            batches.append(batch)
        return None if left else batches

    step = max(1, low // 64)
    high = low + step
    while fill(high) is None:
        low, step = high + 1, 2 * step
        high = low + step
    while low < high and high - low > high >> 20:
        middle = low + (high - low) // 2
        if fill(middle) is not None:
            high = middle
        else:
            low = middle + 1
    return fill(high)


def _quotient(a: int, b: int) -> int:
    """a / b rounded towards zero, as in C++."""
    return a // b if a >= 0 else -(-a // b)
