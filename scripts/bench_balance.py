"""Balancing quality and time beside other solvers, on the same LLM lengths in one run.

    python scripts/bench_balance.py [--ranks 8,16,64,128,512] [--batch-size 60] [--limit 10]
        [--json FILE] [--plot FILE.png]

Compared: `least_move` and `greedy` of this package, a heapq LPT in Python (what training frameworks
do), prtpy's greedy and Karmarkar-Karp, and the assignment program by CVXPY with CBC and HiGHS.
Solvers that a size makes hopeless (over --limit seconds at the size before) are left out from there
on. prtpy, cvxpy, cylp and highspy are optional.
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


def python_lpt(weight: np.ndarray, home: np.ndarray, num_ranks: int, limit: float) -> np.ndarray:
    heap = [(0, rank) for rank in range(num_ranks)]
    rank_of = np.zeros(len(weight), np.int64)
    for i in sorted(range(len(weight)), key=lambda i: -weight[i]):
        load, rank = heapq.heappop(heap)
        rank_of[i] = rank
        heapq.heappush(heap, (load + int(weight[i]), rank))
    return rank_of


def by_prtpy(name: str) -> Callable:
    def run(weight, home, num_ranks, limit):
        import prtpy
        parts = prtpy.partition(
            algorithm=getattr(prtpy.partitioning, name), numbins=num_ranks,
            items={i: int(w) for i, w in enumerate(weight)}, outputtype=prtpy.out.Partition)
        rank_of = np.zeros(len(weight), np.int64)
        for rank, items in enumerate(parts):
            rank_of[list(items)] = rank
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
    "python heapq LPT": python_lpt,
    "prtpy greedy": by_prtpy("greedy"),
    "prtpy Karmarkar-Karp": by_prtpy("kk"),
    "CVXPY + CBC": by_cvxpy("CBC"),
    "CVXPY + HiGHS": by_cvxpy("HIGHS"),
}


def measure(method: Callable, weight, home, num_ranks: int, limit: float) -> dict:
    """Time, max/bound - 1, and how much of the volume changes node. A native method is repeated:
    its first call is short enough to be all page faults."""
    times = []
    while not times or (sum(times) < .05 and len(times) < 20):
        start = time.perf_counter()
        rank_of = method(weight, home, num_ranks, limit)
        times.append(time.perf_counter() - start)
    load = np.bincount(rank_of, weight, num_ranks)
    return {"ms": 1e3 * float(np.median(times)),
            "excess": float(load.max() / core().lower_bound(weight, num_ranks) - 1),
            "internode": float(weight[rank_of // 8 != home // 8].sum() / weight.sum())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="8,16,64,128,512")
    parser.add_argument("--batch-size", type=int, default=60)
    parser.add_argument("--limit", type=float, default=10, help="seconds for a solver")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    results, hopeless = [], set()
    print(f"{'ranks':>6s} {'method':22s} {'ms':>10s} {'max/bound - 1':>14s} {'between nodes':>14s}")
    for ranks in map(int, args.ranks.split(",")):
        layout = sample_layout("84b", num_ranks=ranks, batch_size=args.batch_size, seed=0)
        weight, home = layout.tokens_per_example, layout.rank_of_example
        for name, method in METHODS.items():
            if name in hopeless:
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
