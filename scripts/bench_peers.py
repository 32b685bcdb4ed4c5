"""Balancing quality, time and movement beside published algorithms, on the same LLM lengths.

    python scripts/bench_peers.py [--ranks 8,16,64,128,512] [--batch-size 60] [--limit 10]
        [--solvers] [--json FILE] [--plot FILE.png]

Compared, by the sum of lengths on a rank: `least_move` (0.5%) and `greedy` of this package, and
the methods of scripts/peer_methods.py. --solvers: also the programs that CVXPY solves with CBC and
HiGHS (optional packages). Methods that a size makes hopeless (over --limit seconds at the size
before) are left out from there on. CPU times. --plot: the largest load over its bound against the
volume that changes its node, one point a method, at the last number of ranks that it was run at.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peer_methods import METHODS

from orchmllm.papers.mixes import MODELS
from orchmllm.plan.balance import core
from orchmllm.tools.predict.workload import sample_layout


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
    print(f"{'ranks':>6s} {'method':31s} {'ms':>10s} {'max/bound - 1':>14s} {'between nodes':>14s}")
    for ranks in map(int, args.ranks.split(",")):
        layout = sample_layout(MODELS["84b"], num_ranks=ranks, batch_size=args.batch_size, seed=0)
        weight, home = layout.tokens_per_example, layout.rank_of_example
        for name, method in METHODS.items():
            if name in hopeless or "CVXPY" in name and not args.solvers:
                continue
            try:
                row = measure(method, weight, home, ranks, args.limit)
            except Exception as error:  # an optional solver: missing, or stopped at its limit
                print(f"{ranks:6d} {name:31s} {type(error).__name__}: {error}".splitlines()[0][:98])
                hopeless.add(name)
                continue
            results.append({"ranks": ranks, "method": name, **row})
            print(f"{ranks:6d} {name:31s} {row['ms']:10.2f} {row['excess']:14.6f} "
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
    figure, axes = plt.subplots(figsize=(9, 5), constrained_layout=True)
    # Algorithm 1 as printed puts everything on one rank: off the scale.
    last = {row["method"]: row for row in results if row["excess"] < 5}
    for k, (name, row) in enumerate(last.items()):
        x, y = 100 * row["internode"], 100 * max(row["excess"], 1e-6)
        axes.plot(x, y, "o" if k else "s", color=f"C{k % 10}",
                  markersize=10 if k == 0 else 6, fillstyle="full" if k < 10 else "none",
                  label=f"{name}, {row['ranks']} ranks, {row['ms']:,.0f} ms")
    axes.set(xscale="log", yscale="log", xlabel="volume that changes its node, %",
             ylabel="largest load over its lower bound, %")
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1, .5))
    axes.grid(alpha=.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
