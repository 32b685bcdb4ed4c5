"""The paper's ablations, predicted: MFU, tokens per GPU, peak memory and bytes between nodes of
every scheme on the same drawn steps (OrchMLLM section 8.3, Figures 8-13).

    orchmllm papers ablations recipes/mllm84b.yaml --ranks 2560

The paper pads audio, so its schemes are predicted with padded audio; `least_move` is ours, with
packed audio. Predictions keep what the schemes differ in: loads, traffic and memory. Lengths are
drawn, unless --mix or --lengths says otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from textwrap import wrap

import numpy as np

from orchmllm.cli.options import in_one_line, new_file, recipe_parser
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import check_world, resolve
from orchmllm.config.recipe import Recipe, read_recipe
from orchmllm.models.flops import item_rank
from orchmllm.models.whole_flops import part_counts, plan_spec
from orchmllm.plan.assign import PHASES, PhasePolicy
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import StepPlan, plan_step
from orchmllm.sharding.fits import budget_of, decide, joined, with_real_batch
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import Choice, MemoryModel
from orchmllm.tools.predict.dry_run import NONE
from orchmllm.tools.predict.examples import Examples, examples_of
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.options import cluster_of, cluster_options
from orchmllm.tools.predict.step_time import StepTime, timed, work_of

# Hidden size of the LLM -> mini-batches at 128 ranks and at 2,560: the paper's own.
PAPER_BATCHES = {3584: (75, 80), 5120: (50, 60), 8192: (25, 30)}


@dataclass(frozen=True)
class Variant:
    """A scheme. padded: whether clips are. figure: where the paper has it."""

    balance: BalanceConfig
    padded: bool = True
    all_gather: bool = False
    figure: str = ""


def variants() -> dict[str, Variant]:
    """The paper's schemes and ours. Rows travel by all-to-all, as in the paper, except that
    `least_move` also loads every item where it is processed."""
    def scheme(vision: str, audio: str, llm: str, nodewise: bool = True, **options):
        return BalanceConfig(dispatch="tensors", **options, **{
            p: PhasePolicy(policy, nodewise=nodewise and policy != "none")
            for p, policy in zip(PHASES, (vision, audio, llm), strict=True)})

    paper = scheme("greedy", "padded", "greedy")
    return {
        "none": Variant(NONE, figure="8, 9"),
        "LLM only": Variant(scheme("none", "none", "greedy"), figure="10"),
        "whole examples": Variant(scheme("none", "none", "greedy", whole_examples=True)),
        "all packed": Variant(scheme("greedy", "greedy", "greedy"), figure="11"),
        "all padded": Variant(scheme("padded", "padded", "greedy"), figure="11"),
        "all-gather": Variant(paper, all_gather=True, figure="12"),
        "no node-wise": Variant(scheme("greedy", "padded", "greedy", nodewise=False),
                                figure="13"),
        "paper": Variant(paper, figure="8-13"),
        "least_move": Variant(BalanceConfig(dispatch="load"), padded=False),
    }


def padded(plan: StepPlan) -> StepPlan:
    """The plan as it is computed where every rank pads its clips to its longest one."""
    clips, rank = plan.layout.segments[ENCODERS["audio"]], item_rank(plan, "audio")
    lengths = {}
    for name in ("rows", "attn_len"):
        lengths[name] = getattr(plan.layout, name).copy()
        longest = np.zeros(plan.layout.num_ranks, np.int64)
        np.maximum.at(longest, rank, lengths[name][clips])
        lengths[name][clips] = longest[rank]
    return replace(plan, layout=replace(plan.layout, **lengths))


class Predicted:
    """A scheme on k global batches of a recipe. choice: phase -> checkpointing."""

    def __init__(self, recipe: Recipe, variant: Variant, layouts: Sequence[BatchLayout],
                 hardware: Hardware) -> None:
        d = layouts[0].num_ranks
        job = resolve(recipe, d, hardware.ranks_per_node)
        spec = replace(plan_spec(job), balance=variant.balance)
        self.memory = replace(MemoryModel.of(job), all_gather=d * variant.all_gather)
        self.hardware = hardware
        self.plans = [plan_step(x, spec) for x in layouts]
        works = [work_of(p, self.memory.model, variant.all_gather) for p in self.plans]
        computed = [padded(p) if variant.padded else p for p in self.plans]
        # Padding is computed and kept, but neither moved nor useful.
        self.works = [replace(work_of(p, self.memory.model), useful=w.useful, moves=w.moves)
                      for p, w in zip(computed, works, strict=True)]
        self.loads = [loads_of(p) for p in computed]

    def times(self, choice: Choice) -> list[StepTime]:
        """The step of each batch."""
        return [timed(w, self.memory, choice, self.hardware) for w in self.works]

    def mfu(self, choice: Choice) -> np.ndarray:
        """(k,) shares of the peak."""
        return np.array([t.mfu for t in self.times(choice)])

    def peaks(self, choice: Choice) -> np.ndarray:
        """(k,) bytes of the fullest rank."""
        return np.array([self.memory.peak(x, choice) for x in self.loads])

    def internode(self, phases: Sequence[str] = PHASES) -> np.ndarray:
        """(k,) bytes of a step between nodes."""
        return self.memory.microbatches * np.array(
            [sum(p.stats[phase]["internode_bytes"] for phase in phases) for p in self.plans], float)


def ablate(recipe: Recipe, num_ranks: int, batch_size: int, hardware: Hardware, steps: int,
           examples: Examples) -> dict:
    """One table: scheme -> predicted figures, over `steps` steps of these examples. A world below
    fsdp.shard_size is one shard group. Raises ValueError for one that the recipe does not fit."""
    shards = min(resolve(recipe, num_ranks, 1).shard_size, num_ranks)
    recipe = replace(recipe, fsdp=replace(recipe.fsdp, shard_size=shards), train=replace(
        recipe.train, batch_size=batch_size, global_batch_size=0))
    job, hardware = hardware.job(recipe, num_ranks)
    check_world(job)
    budget, _ = budget_of(recipe, hardware.sheet.memory_bytes)
    layouts = [examples.draw(num_ranks, batch_size, recipe.run.seed + s) for s in range(steps)]
    schemes = variants()
    made = {name: Predicted(recipe, v, layouts, hardware) for name, v in schemes.items()}
    # One choice for all schemes, made for the paper's: what differs is the schemes alone.
    choice = decide(recipe, made["paper"].memory, joined(made["paper"].loads), budget, taken=1.0,
                    by_layer=False)
    rows = {}
    for name, p in made.items():
        times = p.times(choice)
        seeds = {"mfu": [t.mfu for t in times], "peak_bytes": p.peaks(choice).tolist(),
                 "tokens_per_gpu": [t.tokens_per_gpu for t in times],
                 "exchange_ms": [1e3 * t.exchange for t in times],
                 "internode_mb_per_rank": (p.internode() / num_ranks / 1e6).tolist()}
        peak = max(seeds["peak_bytes"])
        rows[name] = {key: float(np.mean(found)) for key, found in seeds.items()} | {
            "figure": schemes[name].figure, "seeds": seeds, "peak_bytes": peak,
            "fits": peak <= budget}
    best = rows["paper"]["mfu"]
    for row in rows.values():
        row["mfu_ratio"] = row["mfu"] / best
    return {"ranks": num_ranks, "batch_size": batch_size, "shards": shards,
            "checkpointing": choice, "budget_bytes": budget, "rows": rows}


def ablation_text(found: dict) -> str:
    """All tables as text. found: lengths, in words, and tables of ablate()."""
    lines = [*wrap(f"Lengths: {found['lengths']}.", 79, subsequent_indent="  "), ""]
    for table in found["tables"]:
        lines += [f"{table['ranks']} ranks, mini-batch {table['batch_size']}, sharded over "
                  f"{table['shards']}, checkpointing "
                  + ", ".join(f"{p} {c}" for p, c in table["checkpointing"].items()),
                  f"  {'':15s}{'MFU':>7s}{'ratio':>7s}{'tok/s/GPU':>11s}{'peak GB':>9s}"
                  f"{'between MB':>12s}{'exchange ms':>13s}  figure"]
        for name, row in table["rows"].items():
            note = "" if row["fits"] else "  does not fit"
            lines.append(
                f"  {name:15s}{100 * row['mfu']:6.1f}%{row['mfu_ratio']:7.3f}"
                f"{row['tokens_per_gpu']:11.0f}{row['peak_bytes'] / 1e9:9.1f}"
                f"{row['internode_mb_per_rank']:12.2f}{row['exchange_ms']:13.1f}  "
                f"{row['figure']}{note}")
        lines.append("")
    return "\n".join(lines[:-1])


def _sizes(recipe: Recipe, world_size: int) -> list[tuple[int, int, int]]:
    """(ranks, mini-batch, steps) of the tables: the paper's two, or the one asked for."""
    small, large = PAPER_BATCHES.get(part_counts(recipe.model)["llm"].width, (0, 0))
    batch = with_real_batch(recipe, world_size or 128).train.batch_size
    if world_size:
        return [(world_size, small or batch if world_size == 128 else batch, 3)]
    return [(128, small or batch, 5), (2560, large or batch, 3)]


@in_one_line
def main(argv: list[str]) -> int:
    parser = recipe_parser("papers ablations", __doc__, (
        ("--ranks", 0, "number of ranks; 0: a table at 128 and one at 2560"),
        ("--json", new_file, "also write what was found")))
    cluster_options(parser)
    args = parser.parse_recipe(argv)
    loaded, hardware = read_recipe(args.recipe, args.overrides), cluster_of(args)
    examples = examples_of(loaded.recipe, args.mix or "natural", args.lengths)
    found = {"tables": [ablate(loaded.recipe, ranks, batch, hardware, steps, examples)
                        for ranks, batch, steps in _sizes(loaded.recipe, args.ranks)],
             "lengths": examples.what}
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(ablation_text(found))
    return 0
