"""Sampling by global index: the global batch of a step is a slice of a seeded order, and a rank's
share is a slice of it. The state is the step number, whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

BLOCK = 1000  # draws after which the shares of a mixture are exact


class GlobalSampler:
    """Batches of dataset indices, the same for any number of ranks.

    indices: what to draw from. batch_size: examples per step over all ranks. shuffle: a fresh
    seeded permutation per epoch; batches run on across the end of an epoch, so that every example
    comes exactly once per epoch. Without shuffle one pass in order, the last batch may be short.
    Raises ValueError for an empty data set or batch."""

    def __init__(
        self, indices: Sequence[int], batch_size: int, *, seed: int = 0, shuffle: bool = True
    ) -> None:
        if len(indices) == 0:
            raise ValueError("the dataset is empty: there is nothing to sample")
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: must be >= 1")
        self.indices = np.asarray(indices, np.int64)
        self.batch_size, self.seed, self.shuffle = batch_size, seed, shuffle
        self._order = lru_cache(maxsize=2)(self._permute)

    def __len__(self) -> int:
        """Steps of one pass (with shuffle: of one epoch, rounded up)."""
        return -(-len(self.indices) // self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """(batch_size,) dataset indices of one step, in source order."""
        n = len(self.indices)
        first = step * self.batch_size
        if not self.shuffle:
            return self.indices[first: first + self.batch_size]
        parts = []
        for epoch in range(first // n, (first + self.batch_size - 1) // n + 1):
            parts.append(
                self._order(epoch)[max(first - epoch * n, 0): first + self.batch_size - epoch * n])
        return self.indices[np.concatenate(parts)]

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.indices))

    @staticmethod
    def share(num_examples: int, rank: int, world_size: int) -> slice:
        """`rank`'s slice of a batch of num_examples; shares differ by one example at most."""
        return slice(num_examples * rank // world_size, num_examples * (rank + 1) // world_size)


class Mixture:
    """Which source each draw comes from: in every block of BLOCK draws a source comes in proportion
    to its weight (largest remainder), at seeded places. A pure function of the draw's number:
    nothing has to be remembered or replayed. Raises ValueError for a share below 1 / BLOCK."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        share = np.asarray(weights, float) / np.sum(weights) * BLOCK
        counts = np.floor(share).astype(np.int64)
        counts[np.argsort(counts - share, kind="stable")[: BLOCK - counts.sum()]] += 1
        if (counts[np.asarray(weights) > 0] == 0).any():
            raise ValueError(f"weights {list(weights)}: each share must be at least 1/{BLOCK}")
        self.counts, self.seed = counts, seed
        self._block = lru_cache(maxsize=4)(self._draw_block)

    def __call__(self, draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(n,) draw numbers -> (n,) source of each, (n,) how many draws of that source came
        before."""
        source, before = np.zeros_like(draws), np.zeros_like(draws)
        for block in np.unique(draws // BLOCK):
            here = draws // BLOCK == block
            sources, ranks = self._block(int(block))
            source[here] = sources[draws[here] % BLOCK]
            before[here] = ranks[draws[here] % BLOCK] + block * self.counts[source[here]]
        return source, before

    def _draw_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, 1, block])
        sources = rng.permutation(np.repeat(np.arange(len(self.counts)), self.counts))
        ranks = np.zeros(BLOCK, np.int64)
        for k in range(len(self.counts)):
            ranks[sources == k] = np.arange(self.counts[k])
        return sources, ranks


class MixtureSampler:
    """Batches drawn from several sources in proportion to weights. Each source runs through its
    own seeded epochs at its own pace.

    groups: the dataset indices of each source. batch_size: examples per step over all ranks. Raises
    ValueError for an empty batch, and for a source with a weight and no rows."""

    share = staticmethod(GlobalSampler.share)

    def __init__(self, groups: Sequence[Sequence[int]], weights: Sequence[float], batch_size: int,
                 *, seed: int = 0) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: must be >= 1")
        for k, (group, weight) in enumerate(zip(groups, weights, strict=True)):
            if weight and not len(group):
                raise ValueError(f"source {k + 1} has weight {weight} but no rows")
        self.groups = [np.asarray(g, np.int64) for g in groups]
        self.batch_size, self.seed = batch_size, seed
        self._mixture = Mixture(weights, seed)
        self._order = lru_cache(maxsize=2 * len(groups))(self._permute)

    def __len__(self) -> int:
        """Steps in which as many examples are drawn as there are."""
        return -(-sum(map(len, self.groups)) // self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """(batch_size,) dataset indices of one step, in source order."""
        draws = np.arange(step * self.batch_size, (step + 1) * self.batch_size)
        out = np.zeros(len(draws), np.int64)
        for at, (k, before) in enumerate(zip(*self._mixture(draws), strict=True)):
            group = self.groups[k]
            out[at] = group[self._order(int(k), int(before // len(group)))[before % len(group)]]
        return out

    def _permute(self, source: int, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, 2, source, epoch]).permutation(
            len(self.groups[source]))


class StreamSampler:
    """Batches of positions in an endless stream (see orchmllm.data.stream). Raises ValueError for
    an empty batch."""

    share = staticmethod(GlobalSampler.share)

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: must be >= 1")
        self.batch_size = batch_size

    def batch(self, step: int) -> np.ndarray:
        """(batch_size,) positions of one step."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size)


def make_sampler(dataset, rows: Sequence[int], batch_size: int, *, seed: int):
    """The sampler that suits a dataset: of a stream, of weighted sources, or of all rows alike.

    rows: the training rows, as the dataset's `split` gave them."""
    if getattr(dataset, "streaming", False):
        return StreamSampler(batch_size)
    weights = getattr(dataset, "weights", None)
    if weights is None:
        return GlobalSampler(rows, batch_size, seed=seed)
    rows = np.asarray(rows, np.int64)
    cuts = np.searchsorted(rows, dataset.bounds[1:-1])
    return MixtureSampler(np.split(rows, cuts), weights, batch_size, seed=seed)
