"""What sharing long examples gives, by the cost model: the slowest rank of the LLM over the mean.

    python scripts/bench_shares.py [--ranks 256] [--items 15] [--seeds 5]

Batches of the lengths of OrchMLLM's data (`natural`), in which some examples are long: videos of 64
to 512 frames of 360p, documents of 20 to 200 pages of text, or recordings of an hour, of 25 tokens
a second. Columns: the heaviest example; the slowest rank without sharing, and where up to 2, 4 and
8 ranks share, each over the mean rank; examples that are shared; what 8 shares add to planning, in
milliseconds of CPU; the predicted step without and with 8 shares, on H100 (orchmllm dry-run).
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES, PhasePolicy, PlanSpec
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.step_time import timed, work_of
from orchmllm.tools.predict.workload import sample_layout

MODEL, SHARES = MODELS["10b"], (2, 4, 8)
FULL = dict.fromkeys(PHASES, "full")
FRAME = SegmentLengths(1196, 1196, 299, (1, 26, 46))  # 360p in patches of 14 pixels, 2 x 2 merged


def video(rng: np.random.Generator) -> list:
    frames = int(rng.integers(64, 513)) // 2  # two of them are merged
    return [(VISION, FRAME)] * frames + [(TEXT, text_lengths(200))]


def document(rng: np.random.Generator) -> list:
    return [(TEXT, text_lengths(int(rng.integers(20, 201)) * 400))]


def recording(rng: np.random.Generator) -> list:
    tokens = 3600 * 25
    return [(AUDIO, SegmentLengths(4 * tokens, 2 * tokens, tokens, (1, 1, 4 * tokens))),
            (TEXT, text_lengths(300))]


MIXES = {"natural": (0.0, video), "2% videos": (0.02, video), "2% documents": (0.02, document),
         "0.5% recordings": (0.005, recording)}


def batch(mix: str, ranks: int, items: int, seed: int) -> BatchLayout:
    share, make = MIXES[mix]
    rng, plain = np.random.default_rng(seed), sample_layout(
        MODEL, num_ranks=ranks, batch_size=items, seed=seed)
    n = plain.num_examples
    chosen = rng.choice(n, round(share * n), replace=False)
    long = BatchLayout.concat([plain.taken(np.arange(n), [n]), *(
        BatchLayout.from_segments(int(k), 200, make(rng)) for k in chosen)], [n + len(chosen)])
    index = np.arange(n)
    index[chosen] = n + np.arange(len(chosen))
    return long.taken(index, plain.examples_per_rank)


def planned(layout: BatchLayout, spec: PlanSpec, shares: int) -> tuple[StepPlan, float]:
    """(The plan, seconds of planning)."""
    spec = replace(spec, balance=replace(spec.balance, llm=PhasePolicy(max_shares=shares)))
    started = time.process_time()
    plan = plan_step(layout, spec)
    return plan, time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256)
    parser.add_argument("--items", type=int, default=15, help="examples per rank")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    job = resolve(Recipe(model=MODEL, fsdp=FsdpConfig(compute_dtype="bfloat16")), args.ranks, 8)
    spec = replace(plan_spec(job), cut_media=("audio",))
    memory, hardware = MemoryModel.of(job), Hardware()
    print(f"{args.ranks} ranks x {args.items} examples, mean of {args.seeds} batches")
    print(f"{'':16}{'heaviest':>9}{'off':>7}" + "".join(f"{n:>7}" for n in SHARES)
          + f"{'shared':>8}{'plan ms':>9}{'step s, off':>13}{'8':>7}")
    for mix in MIXES:
        rows = []
        for seed in range(args.seeds):
            layout = batch(mix, args.ranks, args.items, seed)
            found = {n: planned(layout, spec, n) for n in (1, *SHARES)}
            cost = {n: plan.planned_cost("llm") for n, (plan, _) in found.items()}
            pieces = found[8][0].pieces
            seconds = [timed(work_of(found[n][0], MODEL), memory, FULL, hardware).seconds
                       for n in (1, 8)]
            heaviest = spec.costs["llm"](layout.tokens_per_example).max() / cost[1].mean()
            rows.append([heaviest, *(c.max() / c.mean() for c in cost.values()),
                         0 if pieces is None else len(np.unique(pieces.example[pieces.is_shared])),
                         1e3 * (found[8][1] - found[1][1]), *seconds])
        a, *loads, shared, ms, off, on = np.mean(rows, axis=0)
        print(f"{mix:16}{a:9.2f}" + "".join(f"{x:7.2f}" for x in loads)
              + f"{shared:8.1f}{ms:9.1f}{off:13.2f}{on:7.2f}", flush=True)


if __name__ == "__main__":
    main()
