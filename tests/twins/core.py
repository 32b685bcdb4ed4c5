"""Slow, obvious twins of the functions of the C++ core, for tests and for reading.

Each takes and returns what its namesake in orchmllm._core does, and must agree with it exactly.
The twins of `least_move` and the node-wise search are in files of their own.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from itertools import combinations, product

import numpy as np


def _heaviest_first(weight: np.ndarray) -> list[int]:
    """Items of positive weight by (-weight, index)."""
    items = [i for i in range(len(weight)) if weight[i] > 0]
    return sorted(items, key=lambda i: (-weight[i], i))


def greedy(
    weight: np.ndarray, home: np.ndarray, num_ranks: int, held: Sequence[int] = ()
) -> np.ndarray:
    """OrchMLLM Algorithm 1: longest first onto the least-loaded rank; weight zero stays home. held:
    what each rank has before."""
    rank_of = np.array(home, np.int64)
    heap = [(int(load), rank) for rank, load in enumerate(held or [0] * num_ranks)]
    heapq.heapify(heap)
    for item in _heaviest_first(weight):
        load, rank = heap[0]
        heapq.heapreplace(heap, (load + int(weight[item]), rank))
        rank_of[item] = rank
    return rank_of


def lower_bound(weight: np.ndarray, num_ranks: int, held: Sequence[int] = ()) -> int:
    """The least load not below the mean, the most held and the longest item on the rank that holds
    least, for which ranks have room in multiples of the greatest common divisor of the weights.
    held: what each rank has before."""
    items, before = [int(w) for w in weight], [int(load) for load in held] or [0] * num_ranks
    divisor = math.gcd(*items) or 1
    low = max(-(-sum(items + before) // num_ranks), *before, max(items, default=0) + min(before))
    full = {low, *(load + -(-(low - load) // divisor) * divisor for load in before)}
    return min(load for load in full
               if sum((load - own) // divisor * divisor for own in before) >= sum(items))


def padded(weight: np.ndarray, home: np.ndarray, num_ranks: int) -> np.ndarray:
    """OrchMLLM Algorithm 2, repaired: least max of count * longest, over contiguous cuts of the
    sorted list."""
    rank_of = np.array(home, np.int64)
    items = _heaviest_first(weight)

    def cut(bound: int) -> list[list[int]]:
        batches, first = [], 0
        while first < len(items):
            size = bound // int(weight[items[first]])
            batches.append(items[first:first + size])
            first += size
        return batches

    if not items:
        return rank_of
    low = max(int(weight[items[0]]), -(-int(sum(weight)) // num_ranks))
    high = max(low, int(weight[items[0]]) * -(-len(items) // num_ranks))
    while low < high:
        middle = (low + high) // 2
        if len(cut(middle)) <= num_ranks:
            high = middle
        else:
            low = middle + 1
    for rank, batch in enumerate(cut(high)):
        rank_of[batch] = rank
    return rank_of


def assign_microbatches(share: np.ndarray, num_microbatches: int) -> np.ndarray:
    """Vector LPT: largest share first, to the step whose fullest phase, then sum, stays lowest. (Of
    more than 32,768 examples only so many are sorted.)"""
    load = np.zeros((num_microbatches, share.shape[1]), np.int64)
    out = np.zeros(len(share), np.int64)
    for i in np.argsort(-share.max(axis=1, initial=0), kind="stable"):
        after = load + share[i]
        out[i] = min(range(num_microbatches),
                     key=lambda k: (after[k].max(initial=0), after[k].sum(), k))
        load[out[i]] += share[i]
    return out


def example_tables(
    modality: np.ndarray, length: np.ndarray, tokens: np.ndarray, segments_of: np.ndarray,
    columns: np.ndarray, rows: int
) -> np.ndarray:
    """(3, rows, phases): costs of each example, of its most expensive item, and its positions. A
    column: modality (0: an example is an item), constant, linear, quadratic, unit, window."""
    out = np.zeros((3, rows, len(columns)), np.int64)
    ends = np.cumsum(segments_of)
    for e, p in product(range(len(segments_of)), range(len(columns))):
        code, constant, linear, quadratic, unit, window = (int(x) for x in columns[p])
        own = range(ends[e] - segments_of[e], ends[e])
        items = [int(length[s]) for s in own if modality[s] == code] if code else [
            sum(int(tokens[s]) for s in own)]
        costs = [(constant + linear * n + quadratic * n * min(n, window or n)) // unit
                 for n in items]
        out[:, e, p] = sum(costs), max(costs, default=0), sum(items)
    return out


def step_time(
    cost: np.ndarray, longest: np.ndarray, micro: np.ndarray, num_ranks: int, num_microbatches: int
) -> int:
    """num_ranks times the sum over microbatches and phases of max(mean rank, longest item)."""
    parts = [micro == k for k in range(num_microbatches)]
    return sum(int(max(cost[part, p].sum(), num_ranks * longest[part, p].max(initial=0)))
               for part in parts for p in range(cost.shape[1]))


def shorten_step(
    cost: np.ndarray, longest: np.ndarray, size: np.ndarray, room: np.ndarray, micro: np.ndarray,
    num_ranks: int, num_microbatches: int, least: int, cut: bool
) -> tuple[np.ndarray, int]:
    """The best move of one example at a time, until none shortens the step or 0.1% are left. cut:
    starts from the shortest step among all cuts of the sorted examples."""
    def time(plan: np.ndarray) -> int:
        return step_time(cost, longest, plan, num_ranks, num_microbatches)

    def fits(part: np.ndarray) -> bool:
        return bool((size[part].sum(axis=0) <= room).all())

    def waits(plan: np.ndarray) -> bool:
        return time(plan) - int(cost.sum()) > int(cost.sum()) // 1000

    least, micro = max(least, 1), micro.copy()
    if cut and waits(micro):
        order = np.argsort(-longest.max(axis=1, initial=0), kind="stable")
        plans = []
        for ends in combinations(range(1, len(cost)), num_microbatches - 1):
            plan = np.zeros_like(micro)
            plan[order] = np.searchsorted(ends, np.arange(len(cost)), side="right")
            if all(fits(plan == k) and (plan == k).sum() >= least
                   for k in range(num_microbatches)):
                plans.append(plan)
        micro = min(plans, key=time, default=micro)
    while waits(micro):
        best, found = time(micro), None
        for i, k in product(range(len(cost)), range(num_microbatches)):
            moved = micro.copy()
            moved[i] = k
            held = size[moved == k].sum(axis=0)
            if k != micro[i] and ((held <= room) | (size[i] == 0)).all() and (
                    micro == micro[i]).sum() > least and time(moved) < best:
                best, found = time(moved), moved
        if found is None:
            break
        micro = found
    return micro, time(micro)


def fill_slots(
    cost: np.ndarray, size: np.ndarray, cap: np.ndarray, num_slots: int
) -> np.ndarray | None:
    """Largest cost first, to the slot of the least cost that has room; None where one has none."""
    load, held = np.zeros(num_slots, np.int64), np.zeros((num_slots, len(cap)), np.int64)
    out = np.zeros(len(cost), np.int64)
    for i in np.argsort(-cost, kind="stable"):
        free = np.flatnonzero((held + size[i] <= cap).all(axis=1))
        if not len(free):
            return None
        out[i] = slot = free[load[free].argmin()]
        load[slot] += cost[i]
        held[slot] += size[i]
    return out


def largest_shares(
    place: np.ndarray, batch: np.ndarray, volume: np.ndarray
) -> list[tuple[int, int, int]]:
    """(volume, batch, place) of every pair that occurs, the largest first, then ascending."""
    total: dict[tuple[int, int], int] = {}
    for p, b, v in zip(place, batch, volume, strict=True):
        total[int(b), int(p)] = total.get((int(b), int(p)), 0) + int(v)
    return sorted(((v, b, p) for (b, p), v in total.items()), key=lambda s: (-s[0], s[1], s[2]))


def near_home(
    source: np.ndarray, batch: np.ndarray, volume: np.ndarray, num_ranks: int, ranks_per_node: int
) -> np.ndarray:
    """Permutation: batches to the node, then the rank, that holds most of them while it is free."""
    node = np.asarray(source) // ranks_per_node
    free = [len(range(k, min(num_ranks, k + ranks_per_node)))
            for k in range(0, num_ranks, ranks_per_node)]
    node_of: dict[int, int] = {}
    for _, b, k in largest_shares(node, batch, volume):
        if b not in node_of and free[k]:
            node_of[b] = k
            free[k] -= 1
    for b in range(num_ranks):
        if b not in node_of:
            node_of[b] = next(k for k, count in enumerate(free) if count)
            free[node_of[b]] -= 1
    nodes = [node_of[b] for b in range(num_ranks)]
    return ranks_inside(source, batch, volume, num_ranks, ranks_per_node, nodes)


def nearer_home(plan: list[int], weight: list[int], home: list[int], width: int) -> list[int]:
    """A plan whose items exchange places: in each node of `width` ranks, the heaviest first, items
    take places of nearly their weight; what is left fills the places that are left, by weight."""
    heaviest = sorted(range(len(weight)), key=lambda i: (weight[i], i), reverse=True)
    rank_of: dict[int, int] = {}
    taken = set()
    for node in {rank // width for rank in plan}:
        own = [i for i in heaviest if home[i] // width == node]
        held = [i for i in heaviest if plan[i] // width == node]
        while own and held:
            above, near = weight[own[0]] - weight[held[0]], weight[held[0]] // 8
            if abs(above) <= near:
                rank_of[own.pop(0)] = plan[held[0]]
                taken.add(held.pop(0))
            elif above > 0:
                own.pop(0)
            else:
                held.pop(0)
    left = [i for i in heaviest if i not in rank_of]
    places = [i for i in heaviest if i not in taken]
    rank_of |= {i: plan[j] for i, j in zip(left, places, strict=True)}
    return [rank_of[i] for i in range(len(weight))]


def ranks_inside(
    source: np.ndarray, batch: np.ndarray, volume: np.ndarray, num_ranks: int,
    ranks_per_node: int, node_of: list[int],
) -> np.ndarray:
    """Permutation for given nodes: each batch next to the rank of its node that holds most."""
    rank_of, taken = {}, set()
    for _, b, r in largest_shares(source, batch, volume):
        if r // ranks_per_node == node_of[b] and b not in rank_of and r not in taken:
            rank_of[b] = r
            taken.add(r)
    for b in range(num_ranks):
        if b not in rank_of:
            rank_of[b] = next(r for r in range(node_of[b] * ranks_per_node, num_ranks)
                              if r not in taken)
            taken.add(rank_of[b])
    return np.array([rank_of[b] for b in range(num_ranks)], np.int64)


def heaviest_holder(
    example: np.ndarray, rank: np.ndarray, held: np.ndarray, home: np.ndarray
) -> np.ndarray:
    """Rank that holds most bytes of each example; ties to its `home`, then to the lowest."""
    out = np.array(home, np.int64)
    for e in range(len(out)):
        total: dict[int, int] = {}
        for r, v in zip(rank[example == e], held[example == e], strict=True):
            total[int(r)] = total.get(int(r), 0) + int(v)
        if total and max(total.values()) > 0:
            out[e] = min(total, key=lambda r: (-total[r], r != home[e], r))
    return out


def place_shares(
    share: np.ndarray, count: np.ndarray, home: np.ndarray, num_ranks: int, ranks_per_node: int,
    room: int,
) -> np.ndarray:
    """The ranks of each shared example, ascending: the least loaded of the node of its home while
    none is above `room`, else of the node where the largest of them is least."""
    load, out = [0] * num_ranks, []
    nodes = [range(k, min(num_ranks, k + ranks_per_node))
             for k in range(0, num_ranks, ranks_per_node)]

    for s, c, h in zip(share.tolist(), count.tolist(), home.tolist(), strict=True):
        taken = {k: sorted(node, key=lambda r: (load[r], r))[:c]
                 for k, node in enumerate(nodes) if len(node) >= c}
        most = {k: max(load[r] for r in ranks) + s for k, ranks in taken.items()}
        own = h // ranks_per_node
        best = own if most.get(own, room + 1) <= room else min(
            most, key=lambda k: (most[k], k != own, k))
        for r in taken[best]:
            load[r] += s
        out += sorted(taken[best])
    return np.array(out, np.int64)
