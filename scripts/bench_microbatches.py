"""What a step of several microbatches waits for, by how its examples are divided.

    python scripts/bench_microbatches.py [--recipe mllm10b] [--ranks 32] [--batch-size 4]
        [--microbatches 8] [--seeds 20] [--cases natural,omni,natural-32k,omni-32k] [--no-plans]

Columns, means over the seeds: the sum over microbatches and phases of the slowest rank's predicted
cost, over that of the mean rank (worst seed in brackets): as it was sampled; of microbatches that
are alike; as orchmllm plans it; and so with max_rank_tokens = the most LLM positions that a rank
has in microbatches that are alike. positions: the most LLM positions of a rank, over those with
microbatches that are alike. ms: CPU time of planning the step. A case that ends in -32k has a fifth
of its texts lognormal (median 1,800, sigma 1.2) up to 32,000 tokens. --no-plans: the time alone,
for steps that take long to plan.

--packed: another table, of texts alone under a cap of tokens that nearly all ranks fill, as
reinforcement learning has them: 512 lognormal lengths (median 2,000, sigma 1) up to the cap of
16,384, 16 ranks, costs of a dense 8B model, in as few microbatches as the cap allows.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import BalancePolicy, PhasePolicy, PlanSpec, example_costs
from orchmllm.plan.balance import assign_microbatches as alike
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import TEXT, BatchLayout
from orchmllm.plan.microbatches import divisions, plan_microbatches
from orchmllm.plan.step import StepPlan, imbalance, plan_step
from orchmllm.tools.predict.workload import batch_layout, sample_headers

RECIPES = Path(__file__).resolve().parent.parent / "recipes"


def drawn(case: str, recipe: Recipe, ranks: int, count: int, seed: int) -> BatchLayout:
    mix, _, tail = case.partition("-")
    headers = sample_headers(mix, ranks * count, seed)
    if tail:
        rng, text = np.random.default_rng(seed), headers.text.copy()
        long = rng.random(len(text)) < 0.2
        text[long] = np.minimum(rng.lognormal(7.5, 1.2, long.sum()), 32_000).astype(int) + 1
        headers = replace(headers, text=text)
    return batch_layout(headers, recipe.model, ranks)


def waiting(plans: list[StepPlan], spec: PlanSpec) -> tuple[float, int]:
    """(slowest over mean of the planned step, most LLM positions of a rank)."""
    costs = [plan.planned_cost(phase) for plan in plans for phase in spec.phases]
    return imbalance(np.array(costs)), max(int(plan.positions("llm").max()) for plan in plans)


def row(layout: BatchLayout, spec: PlanSpec, count: int) -> list[float]:
    def planned(spec: PlanSpec) -> list[StepPlan]:
        return [plan for _, plan in plan_microbatches(layout, spec, count)]

    sampled, _ = waiting(planned(spec.as_sampled), spec)
    micro = alike(example_costs(layout, spec), count)
    before, held = waiting([plan_step(layout.select(micro == k), spec) for k in range(count)], spec)
    started = time.process_time()
    plans = planned(spec)
    cpu_s = time.process_time() - started
    now, positions = waiting(plans, spec)
    llm = replace(spec.balance.llm, max_rank_tokens=held)
    capped, _ = waiting(planned(replace(spec, balance=replace(spec.balance, llm=llm))), spec)
    return [sampled, before, now, capped, positions / held, 1e3 * cpu_s]


def packed(seeds: int) -> None:
    """The table of --packed."""
    ranks, cap = 16, 16_384
    linear = 6 * (36 * (4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 12_288) + 4096 * 151_936)
    spec = PlanSpec({"llm": CostModel(linear, quadratic=6 * 36 * 4096)}, {}, 0, 8, BalancePolicy(
        llm=PhasePolicy(max_rank_tokens=cap)))
    rows = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        lengths = np.minimum(rng.lognormal(7.6, 1.0, 512).astype(int) + 16, cap)
        layout = BatchLayout.concat([BatchLayout.from_segments(i, 1, [(TEXT, text_lengths(n))])
                                     for i, n in enumerate(lengths.tolist())], [32] * ranks)
        started = time.process_time()
        plans = [plan for _, plan in plan_microbatches(layout, spec, 0)]
        cpu_s = time.process_time() - started
        waits, held = waiting(plans, spec)
        rows.append([waits, held / cap, len(plans), -(-int(lengths.sum()) // (ranks * cap)),
                     1e3 * cpu_s])
    mean, worst = np.mean(rows, axis=0), np.max(rows, axis=0)
    print("| slowest over mean | fullest rank over the cap | microbatches | at least | ms |\n"
          + "|---" * 5 + f"|\n| {mean[0]:.2f} ({worst[0]:.2f}) | {worst[1]:.2f} | {mean[2]:.1f} | "
          f"{mean[3]:.1f} | {mean[4]:.0f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="mllm10b")
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--cases", default="natural,omni,natural-32k,omni-32k")
    parser.add_argument("--no-plans", action="store_true")
    parser.add_argument("--packed", action="store_true")
    args = parser.parse_args()
    if args.packed:
        return packed(args.seeds)
    recipe = load_recipe(RECIPES / f"{args.recipe}.yaml")
    spec = plan_spec(resolve(recipe, args.ranks, 8))
    count, each = args.microbatches, args.batch_size * args.microbatches
    print(f"{args.recipe}, {args.ranks} ranks x {args.batch_size} examples x {count} microbatches,"
          f" {args.seeds} seeds")
    if not args.no_plans:
        print("| case | sampled | alike | orchmllm | capped | positions | ms |")
        print("|---" * 7 + "|")
    for case in args.cases.split(","):
        layouts = [drawn(case, recipe, args.ranks, each, seed) for seed in range(args.seeds)]
        if args.no_plans:
            times = []
            for layout in layouts:
                started = time.process_time()
                list(divisions(layout, spec, count, hard=False))
                times.append(1e3 * (time.process_time() - started))
            print(f"{case}: {np.median(times):.0f} ms, at most {max(times):.0f}")
            continue
        rows = np.array([row(layout, spec, count) for layout in layouts])
        mean, worst = rows.mean(axis=0), rows.max(axis=0)
        cells = [f"{mean[k]:.2f} ({worst[k]:.2f})" for k in range(4)]
        print("| " + " | ".join([case, *cells, f"{mean[4]:.2f}", f"{mean[5]:.0f}"]) + " |")


if __name__ == "__main__":
    main()
