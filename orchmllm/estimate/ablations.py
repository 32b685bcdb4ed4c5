"""The paper's ablations, predicted: MFU, tokens per GPU, peak memory and bytes between nodes of
every scheme on the same drawn steps (OrchMLLM section 8.3, Figures 8-13; section 8.2, Table 2).

The paper pads audio, so its schemes are predicted with padded audio; `least_move` is ours, with
packed audio. Predictions keep what the schemes differ in: loads, traffic and memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from orchmllm.config import Recipe, plan_spec
from orchmllm.estimate.dry_run import NONE
from orchmllm.estimate.exchange import exchange_seconds
from orchmllm.estimate.fits import budget_of, decide, joined, largest_fitting, scaled
from orchmllm.estimate.hardware import Hardware
from orchmllm.estimate.lengths import Examples
from orchmllm.estimate.memory import MemoryModel, loads_of
from orchmllm.estimate.step_time import timed, work_of
from orchmllm.plan.assign import PHASES, BalanceConfig, PhasePolicy
from orchmllm.plan.step import plan_step
from orchmllm.sharding.check import check_world

PAD = frozenset({"audio"})
PAPER_OVERHEAD_MS = {64: 16.66, 128: 18.49, 256: 21.32, 512: 24.64, 1024: 31.37, 2560: 53.88}


@dataclass(frozen=True)
class Variant:
    """A scheme. pad: phases that are padded. figure: where the paper has it."""

    balance: BalanceConfig
    pad: frozenset[str] = PAD
    all_gather: bool = False
    figure: str = ""


def variants(tolerance: float) -> dict[str, Variant]:
    """The paper's schemes and ours. Rows travel by all-to-all, as in the paper, except that
    `least_move` also loads every item where it is processed."""
    def scheme(vision: str, audio: str, llm: str, nodewise: bool = True, **options):
        return BalanceConfig(dispatch="tensors", **options, **{
            p: PhasePolicy(policy, nodewise=nodewise and policy != "none")
            for p, policy in zip(PHASES, (vision, audio, llm), strict=True)})

    paper = scheme("greedy", "padded", "greedy")
    local = PhasePolicy("least_move", tolerance=tolerance)
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
        "least_move": Variant(BalanceConfig(dispatch="load", **dict.fromkeys(PHASES, local)),
                         pad=frozenset()),
    }


def ablate(recipe: Recipe, num_ranks: int, batch_size: int, hardware: Hardware, steps: int,
           examples: Examples) -> dict:
    """One table: scheme -> predicted figures, over `steps` steps of these examples. A world below
    fsdp.shard_size is one shard group. Raises ValueError for one that the recipe does not fit."""
    shards = min(recipe.fsdp.shard_size or num_ranks, num_ranks)
    recipe = replace(recipe, fsdp=replace(recipe.fsdp, shard_size=shards), train=replace(
        recipe.train, batch_size=batch_size, global_batch_size=0))
    hardware = hardware.for_recipe(recipe)
    check_world(recipe, num_ranks, hardware.ranks_per_node)
    memory = MemoryModel.of(recipe, num_ranks, hardware.ranks_per_node)
    budget, _ = budget_of(recipe, hardware.memory_bytes)
    spec = plan_spec(recipe, hardware.ranks_per_node)
    layouts = [examples.draw(num_ranks, batch_size, recipe.run.seed + s) for s in range(steps)]
    schemes = variants(0.005)
    # One choice for all schemes, made for the paper's: what differs is the schemes alone.
    choice = decide(recipe, memory, joined([
        loads_of(plan_step(x, replace(spec, balance=schemes["paper"].balance)), PAD)
        for x in layouts]), budget)
    rows = {}
    for name, variant in schemes.items():
        plans = [plan_step(x, replace(spec, balance=variant.balance)) for x in layouts]
        own = replace(memory, all_gather=num_ranks if variant.all_gather else 0)
        times = [timed(work_of(p, recipe.model, variant.pad, variant.all_gather), memory, choice,
                       hardware) for p in plans]
        loads = joined([loads_of(p, variant.pad) for p in plans])
        peak = own.peak(loads, choice)
        seeds = {"mfu": [t.mfu for t in times],
                 "peak_bytes": [own.peak(loads_of(p, variant.pad), choice) for p in plans],
                 "internode_mb_per_rank": [sum(s["internode_bytes"] for s in p.stats.values())
                                           * memory.microbatches / num_ranks / 1e6
                                           for p in plans]}
        rows[name] = {
            "figure": variant.figure, "seeds": seeds, "mfu": float(np.mean(seeds["mfu"])),
            "tokens_per_gpu": float(np.mean([t.tokens_per_gpu for t in times])),
            "exchange_ms": 1e3 * float(np.mean([t.exchange for t in times])),
            "peak_bytes": peak, "fits": peak <= budget,
            "internode_mb_per_rank": float(np.mean(seeds["internode_mb_per_rank"])),
            "fitting_batch": batch_size if peak <= budget else largest_fitting(
                lambda b, m=own, x=loads: m.peak(scaled(x, b / batch_size), choice), budget,
                batch_size),
        }
    best = rows["paper"]["mfu"]
    for row in rows.values():
        row["mfu_ratio"] = row["mfu"] / best
    return {"ranks": num_ranks, "batch_size": batch_size, "shards": shards,
            "checkpointing": choice, "budget_bytes": budget, "rows": rows,
            "order": paper_order(rows)}


def verdict(high: Sequence[float], low: Sequence[float]) -> str:
    """`agrees` if `high` is above `low` by more than the difference varies from seed to seed (one
    standard deviation), `differs` if it is below by as much, else `within the spread`."""
    gap = np.asarray(high, float) - low
    if len(gap) < 2 or abs(gap.mean()) <= gap.std(ddof=1):
        return "within the spread"
    return "agrees" if gap.mean() > 0 else "differs"


def paper_order(rows: Mapping[str, Mapping]) -> dict[str, str]:
    """What the paper reports of the order of schemes -> the verdict of the prediction."""
    def above(high: str, low: str, key: str = "mfu") -> str:
        return verdict(rows[high]["seeds"][key], rows[low]["seeds"][key])

    claims = {f"MFU: paper > {low} (Figure {rows[low]['figure']})": above("paper", low)
              for low in ("none", "LLM only", "all packed", "all padded", "all-gather")}
    claims["MFU: LLM only > none (Figures 8, 10)"] = above("LLM only", "none")
    claims["memory: LLM only > paper (Figure 10)"] = above("LLM only", "paper", "peak_bytes")
    claims["memory: all-gather > paper (Figure 12)"] = above("all-gather", "paper", "peak_bytes")
    claims["bytes between nodes: no node-wise > paper (Figure 13)"] = above(
        "no node-wise", "paper", "internode_mb_per_rank")
    return claims


def overhead(recipe: Recipe, hardware: Hardware, ranks: list[int],
             examples: Examples) -> list[dict]:
    """Table 2: the paper's overhead per iteration beside our planning time (hidden in prefetch) and
    predicted exchange, at mini-batch 60."""
    spec = plan_spec(recipe, hardware.ranks_per_node)
    out = []
    for d in ranks:
        layout = examples.draw(d, 60, recipe.run.seed)
        started = time.perf_counter()
        plan = plan_step(layout, spec)
        plan.for_rank(0)
        out.append({"ranks": d, "paper_ms": PAPER_OVERHEAD_MS.get(d),
                    "plan_ms": 1e3 * (time.perf_counter() - started),
                    "exchange_ms": 1e3 * exchange_seconds(plan, hardware)})
    return out
