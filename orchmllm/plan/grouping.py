"""Mini-batches formed before sampling, below caps (OmniBal 4.1).

Objective: few mini-batches, each as full as its caps allow.

Invariants: an item is in one group, or in `dropped`. Only an item that is above a cap by itself
makes a group that is above it. Groups are a pure function of lengths and a seed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchmllm.plan.balance import as_int64, at_least_1


@dataclass(frozen=True)
class Groups:
    """k mini-batches: group g holds the items index[offsets[g]:offsets[g + 1]]. dropped (r,): items
    in no group."""

    index: np.ndarray
    offsets: np.ndarray
    dropped: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> np.ndarray:
        """(k,) items of each group."""
        return np.diff(self.offsets)

    def sums(self, values: np.ndarray) -> np.ndarray:
        """(k,) sum of a per-item value over each group."""
        total = np.concatenate([[0], np.cumsum(np.asarray(values)[self.index])])
        return total[self.offsets[1:]] - total[self.offsets[:-1]]

    def largest(self, values: np.ndarray) -> np.ndarray:
        """(k,) largest per-item value of each group."""
        return np.maximum.reduceat(np.asarray(values)[self.index], self.offsets[:-1])


def groups_of(index: list[np.ndarray], sizes: list[np.ndarray], n: int) -> Groups:
    """Groups of these sizes, one after the other, out of n items. index, sizes: of
    (items,) and (groups,) arrays, joined."""
    index, sizes = (np.concatenate([np.zeros(0, np.int64), *x]) for x in (index, sizes))
    left = np.ones(n, bool)
    left[index] = False
    return Groups(index, np.concatenate([[0], np.cumsum(sizes)]), np.flatnonzero(left))


def capped(images: np.ndarray, tokens: np.ndarray, *, max_images: int, max_tokens: int,
           window: int = 64, seed: int = 0) -> Groups:
    """Groups below both caps by best fit: each starts with the item that has waited longest and
    takes the fullest one that fits from a window of items in random order. An item above a cap is a
    group of its own. Nothing is dropped. images, tokens: (n,)."""
    size = shares_of_caps(images, tokens, max_images, max_tokens)
    order = np.random.default_rng(seed).permutation(len(size))
    parts, at = [], min(at_least_1("window", window), len(order))
    waiting = order[:at]
    while len(waiting):
        chosen, left, right = [0], *size[waiting].T  # of the two caps
        rooms, fullness = [1.0 - left[0] + 1e-12, 1.0 - right[0] + 1e-12], left + right
        fullness[0] = -1
        while True:
            fits = np.where((left <= rooms[0]) & (right <= rooms[1]), fullness, -1)
            best = int(fits.argmax())
            if fits[best] < 0:
                break
            chosen.append(best)
            rooms, fullness[best] = [rooms[0] - left[best], rooms[1] - right[best]], -1
        parts.append(waiting[chosen])
        rest = np.delete(waiting, chosen)
        waiting = np.concatenate([rest, order[at:at + len(chosen)]])
        at += len(chosen)
    return groups_of(parts, [np.array([len(part) for part in parts], np.int64)], len(size))


def shares_of_caps(images: np.ndarray, tokens: np.ndarray, max_images: int,
           max_tokens: int) -> np.ndarray:
    """(n, 2) sizes as shares of the caps, checked."""
    images = as_int64("images", images)
    tokens = as_int64("tokens", tokens, len(images))
    caps = [at_least_1("max_images", max_images), at_least_1("max_tokens", max_tokens)]
    return np.stack([images, tokens], axis=1) / caps
