"""Every scheme on the same examples under FSDP: each phase waits for its slowest rank.

Groupings (before sampling) decide which examples meet in a rank's mini-batch; assignments (after
sampling) move the examples or the items of a sampled step. Costs are the model's FLOPs, bytes those
of the project's plans. Nothing here is a measurement of time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.models.whole_flops import plan_spec
from orchmllm.papers import grouping
from orchmllm.papers.grouping import intra_reorder
from orchmllm.plan.assign import PHASES, PhasePolicy, PlanSpec, example_costs
from orchmllm.plan.grouping import Groups
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.rearrange import ranges, sums_of
from orchmllm.plan.step import StepPlan, build_plan, plan_step

PER_PHASE = BalanceConfig()
GREEDY = BalanceConfig(**{p: PhasePolicy("greedy", nodewise=True) for p in PHASES})


@dataclass(frozen=True)
class Scheme:
    """group: grouping before sampling; assign: key of ASSIGN; padded: LLM batches are padded."""

    paper: str
    group: str = "random"
    assign: str = "none"
    padded: bool = False


SCHEMES = {
    "random-padded": Scheme("plain sampling, LLM batches padded", padded=True),
    "random": Scheme("plain sampling, packed"),
    "length-group": Scheme("OmniBal Table 3", "length"),
    "device-group": Scheme("OmniBal Table 3", "device"),
    "isf": Scheme("OmniBal 4.1, leftovers dropped as in the paper", "isf"),
    "capped": Scheme("ISF's caps, nothing dropped", "capped"),
    "intra-printed": Scheme("DistTrain Algorithm 2 as printed, by encoder size", assign="printed"),
    "intra": Scheme("DistTrain 6.1 descending, equal counts, by encoder size", assign="intra"),
    "pre-balance": Scheme("whole examples by LLM cost", assign="llm"),
    "one-assignment": Scheme("whole examples by total cost", assign="total"),
    "orchmllm": Scheme("OrchMLLM: greedy per phase, node-wise", assign="greedy"),
    "per-phase": Scheme("ours: least movement per phase", assign="phase"),
    "capped+per-phase": Scheme("ours on capped mini-batches", "capped", "phase"),
}


def grouped(kind: str, pool: BatchLayout, num_ranks: int, batch: int, seed: int) -> Groups:
    """Mini-batches of the pool's examples. Caps of `isf` and `capped`, in patches and in tokens:
    the mean load of a mini-batch or the largest example, whichever is more."""
    tokens = pool.tokens_per_example
    images = sums_of(np.where(pool.modality == ENCODERS["vision"], pool.rows, 0),
                     pool.segments_per_example)
    caps = {f"max_{n}": max(1, int(x.max()), int(batch * x.mean()))
            for n, x in (("images", images), ("tokens", tokens))}
    if kind == "random":
        return grouping.random_groups(len(tokens), batch, seed)
    if kind == "length":
        return grouping.length_group(tokens, batch, window=50 * batch, seed=seed)
    if kind == "device":
        return grouping.device_group(tokens, batch, num_ranks=num_ranks,
                                     window=4 * batch * num_ranks, seed=seed)
    if kind == "capped":
        return grouping.capped(images, tokens, **caps, seed=seed)
    full = {name.replace("max", "min"): int(0.97 * cap) for name, cap in caps.items()}
    return grouping.isf(images, tokens, **caps, **full, leftovers="drop", seed=seed)


def _whole(*phases: str, **options) -> Callable[..., StepPlan]:
    """Moves whole examples: all phases of one run on one rank, balanced by the cost of some."""
    def plan(layout: BatchLayout, spec: PlanSpec) -> StepPlan:
        cost = example_costs(layout, spec)[:, [PHASES.index(phase) for phase in phases]]
        size = np.maximum(cost.sum(axis=1), 1)  # or all empty ones share a rank
        llm = intra_reorder(size, layout.num_ranks, **options)
        return build_plan(layout, {m: llm[layout.item_owner(m)] for m in ENCODERS}, llm, spec)
    return plan


def _with(balance: BalanceConfig) -> Callable[..., StepPlan]:
    return lambda layout, spec: plan_step(layout, replace(spec, balance=balance))


ASSIGN: Mapping[str, Callable[[BatchLayout, PlanSpec], StepPlan]] = {
    "none": _with(BalanceConfig(enabled=False)),
    "printed": _whole("vision"),
    "intra": _whole("vision", equal_counts=True),
    "llm": _whole("llm", descending=True),
    "total": _whole(*PHASES, descending=True),
    "greedy": _with(GREEDY), "phase": _with(PER_PHASE),
}


@dataclass(frozen=True)
class Result:
    """A scheme over some steps. imbalance: phase -> slowest rank over mean, 0 where there is
    nothing to do; over_perfect: time of the steps over that of the same work spread evenly;
    moved_mb, internode_mb: per rank and step; dropped: share of the examples; length_cv: standard
    deviation of the steps' mean length over its mean; steps."""

    imbalance: Mapping[str, float]
    over_perfect: float
    moved_mb: float
    internode_mb: float
    dropped: float
    length_cv: float
    steps: int


def run(scheme: Scheme, pool: BatchLayout, model: ModelConfig, *, num_ranks: int, batch: int,
        seed: int = 0) -> Result:
    """A scheme on all examples of a pool, num_ranks mini-batches a step; a last incomplete step is
    left out. Raises ValueError if the pool does not fill one step."""
    groups = grouped(scheme.group, pool, num_ranks, batch, seed)
    recipe = Recipe(model=model, fsdp=FsdpConfig(compute_dtype="bfloat16"))
    spec = plan_spec(resolve(recipe, num_ranks, 8))
    order = np.arange(len(groups))
    if scheme.group != "device":  # whose steps are composed already
        order = np.random.default_rng(seed + 1).permutation(order)
    count = len(groups) // num_ranks
    if not count:
        raise ValueError(f"{pool.num_examples} examples make {len(groups)} mini-batches, fewer than"
                         f" {num_ranks} ranks: take more examples, fewer ranks or smaller batches")
    slowest, mean, moved, lengths = np.zeros((count, 3)), np.zeros((count, 3)), [], []
    for t, chosen in enumerate(order[:count * num_ranks].reshape(count, num_ranks)):
        part = ranges(groups.offsets[chosen], groups.sizes[chosen])
        layout = pool.taken(groups.index[part], groups.sizes[chosen])
        plan = ASSIGN[scheme.assign](layout, spec)
        for p, phase in enumerate(PHASES):
            load = plan.phase_cost(phase)[1]
            mean[t, p] = load.mean()
            if phase == "llm" and scheme.padded:
                load = replace(spec.costs[phase], padded=True).of_ranks(
                    layout.tokens_per_example, layout.rank_of_example, num_ranks)
            slowest[t, p] = load.max()
        moved.append([sum(s[k] for s in plan.stats.values()) / num_ranks / 1e6
                      for k in ("moved_bytes", "internode_bytes")])
        lengths.append(layout.tokens_per_example.mean())
    return Result(
        dict(zip(PHASES, slowest.sum(0) / np.maximum(mean.sum(0), 1e-300), strict=True)),
        slowest.sum() / mean.sum(), *np.mean(moved, axis=0),
        len(groups.dropped) / pool.num_examples if scheme.group == "isf" else 0.0,
        float(np.std(lengths) / np.mean(lengths)), count)


def scheme_table(results: Mapping[str, Result]) -> str:
    """A line per scheme."""
    out = [f"{'scheme':<17} {'vision':>7} {'audio':>7} {'llm':>7} {'step':>7} {'MB moved':>9} "
           f"{'between nodes':>13} {'dropped':>8} {'length cv':>9}  what"]
    for name, r in results.items():
        shown = [f"{x:.3f}" if (x := r.imbalance[p]) else "-" for p in PHASES]
        phases = " ".join(f"{text:>7}" for text in shown)
        out.append(f"{name:<17} {phases} {r.over_perfect:>7.3f} {r.moved_mb:>9.1f} "
                   f"{r.internode_mb:>13.1f} {r.dropped:>8.2%} {r.length_cv:>9.4f}  "
                   f"{SCHEMES[name].paper}")
    return "\n".join(out)
