"""How near to its lower bounds `least_move` gets on what runs plan with: load, time, volume, bytes.

    python scripts/bench_balance.py [--recipes mllm84b,mllm10b,mllm18b,tokens] [--ranks 2560]
        [--batch-sizes 30] [--tolerances 0.005,0.001,0] [--seeds 20] [--dispatch tensors,load]
        [--shard 256]
    python scripts/bench_balance.py --adversarial [--items 153600] [--tolerances 0.005]

The first form draws global batches of the natural mix and lets the planner of each recipe assign
its three phases: FLOP costs, homes that follow the features, bytes of moving an example. `tokens`
is the drop-in's default instead: lengths of the 84B model as costs. The second form is one phase
with homes and weights that are as bad as they come.

Columns, by phase, over the seeds. within: share of seeds with all loads within the tolerance.
excess: largest load over its lower bound, minus 1; mean and worst. worse: seeds where `greedy` is
better although the tolerance is missed. looser: seeds that miss it and end above what the larger
tolerance before it reached. ms: CPU time of this thread, median and worst, and what `greedy` takes
for the same items in the same process. volume: cost that changes its node, over the least possible
(the surplus of the nodes above all their ranks' caps), mean and worst. busiest: the most (by move
costs) that a rank sends to or receives from other nodes, over an even share of the largest surplus
of a node. MB: megabytes that a rank sends to other nodes, mean, by the move costs of the LLM phase
(nothing for phases without). peak: megabytes that the process holds more at its peak than before
the phase is planned. shard: what the largest load is above the same bound, minus 1, if every
--shard ranks are balanced among themselves (balance.group: shard), worst.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.mixes import MODELS
from orchmllm.plan import assign as phases
from orchmllm.plan.assign import PHASES, PhasePolicy, PlanSpec
from orchmllm.plan.balance import core, load_cap
from orchmllm.plan.cost import CostModel
from orchmllm.tools.predict.workload import sample_layout

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
NODE = 8
NOTHING = np.zeros(0, np.int64)
SETUP = 40  # operations an item before the search counts any: reading, sorting, writing

SYNTHETIC = ("lognormal", "uniform", "bimodal", "pareto")


def synthetic_lengths(name: str, n: int, seed: int) -> np.ndarray:
    """(n,) int64 lengths of a textbook distribution, clipped to [1, 8192]: lognormal (median 400,
    sigma 0.8), uniform 1-2000, bimodal (100 +- 20 or 1500 +- 150, equally likely), pareto (shape
    1.5, from 100). Raises ValueError for another name."""
    rng = np.random.default_rng(seed)
    if name == "lognormal":
        values = rng.lognormal(np.log(400), .8, n)
    elif name == "uniform":
        values = rng.uniform(1, 2001, n)
    elif name == "bimodal":
        values = np.where(rng.random(n) < .5, rng.normal(100, 20, n), rng.normal(1500, 150, n))
    elif name == "pareto":
        values = 100 * (1 + rng.pareto(1.5, n))
    else:
        raise ValueError(f"unknown distribution {name!r}; choose one of {', '.join(SYNTHETIC)}")
    return np.clip(values, 1, 8192).astype(np.int64)


@dataclass(frozen=True)
class Problem:
    """What balance() is asked: (n,) costs, homes and costs of moving (or none)."""

    weight: np.ndarray
    home: np.ndarray
    move_cost: np.ndarray
    num_ranks: int
    ranks_per_node: int = NODE


def cpu_ms(call) -> tuple[float, np.ndarray]:
    start = time.process_time()
    result = call()
    return 1e3 * (time.process_time() - start), result


def resident_mb(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split(field)[1].split()[0]) / 1024


def by_shard(problem: Problem, shard: int, tolerance: float) -> int:
    """The largest load if shards of so many ranks are balanced each by itself."""
    largest = 0
    for first in range(0, problem.num_ranks, shard):
        here = np.flatnonzero(problem.home // shard == first // shard)
        d = min(shard, problem.num_ranks - first)
        weight, home = problem.weight[here], problem.home[here] - first
        price = problem.move_cost[here] if len(problem.move_cost) else NOTHING
        rank_of = core().least_move(weight, home, price, d, problem.ranks_per_node,
                                    load_cap(weight, d, tolerance))
        largest = max(largest, int(np.bincount(rank_of, weight, d).max()))
    return largest


def measure(
    problem: Problem, tolerance: float, shard: int = 0
) -> tuple[dict[str, float], np.ndarray]:
    """(one row of figures, the plan)."""
    weight, home, d, c = (problem.weight, problem.home, problem.num_ranks, problem.ranks_per_node)
    price = problem.move_cost if len(problem.move_cost) else weight
    bound, cap = core().lower_bound(weight, d), load_cap(weight, d, tolerance)
    greedy_ms, batch = cpu_ms(lambda: core().greedy(weight, home, d))
    ctypes.CDLL(None).malloc_trim(0)  # what is free is not counted as held before
    before = resident_mb("VmRSS:")
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    ms, (rank_of, operations) = cpu_ms(
        lambda: core().least_move_counted(weight, home, problem.move_cost, d, c, cap))
    load, lpt = np.bincount(rank_of, weight, d), np.bincount(batch, weight, d)
    surplus = np.bincount(home // c, weight, -(-d // c)) - c * cap
    moved = rank_of // c != home // c
    send, receive = (np.bincount(side[moved], price[moved], d) for side in (home, rank_of))
    share = max(1.0, surplus.max() / c * price.sum() / max(1, weight.sum()))
    return {"items": np.count_nonzero(weight) / d, "within": load.max() <= cap,
            "excess": load.max() / max(1, bound) - 1, "worse": load.max() > max(cap, lpt.max()),
            "peak": resident_mb("VmHWM:") - before,
            "shard": by_shard(problem, shard, tolerance) / max(1, bound) - 1 if shard else 0.0,
            "looser": False, "ms": ms, "greedy_ms": greedy_ms,
            "operations": operations + SETUP * len(weight),
            "volume": weight[moved].sum() / max(1, np.maximum(0, surplus).sum()),
            "share": weight[moved].sum() / max(1, weight.sum()),
            "busiest": max(send.max(), receive.max()) / share,
            "mb": problem.move_cost[moved].sum() / d / 1e6 if len(problem.move_cost) else 0.0,
            }, rank_of


class Recorder:
    """Stands in for balance() while the planner runs: measures what it is asked."""

    def __init__(self, tolerance: float, shard: int):
        self.tolerance, self.shard, self.rows = tolerance, shard, []

    def __call__(self, lengths, *, num_ranks, home, ranks_per_node, cost, move_cost=None, **_):
        problem = Problem(cost, home, NOTHING if move_cost is None else move_cost, num_ranks,
                          ranks_per_node)
        row, rank_of = measure(problem, self.tolerance, self.shard)
        self.rows.append(row)
        return rank_of


def spec_of(recipe: str, dispatch: str) -> PlanSpec:
    spec = plan_spec(resolve(
        load_recipe(RECIPES / f"{recipe.replace('tokens', 'mllm84b')}.yaml"), NODE, NODE))
    every = {phase: PhasePolicy("least_move") for phase in PHASES}
    spec = replace(spec, balance=replace(spec.balance, dispatch=dispatch, **every))
    if recipe == "tokens":
        spec = replace(spec, costs=dict.fromkeys(PHASES, CostModel(linear=1000, quadratic=0)))
    return spec


def recipe_rows(args: argparse.Namespace) -> Iterator[tuple[str, dict]]:
    """(label, row) of every phase, tolerance, seed."""
    original = phases.balance
    for recipe in args.recipes.split(","):
        model = recipe.removeprefix("mllm").replace("tokens", "84b")
        for seed in range(args.seeds):
            for batch_size in args.batch_sizes:
                layout = sample_layout(MODELS[model], num_ranks=args.ranks,
                                       batch_size=batch_size, seed=seed)
                for dispatch in args.dispatch.split(","):
                    spec, before = spec_of(recipe, dispatch), {}
                    for tolerance in args.tolerances:
                        recorder = phases.balance = Recorder(tolerance, args.shard)
                        try:
                            phases.assign_phases(replace(layout), spec)
                        finally:
                            phases.balance = original
                        order = ("llm", "vision", "audio") if dispatch == "load" else PHASES
                        label = f"{recipe} n/d {batch_size} {dispatch} {tolerance:.2%}"
                        for phase, row in zip(order, recorder.rows, strict=True):
                            row["looser"] = row["excess"] > before.get(phase, 1.0)
                            row["looser"] &= not row["within"]
                            before[phase] = row["excess"]
                            yield f"{label} {phase}", row
                        yield f"{label} all", {
                            key: sum(row[key] for row in recorder.rows) for key in
                            ("ms", "greedy_ms", "mb")}


def adversarial(n: int) -> dict[str, Problem]:
    """60 items a rank but where said otherwise; the first two are what the others are beside."""
    d, rng = n // 60, np.random.default_rng(0)
    length = synthetic_lengths("lognormal", n, 0)
    flops = length * 1000 + length * length // 8
    share, zero = np.arange(n) // 60, np.zeros(n, np.int64)
    by_length = np.empty(n, np.int64)
    by_length[np.argsort(length, kind="stable")] = share
    half = np.where(rng.random(n) < .5, 0, share)
    pareto, bimodal = (synthetic_lengths(name, n, 0) for name in ("pareto", "bimodal"))
    giants = np.where(rng.random(n) < .002, 40 * 800, length)
    inputs = {
        "lengths": (length, share, d, NODE), "flops": (flops, share, d, NODE),
        "pareto": (pareto, share, d, NODE), "bimodal": (bimodal, share, d, NODE),
        "powers of two": (2 ** rng.integers(0, 14, n), share, d, NODE),
        "three sizes": (rng.choice([7, 11, 1000], n), share, d, NODE),
        "equal": (np.full(n, 448), share[rng.permutation(n)], d, NODE),
        "steps of 32": (32 * rng.integers(1, 30, n), share, d, NODE),
        "giants": (giants, share, d, NODE), "one giant": (np.where(share == 7, 10**7, length),
                                                          share, d, NODE),
        "all on rank 0": (flops, zero, d, NODE), "all on node 0": (flops, share % 8, d, NODE),
        "all on 32 nodes": (flops, share % 256, d, NODE),
        "half on rank 0": (flops, half, d, NODE),
        "half on node 0": (flops, np.where(half == 0, share % 8, share), d, NODE),
        "sorted": (flops, by_length, d, NODE), "sorted down": (flops, d - 1 - by_length, d, NODE),
        "sorted bimodal": (bimodal, np.sort(share)[np.argsort(np.argsort(bimodal))], d, NODE),
        "sorted, no nodes": (flops, by_length, d, 1), "one node": (flops, share, d, d),
        "sorted, one node": (flops, by_length, d, d),
        "8 ranks": (flops, share * 8 // d, 8, NODE), "8 ranks, all on 0": (flops, zero, 8, NODE),
        "3 a rank": (flops, np.arange(n) // 3, n // 3, NODE),
        "3 a rank two sizes": (rng.choice([100, 1500], n), np.arange(n) // 3, n // 3, NODE),
        "1.5 a rank": (flops, np.arange(n) * 2 // 3, n * 2 // 3, NODE),
    }
    return {name: Problem(weight.astype(np.int64), home.astype(np.int64), NOTHING, ranks, node)
            for name, (weight, home, ranks, node) in inputs.items()}


def table(rows: dict[str, list[dict]], median: dict[str, float] | None) -> None:
    for label, values in rows.items():
        v = {key: np.array([row[key] for row in values], float) for key in values[0]}
        text = f"{label:38s}"
        if "within" in v:
            text += (f"{v['items'].mean():6.1f} items within {v['within'].mean():4.0%} excess "
                     f"{v['excess'].mean():8.1e} <= {v['excess'].max():8.1e} worse "
                     f"{int(v['worse'].sum())} looser {int(v['looser'].sum())} "
                     f"| volume {v['volume'].mean():5.2f} <= "
                     f"{v['volume'].max():5.2f} ({v['share'].mean():.2%}) busiest "
                     f"{v['busiest'].mean():5.2f} <= {v['busiest'].max():5.2f} "
                     f"| peak {v['peak'].max():4.0f}")
            text += f" shard {v['shard'].max():7.1e}" if v["shard"].any() else ""
        text += (f" | MB {v['mb'].mean():7.3f} | ms {np.median(v['ms']):6.2f} <= "
                 f"{v['ms'].max():6.2f}, greedy {np.median(v['greedy_ms']):6.2f}, ratio "
                 f"{np.median(v['ms'] / v['greedy_ms']):5.2f}")
        if median:
            text += (f", {np.median(v['ms']) / median['ms']:.2f} x the median, operations "
                     f"{np.median(v['operations']) / median['operations']:.2f} x")
        print(text, flush=True)


def numbers(kind):
    return lambda text: [kind(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipes", default="mllm84b,mllm10b,mllm18b,tokens")
    parser.add_argument("--ranks", type=int, default=2560)
    parser.add_argument("--batch-sizes", type=numbers(int), default=[30])
    parser.add_argument("--tolerances", type=numbers(float), default=[.005, .001, 0.])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--dispatch", default="tensors,load")
    parser.add_argument("--shard", type=int, default=0, help="ranks of a shard, to compare")
    parser.add_argument("--adversarial", action="store_true")
    parser.add_argument("--items", type=int, default=153600, help="of --adversarial")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = defaultdict(list)
    if args.adversarial:
        for tolerance in args.tolerances:
            for name, problem in adversarial(args.items).items():
                for _ in range(3):
                    rows[f"{tolerance:.2%} {name}"].append(measure(problem, tolerance)[0])
        table(rows, {key: float(np.median([np.median([r[key] for r in v]) for v in rows.values()]))
                     for key in ("ms", "operations")})
    else:
        for label, row in recipe_rows(args):
            rows[label].append(row)
        print(f"{args.ranks} ranks, {args.seeds} seeds")
        table(rows, None)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1, default=float))


if __name__ == "__main__":
    main()
