"""What planning a step costs and what the plan moves, by number of ranks and scheme.

    python scripts/bench_overhead.py [--ranks 64,...] [--batch-size 60] [--policies paper,...]
        [--model 84b] [--mixes natural,video] [--recipe FILE [--own-lengths]] [--tolerance 0.001]
        [--repeats 20] [--gil] [--link-gbps 400] [--latency-us 5] [--json FILE] [--plot FILE.png]

--recipe: model, costs and bytes of a recipe instead of --model, and its own balance section as the
scheme `recipe`. --own-lengths: lengths of its data (drawn with replacement, from its index where
there is one) instead of those of --mixes.

Columns, milliseconds a step, medians. lengths: of all ranks, read from what LAYOUT gathered.
planning: which rank computes what. node-wise: what its search adds. composition: plan and index
maps of one rank, and what it has to read. agreement: the plan's digest, COMMIT, the step's targets,
useful FLOPs and figures. row: its line of metrics.jsonl, in the training thread. Together they are
what one rank's CPU does for a step, but for drawing, reading, decoding, moving and training:
rank_step.py drives the trainer's parts over gathers that answer at once. CPU times of one thread;
all but `row` runs in the prefetch thread, beside training.
GIL: how much of these holds Python's interpreter lock, for which the training thread waits; with
--gil, see gil_clock.py. The core gives the lock back, and so do numpy's arithmetic, sums,
comparisons, sorts, copies and indexing of more than 500 values; np.repeat, np.tile and tolist hold
it, np.bincount and np.add.at for half of their time or more.
link: of every exchange of a step, forward and back, one after the other, the busiest rank's bytes
to or from other nodes over --link-gbps. latency: its peers there times --latency-us. The paper's
column (section 8.4, per iteration) contains both computation and communication, its all-to-alls
being on the critical path: what belongs beside it is the sum.
"""

from __future__ import annotations

import argparse
import json
import resource
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import gil_clock
import numpy as np
from rank_step import PARTS, measure_time

from orchmllm.config import recipe as config
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.mixes import MIXES, MODELS, headers_of
from orchmllm.plan.assign import PHASES, PhasePolicy
from orchmllm.plan.balance import DEFAULT_TOLERANCE, core
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan
from orchmllm.tools.predict.workload import batch_layout

PAPER_MS = {64: 16.7, 128: 18.5, 256: 21.3, 512: 24.6, 1024: 31.4, 2560: 53.9}
SCHEMES = ("recipe", "none", "llm-only", "whole", "greedy", "padded", "paper", "least_move")


def scheme(name: str, tolerance: float) -> BalanceConfig:
    """The balance section of a recipe: `paper` is greedy with node-wise rearrangement and padded
    audio; `greedy` (all packed, no node-wise), `padded` (all padded), `llm-only`, `whole` and
    `none` are its ablations; `least_move` is minimal movement."""
    def of(policy: str, **options) -> PhasePolicy:
        return PhasePolicy(policy, **options)

    none, greedy, nodewise = of("none"), of("greedy"), of("greedy", nodewise=True)
    least = of("least_move", tolerance=tolerance)
    vision, audio, llm = {
        "none": (none, none, none), "llm-only": (none, none, greedy),
        "whole": (none, none, greedy), "greedy": (greedy, greedy, greedy),
        "padded": (of("padded"),) * 3, "paper": (nodewise, of("padded", nodewise=True), nodewise),
        "least_move": (least, least, least),
    }[name]
    return BalanceConfig(whole_examples=name == "whole", vision=vision, audio=audio, llm=llm)


def exchanges(plan: StepPlan) -> Iterator[tuple[str, np.ndarray, np.ndarray, np.ndarray]]:
    """(name, source rank, target rank, bytes) of the rows of every exchange of a step, in order of
    the phases; gradients of features travel back the way the features came."""
    for phase in PHASES:
        for move, volume in plan.transfers(phase):
            source, target, held = move.volume(volume)
            if phase == "llm":
                yield "text", source, target, held
            elif move is plan.feature[phase]:
                yield f"{phase} features", source, target, held
                yield f"{phase} gradients", target, source, held
            else:
                yield f"{phase} inputs", source, target, held


def measure_plan(plan: StepPlan) -> dict:
    """Largest load over its lower bound per phase; bytes that change rank and node. Exchanges run
    one after the other, so each has a busiest rank of its own: the most that one sends to or
    receives from other nodes, and the most peers there that one has."""
    d, node = plan.layout.num_ranks, plan.spec.ranks_per_node
    excess, busiest, peers, moved, internode = {}, {}, {}, 0, 0
    for phase in PHASES:
        _, after = plan.phase_cost(phase)
        cost = plan.spec.costs[phase](plan.layout.item_lengths(phase))
        excess[phase] = float(after.max() / max(1, core().lower_bound(cost, d)))
    for name, source, target, held in exchanges(plan):
        between = source // node != target // node
        ends = (source[between], target[between])
        moved += int(held[source != target].sum())
        internode += int(held[between].sum())
        busiest[name] = int(max(np.bincount(end, held[between], d).max() for end in ends))
        pairs = np.unique(ends[0] * d + ends[1])
        peers[name] = int(max(np.bincount(end, minlength=d).max()
                              for end in (pairs // d, pairs % d)))
    return {"max_over_bound": excess, "moved_bytes": moved, "internode_bytes": internode,
            "busiest_bytes": busiest, "busiest_peers": peers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="64,128,256,512,1024,2560")
    parser.add_argument("--batch-size", type=int, default=60, help="examples per rank")
    parser.add_argument("--policies", default="greedy,paper,least_move", help=", ".join(SCHEMES))
    parser.add_argument("--model", default="84b", choices=MODELS)
    parser.add_argument("--mixes", default="natural", help=", ".join(MIXES))
    parser.add_argument("--recipe", help="a recipe's model, costs and balance section")
    parser.add_argument("--own-lengths", action="store_true", help="lengths of the recipe's data")
    parser.add_argument("--tolerance", type=float, default=DEFAULT_TOLERANCE,
                        help="of `least_move`")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--gil", action="store_true", help="measure what holds the GIL")
    parser.add_argument("--link-gbps", type=float, default=400, help="network per rank, Gbit/s")
    parser.add_argument("--latency-us", type=float, default=5, help="of a message to a peer")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    policies = args.policies.split(",")
    if unknown := set(policies) - set(SCHEMES):
        parser.error(f"unknown policies {sorted(unknown)}; choose from {', '.join(SCHEMES)}")
    if (args.own_lengths or "recipe" in policies) and not args.recipe:
        parser.error("--own-lengths and the scheme `recipe` need --recipe")
    if args.gil:
        gil_clock.preload()
    released_s = gil_clock.clock() if args.gil else lambda: np.nan
    recipe = (config.load_recipe(args.recipe) if args.recipe else config.Recipe(
        model=MODELS[args.model], fsdp=config.FsdpConfig(compute_dtype="bfloat16")))
    given = plan_spec(resolve(recipe, 8, 8))
    mixes = ["own"] if args.own_lengths else args.mixes.split(",")

    print(f"{args.recipe or args.model}, {' and '.join(mixes)} lengths, {args.batch_size} examples "
          f"per rank; CPU ms of one thread, median of {args.repeats}; link of {args.link_gbps:g} "
          f"Gbit/s, {args.latency_us:g} us a peer\n\n| {' | '.join(HEAD)} |\n{'|---' * len(HEAD)}|")
    results = []
    for ranks, mix in product(map(int, args.ranks.split(",")), mixes):
        layout = drawn(args, recipe, mix, ranks)
        for name in policies:
            balance = recipe.balance if name == "recipe" else scheme(name, args.tolerance)
            times, step, row_bytes = measure_time(
                layout, replace(given, balance=balance), recipe.model, args.repeats, released_s)
            row = {"ranks": ranks, "scheme": name, "mix": mix, "segments": len(layout.modality),
                   "gather_bytes": layout.to_payload().nbytes, "row_bytes": row_bytes,
                   "paper_ms": PAPER_MS.get(ranks), "times": times, **measure_plan(step.plans[0]),
                   "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
            results.append(row | {"columns": columns(row, args.link_gbps, args.latency_us)})
            print_row(results[-1])
    for row in results:
        print(f"\n{row['ranks']} {row['scheme']} {row['mix']}: {row['row_bytes'] / 1e3:.1f} kB of "
              "metrics.jsonl; busiest rank of each exchange, MB: " + ", ".join(
                  f"{name} {size / 1e6:.1f}" for name, size in row["busiest_bytes"].items()))
    if args.json:
        args.json.write_text(json.dumps({"arguments": vars(args), "results": results}, indent=1,
                                        default=str))
    if args.plot:
        plot(results, args.plot)


def drawn(args: argparse.Namespace, recipe: config.Recipe, mix: str, ranks: int) -> BatchLayout:
    """A global batch."""
    count = ranks * args.batch_size
    if not args.own_lengths:
        return batch_layout(headers_of(mix, count, 0), recipe.model, ranks)
    from orchmllm.runtime.build import build_dataset
    dataset = build_dataset(recipe)
    return BatchLayout.concat(
        [dataset.layout(i) for i in np.random.default_rng(0).choice(len(dataset), count).tolist()],
        [args.batch_size] * ranks)


COLUMNS = (*PARTS, "link", "latency")
HEAD = ("ranks", "scheme", "lengths of", "segments, 1000", *COLUMNS, "sum", "CPU, median (least)",
        "GIL", "paper", "between nodes, MB a rank", "largest / bound")


def columns(row: dict, link_gbps: float, latency_us: float) -> dict[str, float]:
    """COLUMNS of one row, ms."""
    return {**{name: row["times"][name]["median_ms"] for name in PARTS},
            "link": sum(row["busiest_bytes"].values()) * 8e-6 / link_gbps,
            "latency": sum(row["busiest_peers"].values()) * latency_us * 1e-3}


def print_row(row: dict) -> None:
    parts, cpu = row["columns"].values(), row["times"]["total"]
    print(f"| {row['ranks']} | {row['scheme']} | {row['mix']} | {row['segments'] / 1e3:.0f} "
          f"| {' | '.join(f'{ms:.1f}' for ms in parts)} | {sum(parts):.1f} "
          f"| {cpu['median_ms']:.1f} ({cpu['least_ms']:.1f}) "
          f"| {row['times']['GIL']['median_ms']:.1f} | {row['paper_ms'] or '-'} "
          f"| {row['internode_bytes'] / row['ranks'] / 1e6:.2f} | "
          + " ".join(f"{phase} {value:.4f}" for phase, value in row["max_over_bound"].items())
          + " |", flush=True)


def plot(results: list[dict], path: Path) -> None:
    """A bar for each scheme at each number of ranks, its columns stacked."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, axes = plt.subplots(figsize=(1.5 + .5 * len(results), 4), constrained_layout=True)
    names = [f"{row['scheme']}\n{row['mix']}\n{row['ranks']}" for row in results]
    bottom = np.zeros(len(results))
    for part in COLUMNS:
        heights = np.array([row["columns"][part] for row in results])
        axes.bar(range(len(results)), heights, bottom=bottom, label=part)
        bottom += heights
    paper = [row["paper_ms"] or np.nan for row in results]
    axes.plot(range(len(results)), paper, "k_", markersize=14,
              label="the paper's, with communication")
    axes.set_xticks(range(len(results)), names, fontsize=7)
    axes.set(ylabel="ms a step",
             title="row, link and latency are exposed, the rest is CPU in prefetch")
    axes.legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
