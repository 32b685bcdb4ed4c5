"""Sampling by global index: the global batch of a step is a slice of a seeded order, and a rank's
share is a slice of it. The state is the step number, whatever the number of ranks.

A sampler has `batch(step)`, the dataset indices of a step in source order, and `shares(step,
num_ranks)`, the ranks' slices of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256

import numpy as np

from orchmllm.config.data import BLOCK, DataConfig
from orchmllm.plan.grouping import Groups, capped
from orchmllm.plan.layout import VISION

DEFAULTS = DataConfig()


def _numbers(first: int, end: int) -> np.ndarray:
    """From first to below end, in few bytes, as each rank holds those of all rows."""
    return np.arange(first, end, dtype=np.uint32 if end < 2**32 else np.int64)


def shuffled(count: int, window: int, key: Sequence[int]) -> np.ndarray:
    """(count,) the numbers below `count`: windows of so many (0: all) in an order drawn by `key`,
    each shuffled."""
    rng = np.random.default_rng(key)
    numbers = _numbers(0, count)
    if not 0 < window < count:
        return rng.permutation(numbers)
    starts = rng.permutation(-(-count // window)) * window
    return np.concatenate([rng.permutation(numbers[k: k + window]) for k in starts.tolist()])


def _orders(count: int, window: int, *key: int) -> Callable[[int], np.ndarray]:
    """The order of each epoch: `shuffled` by the key and the epoch."""
    return lru_cache(maxsize=2)(lambda epoch: shuffled(count, window, [*key, epoch]))


def split_rows(sources: Sequence, num_validation: int) -> tuple[Sequence[int], Sequence[int]]:
    """(training, validation) dataset indices: the last rows of each source are held out, in
    proportion to its size. sources: orchmllm.data.formats.open.DataSource. Raises ValueError if
    that leaves no row to train on, also of one source that has a weight."""
    bounds = np.cumsum([0, *map(len, sources)])
    total = int(bounds[-1])
    if num_validation < 0 or total - num_validation < 1:
        raise ValueError(
            f"data.num_validation = {num_validation}: the data have {total} rows, of which at "
            f"most {total - 1} can be held out")
    if len(sources) == 1:  # ranges take no memory
        return range(total - num_validation), range(total - num_validation, total)
    held = np.diff(np.floor(bounds * (num_validation / total) + 0.5).astype(int))
    stops = bounds[1:] - held
    for k in np.flatnonzero(stops == bounds[:-1]).tolist():
        if weight := sources[k].config.weight:
            raise ValueError(
                f"data.sources[{k}].weight = {weight:g}: of the {len(sources[k])} rows of "
                f"{sources[k].config.path} data.num_validation = {num_validation} holds out "
                f"{held[k]}, so there is none to draw: lower it, or leave the source out")
    train = np.concatenate(list(map(_numbers, bounds[:-1], stops)))
    return train, np.concatenate(list(map(np.arange, stops, bounds[1:]))).tolist()


class _Sampler:
    """One whose batches have a fixed number of examples, by which they are divided. Raises
    ValueError for an empty batch."""

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: must be >= 1")
        self.batch_size = batch_size

    def draws(self, step: int) -> np.ndarray:
        """(batch_size,) numbers of the draws of one step."""
        return np.arange(step * self.batch_size, (step + 1) * self.batch_size)

    def shares(self, step: int, num_ranks: int) -> list[slice]:
        """The slices of `batch(step)`, rank by rank; they differ by one example at most."""
        count = len(self.batch(step))
        return [slice(count * rank // num_ranks, count * (rank + 1) // num_ranks)
                for rank in range(num_ranks)]


def _in_epochs(draws: np.ndarray, count: int, order: Callable[[int], np.ndarray]) -> np.ndarray:
    """(n,) positions below `count` that ascending draws (n,) take, epoch by epoch in the `order` of
    each."""
    epochs = draws // count
    cuts = np.flatnonzero(np.diff(epochs)) + 1
    return np.concatenate([order(int(part[0] // count))[part % count].astype(np.int64)
                           for part in np.split(draws, cuts)])


def _as_array(rows: Sequence[int]) -> np.ndarray:
    """(n,) integers. numpy would ask a range for each of its numbers."""
    if isinstance(rows, range):
        return np.arange(rows.start, rows.stop, rows.step)
    return np.asarray(rows)


class GlobalSampler(_Sampler):
    """Batches of dataset indices, the same for any number of ranks.

    indices: what to draw from. batch_size: examples per step over all ranks. shuffle: a fresh
    seeded order per epoch; batches run on across the end of an epoch, so that every example
    comes exactly once per epoch. Without shuffle one pass in order, the last batch may be short.
    window: see `shuffled`. Raises ValueError for an empty data set or batch."""

    def __init__(
        self, indices: Sequence[int], batch_size: int, *, seed: int = 0, shuffle: bool = True,
        window: int = 0,
    ) -> None:
        super().__init__(batch_size)
        if len(indices) == 0:
            raise ValueError("the dataset is empty: there is nothing to sample")
        self.indices = indices if isinstance(indices, range) else _as_array(indices)
        self.shuffle = shuffle
        self._order = _orders(len(indices), window, seed)

    def __len__(self) -> int:
        """Steps of one pass (with shuffle: of one epoch, rounded up)."""
        return -(-len(self.indices) // self.batch_size)

    def batch(self, step: int) -> np.ndarray:
        """(batch_size,) dataset indices of one step, in source order."""
        draws = self.draws(step)
        chosen = _in_epochs(draws, len(self.indices), self._order) if self.shuffle else (
            draws[draws < len(self.indices)])
        if isinstance(self.indices, range):  # of all rows, which takes no memory
            return self.indices.start + self.indices.step * chosen
        return self.indices[chosen].astype(np.int64)


class CappedSampler:
    """Steps of mini-batches below caps (OmniBal 4.1, with nothing dropped): each is formed once,
    and comes once an epoch.

    indices: what to draw from. groups: mini-batches of positions in it. per_step: mini-batches of
    a step over all ranks. Raises ValueError for an empty data set or step."""

    def __init__(self, indices: Sequence[int], groups: Groups, per_step: int, *,
                 seed: int = 0) -> None:
        self.indices, self.groups = _as_array(indices), groups
        self._order = GlobalSampler(range(len(groups)), per_step, seed=seed)

    def batch(self, step: int) -> np.ndarray:
        """(n,) dataset indices of one step, mini-batch after mini-batch."""
        return self.indices[np.concatenate(self._chosen(step))].astype(np.int64)

    def shares(self, step: int, num_ranks: int) -> list[slice]:
        """The slices of `batch(step)`, rank by rank: whole mini-batches."""
        ends = np.cumsum([0, *map(len, self._chosen(step))])
        cuts = [int(ends[(len(ends) - 1) * rank // num_ranks]) for rank in range(num_ranks + 1)]
        return [slice(*pair) for pair in zip(cuts, cuts[1:], strict=False)]

    def _chosen(self, step: int) -> list[np.ndarray]:
        """The mini-batches of one step."""
        index, offsets = self.groups.index, self.groups.offsets
        return [index[offsets[g]:offsets[g + 1]] for g in self._order.batch(step)]


class Mixture:
    """Which source each draw comes from: in every block of BLOCK draws a source comes in proportion
    to its weight (largest remainder), at seeded places. A pure function of the draw's number:
    nothing has to be remembered or replayed. A recipe has no share below 1 / BLOCK."""

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        share = np.asarray(weights, float) / np.sum(weights) * BLOCK
        counts = np.floor(share).astype(np.int64)
        counts[np.argsort(counts - share, kind="stable")[: BLOCK - counts.sum()]] += 1
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


class MixtureSampler(_Sampler):
    """Batches drawn from several sources in proportion to weights. Each source runs through its
    own seeded epochs at its own pace.

    groups: the dataset indices of each source. batch_size: examples per step over all ranks.
    window: see `shuffled`. Raises ValueError for an empty batch."""

    def __init__(self, groups: Sequence[Sequence[int]], weights: Sequence[float], batch_size: int,
                 *, seed: int = 0, window: int = 0) -> None:
        super().__init__(batch_size)
        self.groups = list(map(np.asarray, groups))
        self._mixture = Mixture(weights, seed)
        self._orders = [_orders(len(g), window, seed, 2, k) for k, g in enumerate(groups)]

    def batch(self, step: int) -> np.ndarray:
        """(batch_size,) dataset indices of one step, in source order."""
        source, before = self._mixture(self.draws(step))
        out = np.zeros_like(source)
        for k in np.unique(source).tolist():
            group, mine = self.groups[k], source == k
            out[mine] = group[_in_epochs(before[mine], len(group), self._orders[k])]
        return out


class StreamSampler(_Sampler):
    """Batches of positions in an endless stream (see orchmllm.data.stream). near: of draws (n,)
    where their rows are, (n,), by which a batch is sorted, so that the share of a rank is in few
    files. Raises ValueError for an empty batch."""

    def __init__(self, batch_size: int, near: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(batch_size)
        self._near = near

    def batch(self, step: int) -> np.ndarray:
        """(batch_size,) positions of one step."""
        draws = self.draws(step)
        return draws[np.argsort(self._near(draws), kind="stable")]


def make_sampler(dataset, rows: Sequence[int], batch_size: int, *, seed: int,
                 data: DataConfig = DEFAULTS, per_rank: int = 1):
    """The sampler of a recipe: of a stream, of weighted sources, of capped mini-batches, or of all
    rows as often as their sources say.

    dataset: with `sources` and their `indexes`; without `sources` it is one of rows. rows: the
    training rows, as the dataset's `split` gave them. data: of the recipe. batch_size:
    examples per step over all ranks; per_rank: for each rank and microbatch, which is one
    mini-batch with `capped`. Raises ValueError for capped mini-batches where a source has no
    index."""
    if getattr(dataset, "streaming", False):
        return StreamSampler(batch_size, dataset.near)
    sources = getattr(dataset, "sources", ())
    if len(sources) > 1 or any(s.config.repeats > 1 for s in sources):
        rows = _as_array(rows)
        ends = np.cumsum([len(s) for s in sources[:-1]])
        groups = np.split(rows, np.searchsorted(rows, ends))
        weights = [s.config.weight for s in sources]
        if any(weights):
            return MixtureSampler(groups, weights, batch_size, seed=seed,
                                  window=data.shuffle_window)
        if any(s.config.repeats > 1 for s in sources):
            rows = np.concatenate([np.tile(g, s.config.repeats)
                                   for g, s in zip(groups, sources, strict=True)])
    if data.batching == "capped":
        rows = _as_array(rows)
        groups = capped_groups(dataset, rows, data, seed)
        return CappedSampler(rows, groups, max(1, batch_size // per_rank), seed=seed)
    return GlobalSampler(rows, batch_size, seed=seed, window=data.shuffle_window)


def capped_groups(dataset, rows: np.ndarray, data: DataConfig, seed: int) -> Groups:
    """Mini-batches of positions in `rows` (n,) below the caps of a recipe's data section. Raises
    ValueError where a source has no index."""
    sums = [of_all[rows] for of_all in _images_and_tokens(dataset)]
    return capped(*sums, max_images=data.max_batch_images or int(sums[0].sum()) + 1,
                  max_tokens=data.max_batch_tokens, seed=seed)


def lengths_digest(dataset) -> str:
    """Changes with anything that changes which mini-batches `capped_groups` forms of the same rows
    and caps. Raises ValueError where a source has no index."""
    found = sha256()
    for numbers in _images_and_tokens(dataset):
        found.update(numbers)
    return found.hexdigest()[:16]


def check_indexed(dataset) -> None:
    """Raises ValueError where a source has no index, of a dataset for capped mini-batches."""
    if None in dataset.indexes:
        name = dataset.sources[dataset.indexes.index(None)].name
        raise ValueError(f"data.batching is 'capped', which needs the lengths of all rows: source "
                         f"{name} has no index; build it (orchmllm data index RECIPE)")


def _images_and_tokens(dataset) -> list[np.ndarray]:
    """(len(dataset),) int64 each: images, or the tiles into which a model cuts them, and LLM tokens
    of every example."""
    check_indexed(dataset)
    return [np.concatenate([np.add.reduceat(values, index.start[:-1]) for index, values in (
        (i, np.asarray(of(i.table), np.int64)) for i in dataset.indexes)])
        for of in (lambda t: t[:, 4] * (t[:, 0] == VISION), lambda t: t[:, 3])]
