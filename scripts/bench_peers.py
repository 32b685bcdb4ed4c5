"""Balancing quality and time beside published algorithms, on the same LLM lengths in one run.

    python scripts/bench_peers.py [--ranks 8,16,64,128,512] [--batch-size 60] [--limit 10]
        [--solvers] [--json FILE] [--plot FILE.png]

Compared, by the sum of lengths on a rank: `least_move` (0.5%) and `greedy` of this package; written
here
from their descriptions, in Python: longest first by a heap, by lengths and by squared lengths;
longest first by argmin; Karmarkar-Karp's largest differencing, and its form with equal counts; the
sorted snake; longest first into ranks with room left in count, as expert-parallel balancers pack.
--solvers: also the assignment program by CVXPY with CBC and HiGHS (optional packages). Methods that
a size makes hopeless (over --limit seconds at the size before) are left out from there on. CPU
times.
"""

from __future__ import annotations

import argparse
import heapq
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from orchmllm.estimate.workload import sample_layout
from orchmllm.plan.balance import balance, core


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
    one item in each part, so that all parts end with the same number."""
    def run(weight, home, num_ranks, limit):
        order = np.argsort(weight, kind="stable").tolist()
        size = num_ranks if equal else 1
        heap = []
        for k in range(0, len(order), size):
            parts = [(int(weight[i]), [i]) for i in order[k:k + size]]
            parts = [(0, [])] * (num_ranks - len(parts)) + parts
            heap.append((parts[0][0] - parts[-1][0], k, parts))
        heapq.heapify(heap)
        while len(heap) > 1:
            (_, k, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
            parts = sorted(((x + y, p + q) for (x, p), (y, q) in zip(a, reversed(b), strict=True)),
                           key=lambda part: part[0])
            heapq.heappush(heap, (parts[0][0] - parts[-1][0], k, parts))
        rank_of = np.zeros(len(weight), np.int64)
        for rank, (_, items) in enumerate(heap[0][2]):
            rank_of[items] = rank
        return rank_of
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
    "CVXPY + CBC": by_cvxpy("CBC"),
    "CVXPY + HiGHS": by_cvxpy("HIGHS"),
}


def measure(method: Callable, weight, home, num_ranks: int, limit: float) -> dict:
    """Time, max/bound - 1, and how much of the volume changes node. A native method is repeated:
    its first call is short enough to be all page faults."""
    times = []
    while not times or (sum(times) < .05 and len(times) < 20):
        start = time.process_time()
        rank_of = method(weight, home, num_ranks, limit)
        times.append(time.process_time() - start)
    load = np.bincount(rank_of, weight, num_ranks)
    return {"ms": 1e3 * float(np.median(times)),
            "excess": float(load.max() / core().lower_bound(weight, num_ranks) - 1),
            "internode": float(weight[rank_of // 8 != home // 8].sum() / weight.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,16,64,128,512")
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--limit", type=float, default=10, help="seconds for a solver")
    parser.add_argument("--solvers", action="store_true", help="CVXPY as well")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results, hopeless = [], set()
    print(f"{'ranks':>6s} {'method':22s} {'ms':>10s} {'max/bound - 1':>14s} {'between nodes':>14s}")
    for ranks in map(int, args.ranks.split(",")):
        layout = sample_layout("84b", num_ranks=ranks, batch_size=args.batch_size, seed=0)
        weight, home = layout.tokens_per_example, layout.rank_of_example
        for name, method in METHODS.items():
            if name in hopeless or name.startswith("CVXPY") and not args.solvers:
                continue
            try:
                row = measure(method, weight, home, ranks, args.limit)
            except Exception as error:  # an optional solver: missing, or stopped at its limit
                print(f"{ranks:6d} {name:22s} {type(error).__name__}: {error}".splitlines()[0][:98])
                hopeless.add(name)
                continue
            results.append({"ranks": ranks, "method": name, **row})
            print(f"{ranks:6d} {name:22s} {row['ms']:10.2f} {row['excess']:14.6f} "
                  f"{row['internode']:13.1%}")
            if row["ms"] > 1e3 * args.limit:
                hopeless.add(name)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))
    if args.plot:
        plot(results, args.plot)


def plot(results: list[dict], path: Path) -> None:
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    for name in METHODS:
        rows = [r for r in results if r["method"] == name]
        ranks = [r["ranks"] for r in rows]
        axes[0].loglog(ranks, [r["ms"] for r in rows], marker="o", label=name)
        axes[1].loglog(ranks, [max(r["excess"], 1e-7) for r in rows], marker="o", label=name)
    axes[0].set(xlabel="ranks", ylabel="planning time, ms")
    axes[1].set(xlabel="ranks", ylabel="max load / lower bound - 1 (0 drawn as 1e-7)")
    axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
