"""Groupings of OmniBal (4.1 and the baselines of its Table 3), and DistTrain's reordering of a
global batch (6.1). Each is a pure function of lengths and a seed."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np

from orchmllm.plan.balance import as_int64, at_least_1, core
from orchmllm.plan.grouping import Groups, capped, groups_of, shares_of_caps


def fixed(order: np.ndarray, batch: int) -> Groups:
    """Groups of `batch` consecutive items of an order; a last incomplete group is dropped. order:
    (n,)."""
    batch = at_least_1("batch", batch)
    count = len(order) // batch
    return groups_of([order[:count * batch]], [np.full(count, batch)], len(order))


def random_groups(n: int, batch: int, seed: int) -> Groups:
    """Groups of `batch` items sampled at random: plain sampling."""
    return fixed(np.random.default_rng(seed).permutation(n), batch)


def _windows(lengths: np.ndarray, window: int, rng: np.random.Generator) -> list[np.ndarray]:
    """A random order cut into windows, each sorted by length."""
    order = rng.permutation(len(lengths))
    return [part[np.argsort(lengths[part], kind="stable")]
            for part in np.split(order, range(at_least_1("window", window), len(order), window))]


def length_group(lengths: np.ndarray, batch: int, *, window: int, seed: int) -> Groups:
    """Groups of similar lengths: random windows, sorted, cut into batches, in random order.
    lengths: (n,)."""
    rng = np.random.default_rng(seed)
    made = fixed(np.concatenate(_windows(as_int64("lengths", lengths), window, rng)), batch)
    return replace(made, index=made.index.reshape(-1, batch)[
        rng.permutation(len(made))].ravel())


def device_group(lengths: np.ndarray, batch: int, *, num_ranks: int, window: int,
                 seed: int) -> Groups:
    """Groups that are alike across ranks: num_ranks items of neighbouring lengths go to one rank
    each, and a step has `batch` such rows. Groups [t * num_ranks, ...) are step t. lengths: (n,).
    """
    rng = np.random.default_rng(seed)
    order = np.concatenate(_windows(as_int64("lengths", lengths), window, rng))
    rows = order[:len(order) // num_ranks * num_ranks].reshape(-1, num_ranks)
    rows = rng.permuted(rng.permutation(rows), axis=1)
    steps = rows[:len(rows) // batch * batch].reshape(-1, batch, num_ranks).swapaxes(1, 2)
    return groups_of([steps.ravel()], [np.full(steps.size // batch, batch)], len(order))


def isf(images: np.ndarray, tokens: np.ndarray, *, max_images: int, max_tokens: int,
        min_images: int | None = None, min_tokens: int | None = None, rounds: int = 10,
        leftovers: str = "pack", seed: int = 0) -> Groups:
    """OmniBal's Algorithm 1, iterative sampling and filtering: per round, items in random order
    fill a group until one more would exceed a cap; groups with min_images or min_tokens are kept
    (by default max_images and max_tokens - 128), the others' items try again, as do those of the
    last group, which was never completed. An item above a cap is a group of its own.

    leftovers: what no round placed: `pack` into groups below the caps, or `drop` as the paper does,
    which is a bias (`bias` reports it). Raises ValueError for malformed input. images, tokens:
    (n,)."""
    if leftovers not in ("pack", "drop"):
        raise ValueError(f"leftovers must be pack or drop, got {leftovers!r}")
    shares_of_caps(images, tokens, max_images, max_tokens)  # raises for malformed input
    images, tokens = (np.asarray(x, np.int64) for x in (images, tokens))
    min_images = max_images if min_images is None else min_images
    min_tokens = max_tokens - 128 if min_tokens is None else min_tokens
    rng, left = np.random.default_rng(seed), np.arange(len(images))
    index, sizes = [], []
    for _ in range(rounds if len(left) else 0):
        left = rng.permutation(left)
        starts = np.array(_next_fit(images[left], tokens[left], max_images, max_tokens))
        sums = [np.add.reduceat(x[left], starts) for x in (images, tokens)]
        kept = (sums[0] >= min_images) | (sums[1] >= min_tokens)
        kept[-1] = False  # the last group was never completed
        size = np.diff(np.append(starts, len(left)))
        mine = np.repeat(kept, size)
        index.append(left[mine])
        sizes.append(size[kept])
        left = left[~mine]
        if not len(left):
            break
    if leftovers == "pack" and len(left):
        rest = capped(images[left], tokens[left], max_images=max_images, max_tokens=max_tokens,
                      window=min(len(left), 256), seed=seed)
        index.append(left[rest.index])
        sizes.append(rest.sizes)
    return groups_of(index, sizes, len(images))


def _next_fit(images: np.ndarray, tokens: np.ndarray, max_images: int,
              max_tokens: int) -> list[int]:
    """First items of the groups that a single pass makes: each takes items while both sums fit."""
    n = len(images)
    ends = np.full(n, n)
    for values, cap in ((images, max_images), (tokens, max_tokens)):
        total = np.concatenate([[0], np.cumsum(values)])
        np.minimum(ends, np.searchsorted(total, total[:-1] + cap, side="right") - 1, out=ends)
    following = np.maximum(ends, np.arange(n) + 1).tolist()
    starts, at = [], 0
    while at < n:
        starts.append(at)
        at = following[at]
    return starts


def bias(groups: Groups, values: np.ndarray) -> tuple[float, float, float]:
    """(share of items dropped, their mean value, the mean value of all items)."""
    values = np.asarray(values, float)
    dropped = values[groups.dropped]
    return (len(dropped) / max(len(values), 1),
            float(dropped.mean()) if len(dropped) else float("nan"), float(values.mean()))


def intra_reorder(sizes: np.ndarray, num_groups: int, *, descending: bool = False,
                  equal_counts: bool = False) -> np.ndarray:
    """(n,) data-parallel group of each sample by DistTrain's Algorithm 2: sorted by size, each to
    the group with the least load. As printed it sorts ascending, which is no 4/3 approximation.

    equal_counts: round by round, the larger samples of a round to the lighter groups, so that
    counts differ by one at most (sequences of a fixed length need it); implies descending."""
    sizes = as_int64("sizes", sizes)
    group = np.zeros(len(sizes), np.int64)
    if equal_counts:
        order, load = np.argsort(-sizes, kind="stable"), np.zeros(num_groups, np.int64)
        for k in range(0, len(order), num_groups):
            items = order[k:k + num_groups]
            lightest = np.argsort(load, kind="stable")[:len(items)]
            group[items] = lightest
            load[lightest] += sizes[items]
        return group
    if descending:
        return core().greedy(sizes, group, num_groups)
    heap = [(0, g) for g in range(num_groups)]
    for item in np.argsort(sizes, kind="stable").tolist():
        load, g = heap[0]
        group[item] = g
        heapq.heapreplace(heap, (load + int(sizes[item]), g))
    return group


def pad_ratio(lengths: np.ndarray, groups: Groups) -> float:
    """OmniBal's eq. 1, averaged over mini-batches: share of a padded mini-batch that is padding.
    lengths: (n,)."""
    longest = groups.largest(lengths) * groups.sizes
    return float(np.mean(1 - groups.sums(lengths) / np.maximum(longest, 1) - (longest == 0)))


def dist_ratio(totals: np.ndarray, num_ranks: int) -> float:
    """OmniBal's eq. 2, averaged over steps: idle share of num_ranks ranks that wait for the fullest
    of them. totals (k,): of each mini-batch; consecutive ones form a step, the rest is left out.
    A step without any work counts 0."""
    steps = np.asarray(totals, float)[:len(totals) // num_ranks * num_ranks].reshape(-1, num_ranks)
    most = steps.max(axis=1)
    return float(np.mean(np.where(most > 0, 1 - steps.mean(axis=1) / np.maximum(most, 1e-300), 0)))
