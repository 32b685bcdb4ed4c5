"""Published balancing methods, written from their descriptions, for scripts/bench_peers.py.

Each takes (weight (n,), home (n,), num_ranks, limit in seconds) and returns rank_of (n,). What
OrchMLLM's Algorithms 1 to 5 compute is what is printed; where the text is not defined, the
docstring says what was put there.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from orchmllm.plan.balance import balance
from orchmllm.plan.nodewise import assign_nodes


def heap_lpt(power: int) -> Callable:
    """Longest first to the rank whose sum of lengths ** power is least."""
    def run(weight, home, num_ranks, limit):
        heap = [(0, rank) for rank in range(num_ranks)]
        rank_of = np.zeros(len(weight), np.int64)
        for i in np.argsort(-weight, kind="stable").tolist():
            load, rank = heap[0]
            rank_of[i] = rank
            heapq.heapreplace(heap, (load + int(weight[i]) ** power, rank))
        return rank_of
    return run


def argmin_lpt(weight, home, num_ranks, limit) -> np.ndarray:
    load, rank_of = np.zeros(num_ranks), np.zeros(len(weight), np.int64)
    for i in np.argsort(-weight, kind="stable"):
        rank_of[i] = load.argmin()
        load[rank_of[i]] += weight[i]
    return rank_of


def snake(weight, home, num_ranks, limit) -> np.ndarray:
    """In descending order to ranks 0..d-1, d-1..0, and so on."""
    place = np.arange(len(weight)) % (2 * num_ranks)
    rank_of = np.zeros(len(weight), np.int64)
    rank_of[np.argsort(-weight, kind="stable")] = np.minimum(place, 2 * num_ranks - 1 - place)
    return rank_of


def equal_count_lpt(weight, home, num_ranks, limit) -> np.ndarray:
    """Longest first to the least-loaded rank that has fewer than n / d items."""
    most = -(-len(weight) // num_ranks)
    heap, count = [(0, rank) for rank in range(num_ranks)], [0] * num_ranks
    rank_of = np.zeros(len(weight), np.int64)
    for i in np.argsort(-weight, kind="stable").tolist():
        load, rank = heapq.heappop(heap)
        rank_of[i] = rank
        count[rank] += 1
        if count[rank] < most:
            heapq.heappush(heap, (load + int(weight[i]), rank))
    return rank_of


def karmarkar_karp(equal: bool) -> Callable:
    """Largest differencing: of the two partial partitions whose sums are furthest apart, the
    heaviest part of one is joined with the lightest of the other. equal: a partition starts with
    one item in each part, so that all parts end with the same number. Parts are rows of an array
    and joined by a pointer, so that 2,560 of them are merged at once."""
    def run(weight, home, num_ranks, limit):
        order = np.argsort(weight, kind="stable")
        size, nothing = num_ranks if equal else 1, len(weight)
        joined = np.arange(nothing + 1)  # the part that an item's part went to

        def padded(values, empty):  # parts without items are kept out of the heap
            return np.concatenate([np.full(num_ranks - len(values), empty), values])

        def entry(k, sums, parts):
            spread = sums[-1] - (sums[0] if len(sums) == num_ranks else 0)
            return -int(spread), k, sums, parts

        heap = [entry(k, weight[order[k:k + size]], order[k:k + size])
                for k in range(0, nothing, size)]
        heapq.heapify(heap)
        while len(heap) > 1:
            (_, k, a, parts), (_, _, b, others) = heapq.heappop(heap), heapq.heappop(heap)
            parts, others = padded(parts, nothing), padded(others, nothing)[::-1]
            both = (parts < nothing) & (others < nothing)
            joined[others[both]] = parts[both]
            parts = np.where(both, parts, np.minimum(parts, others))
            sums = padded(a, 0) + padded(b, 0)[::-1]
            sort = np.argsort(sums, kind="stable")
            sort = sort[parts[sort] < nothing]
            heapq.heappush(heap, entry(k, sums[sort], parts[sort]))
        while (joined != joined[joined]).any():
            joined = joined[joined]
        rank_of_part = np.zeros(nothing + 1, np.int64)
        rank_of_part[heap[0][3]] = np.arange(len(heap[0][3]))
        return rank_of_part[joined[:-1]]
    return run


def by_cvxpy(solver: str) -> Callable:
    """Assignment of items to ranks that minimises the largest load, best within the limit."""
    def run(weight, home, num_ranks, limit):
        import cvxpy
        x = cvxpy.Variable((len(weight), num_ranks), boolean=True)
        scaled = weight / max(1, weight.sum() / num_ranks)
        problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.max(scaled @ x)), [cvxpy.sum(x, axis=1) == 1])
        options = {"CBC": {"maximumSeconds": limit}, "HIGHS": {"time_limit": limit}}[solver]
        problem.solve(solver=solver, **options)
        if x.value is None:
            raise RuntimeError(f"nothing found in {limit} s")
        return x.value.argmax(axis=1)
    return run


def batch_rebalance(weight, home, num_ranks, limit) -> np.ndarray:
    """transformers' sampler of that name, from the installed package: groups of the sorted list
    whose padded cost is alike. One global batch, not shuffled."""
    from transformers.trainer_pt_utils import BatchRebalanceSampler
    lengths = weight.tolist()
    sampler = BatchRebalanceSampler(lengths, len(lengths), num_ranks, 1, shuffle=False)
    rank_of = np.zeros(len(weight), np.int64)
    for rank, (batch,) in enumerate(sampler._assign(range(len(lengths)), lengths)):
        rank_of[batch] = rank
    return rank_of


def algorithm_1(weight, home, num_ranks, limit) -> np.ndarray:
    """`top().push(s)` changes the key of the queue's top where it stands; nothing tells the queue,
    so that the same batch stays the top."""
    return np.zeros(len(weight), np.int64)


def algorithm_2(weight, home, num_ranks, limit) -> np.ndarray:
    """Binary search from the shortest to the shortest * (n / d + 1); the last probe is returned,
    which may have more batches than ranks: those are dealt to the ranks in turn here."""
    order = np.argsort(weight, kind="stable")
    lengths = weight[order].tolist()
    low, high = lengths[0], lengths[0] * (len(lengths) // num_ranks + 1)
    batch_of, count = [0] * len(lengths), 0
    while low < high:
        middle, batch, first = (low + high) // 2, 0, 0
        for i, length in enumerate(lengths):
            if (i - first + 1) * length > middle:
                batch, first = batch + 1, i
            batch_of[i] = batch
        count = batch + 1
        low, high = (low, middle) if count <= num_ranks else (middle + 1, high)
    rank_of = np.zeros(len(weight), np.int64)
    rank_of[order] = np.array(batch_of) % num_ranks
    return rank_of


class _Batch:
    """CMP of Algorithm 4: by the sum, or where two are nearer than the interval by the sum of
    squares, which is no order: a < b < c < a is possible."""

    interval = 0

    def __init__(self, rank: int):
        self.rank, self.sum, self.squares = rank, 0, 0

    def __lt__(self, other: _Batch) -> bool:
        if abs(self.sum - other.sum) < self.interval:
            return self.squares < other.squares
        return self.sum < other.sum


def algorithm_3(weight, home, num_ranks, limit) -> np.ndarray:
    """The program of `greedy` batches, line by line: x is (d / c, c) and not Boolean, so that line
    10 multiplies rows of d by columns of d / c. CVXPY refuses that with a ValueError."""
    import cvxpy
    c = 8
    batch = balance(weight, num_ranks=num_ranks, policy="greedy", home=home)
    volume = np.zeros((num_ranks, num_ranks))
    np.add.at(volume, (home, batch), weight)
    x, max_cost = cvxpy.Variable((num_ranks // c, c)), cvxpy.Variable(1)
    constraints = [cvxpy.sum(x, axis=0) == c, cvxpy.sum(x, axis=1) == 1]
    for i in range(num_ranks // c):
        constraints.append(volume[i * c: i * c + c] @ (1 - x[:, i]) <= max_cost)
    cvxpy.Problem(cvxpy.Minimize(max_cost), constraints).solve()
    raise AssertionError("a program without meaning was solved")


def algorithm_4(weight, home, num_ranks, limit) -> np.ndarray:
    """The interval, which the paper sets by hand, is a mean length; a queue that is told of
    changes, as otherwise it is Algorithm 1."""
    _Batch.interval = int(weight.mean())
    heap, rank_of = [_Batch(rank) for rank in range(num_ranks)], np.zeros(len(weight), np.int64)
    for i in np.argsort(-weight, kind="stable").tolist():
        batch, length = heap[0], int(weight[i])
        rank_of[i] = batch.rank
        batch.sum, batch.squares = batch.sum + length, batch.squares + length * length
        heapq.heapreplace(heap, batch)
    return rank_of


def algorithm_5(weight, home, num_ranks, limit) -> np.ndarray:
    """b, which is not defined, is max_sum_bounds, the value of Algorithm 1 (with a queue that is
    told of changes). `len > d` lets d + 1 batches through: the last is put on rank 0."""
    bound = int(np.bincount(heap_lpt(1)(weight, home, num_ranks, limit), weight, num_ranks).max())
    order = np.argsort(-weight, kind="stable").tolist()
    batches, loads, rest = [[]], [0], len(order)
    for k, i in enumerate(order):
        if (len(batches[-1]) + 1) * int(weight[i]) > bound:
            if len(batches) > num_ranks:
                rest = k
                break
            batches.append([])
            loads.append(0)
        batches[-1].append(i)
        loads[-1] += int(weight[i])
    heap = [(load, k) for k, load in enumerate(loads)]
    heapq.heapify(heap)
    for i in order[rest:]:
        load, k = heap[0]
        batches[k].append(i)
        heapq.heapreplace(heap, (load + int(weight[i]), k))
    rank_of = np.zeros(len(weight), np.int64)
    for k, batch in enumerate(batches):
        rank_of[batch] = k % num_ranks
    return rank_of


def nodes_by_cbc(source, batch, volume, num_ranks, c, limit) -> np.ndarray:
    """`assign_nodes` by Algorithm 3's program, with its slips corrected (the objective is what goes
    between nodes, x has shape (d, nodes)): x[b, k] in {0, 1}, rows sum to 1, column k to the ranks
    of node k, and for every source rank i of it: sum_b V[i, b] * (1 - x[b, k]) <= t; minimise t."""
    import cvxpy
    own = np.arange(num_ranks) // c  # the node of a source rank
    sizes, bound = np.bincount(own), cvxpy.Variable()
    x = cvxpy.Variable((num_ranks, len(sizes)), boolean=True)
    sent = np.zeros((num_ranks, num_ranks))
    np.add.at(sent, (source, batch), volume / max(1, np.bincount(source, volume).max()))
    stays = cvxpy.sum(cvxpy.multiply(sent @ x, np.eye(len(sizes))[own]), axis=1)
    problem = cvxpy.Problem(cvxpy.Minimize(bound), [
        cvxpy.sum(x, axis=1) == 1, cvxpy.sum(x, axis=0) == sizes,
        sent.sum(axis=1) - stays <= bound])
    problem.solve(solver="CBC", maximumSeconds=limit)
    if x.value is None:
        raise RuntimeError(f"nothing found in {limit} s")
    rank_of = np.empty(num_ranks, np.int64)
    rank_of[np.argsort(x.value.argmax(axis=1), kind="stable")] = np.arange(num_ranks)
    return rank_of


def node_wise(program: bool) -> Callable:
    """`greedy` batches on the nodes that a search gives them, or Algorithm 3's program."""
    def run(weight, home, num_ranks, limit):
        batch = balance(weight, num_ranks=num_ranks, policy="greedy", home=home)
        found = nodes_by_cbc(home, batch, weight, num_ranks, 8, limit) if program else assign_nodes(
            home, batch, weight, num_ranks=num_ranks, ranks_per_node=8)
        return found[batch]
    return run


METHODS: dict[str, Callable] = {
    "least_move": lambda w, h, d, _: balance(w, num_ranks=d, policy="least_move", home=h),
    "greedy": lambda w, h, d, _: balance(w, num_ranks=d, policy="greedy", home=h),
    "heap LPT": heap_lpt(1),
    "heap LPT on l^2": heap_lpt(2),
    "argmin LPT": argmin_lpt,
    "sorted snake": snake,
    "equal-count LPT": equal_count_lpt,
    "Karmarkar-Karp": karmarkar_karp(False),
    "equal-size KK": karmarkar_karp(True),
    "batch_rebalance (transformers)": batch_rebalance,
    "Algorithm 1 as printed": algorithm_1,
    "Algorithm 2 as printed": algorithm_2,
    "Algorithms 1 + 3": node_wise(False),
    "Algorithm 3 as printed, CVXPY": algorithm_3,
    "Algorithm 4 as printed": algorithm_4,
    "Algorithm 5 as printed": algorithm_5,
    "Algorithms 1 + 3, CVXPY + CBC": node_wise(True),
    "CVXPY + CBC": by_cvxpy("CBC"),
    "CVXPY + HiGHS": by_cvxpy("HIGHS"),
}
