"""A recipe tried without its GPUs: the real model, sharded on meta under a fake process group of
any number of ranks, and real plans of a drawn workload.

    python -m orchmllm.train --recipe recipes/mllm84b.yaml --dry-run --world-size 2560

Real: parameters and their shards, plans and their times, loads, bytes. Predicted: memory
(orchmllm.estimate.memory) and time (orchmllm.estimate.step_time, a roofline with stated
efficiencies).
Nothing is read: lengths come from orchmllm.estimate.workload.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Collection
from dataclasses import replace

import numpy as np

from orchmllm.config import Recipe, plan_spec
from orchmllm.estimate.fits import (
    DEVICE_SHARE,
    allowed_by,
    decide,
    joined,
    largest_fitting,
    with_real_batch,
)
from orchmllm.estimate.memory import Loads, MemoryModel, loads_of
from orchmllm.estimate.step_time import Hardware, StepTime, predict, rank_seconds
from orchmllm.estimate.workload import MODELS, batch_layout, sample_headers
from orchmllm.models.flops import padded_phases, step_flops
from orchmllm.plan.assign import PHASES, BalanceConfig, PhasePolicy, PlanSpec
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan, imbalance, plan_step
from orchmllm.sharding.check import check_world

NONE = BalanceConfig(enabled=False)
# The 84B recipe at 2,560 ranks, mini-batch 30, by an independent simulation of the same mix.
REFERENCE = {"none / balanced": 1.58, "LLM only / balanced": 1.17}


def reference(recipe: Recipe, num_ranks: int, without: Collection[str] = ()) -> dict[str, float]:
    """REFERENCE if this is what it was simulated for, else nothing."""
    balance = recipe.balance
    same = (recipe.model == MODELS["84b"] and num_ranks == 2560 and recipe.train.batch_size == 30
            and not without and balance.enabled and not balance.whole_examples
            and balance.group == "world"
            and all(getattr(balance, p).policy != "none" for p in PHASES))
    return REFERENCE if same else {}


def llm_only(balance: BalanceConfig) -> BalanceConfig:
    """What balancing before sampling can do: the LLM phase alone."""
    return replace(balance, vision=PhasePolicy("none"), audio=PhasePolicy("none"))


def draw(recipe: Recipe, num_ranks: int, batch_size: int, seed: int,
         without: Collection[str] = ()) -> BatchLayout:
    """A global batch of the paper's mix in its natural proportions. without: encoder phases that
    get nothing to do."""
    headers = sample_headers("natural", num_ranks * batch_size, seed, without)
    return batch_layout(headers, recipe.model, num_ranks)


def dry_run(recipe: Recipe, num_ranks: int, hardware: Hardware, steps: int = 20,
            without: Collection[str] = ()) -> dict:
    """The report as plain data. without: encoder phases for which the recipe has no data. Raises
    ValueError, before anything is built, for a world or a memory that the recipe does not fit."""
    started = time.perf_counter()
    check_world(recipe, num_ranks, hardware.ranks_per_node)
    recipe = with_real_batch(recipe, num_ranks)
    spec = plan_spec(recipe, hardware.ranks_per_node)
    memory = MemoryModel(recipe.model, recipe.fsdp, recipe.fsdp.shard_size or num_ranks,
                         ranks_per_node=spec.ranks_per_node)
    budget = 1e9 * recipe.fsdp.memory_gb or DEVICE_SHARE * hardware.memory_bytes
    batch = recipe.train.batch_size
    drawn = functools.partial(draw, recipe, num_ranks, without=without)
    first = plan_step(drawn(batch, recipe.run.seed), spec)
    try:
        choice = decide(recipe, memory, loads_of(first, padded_phases(recipe.model)), budget)
    except ValueError as e:
        raise ValueError(f"{e} (a GPU of {hardware.memory_bytes / 1e9:.0f} GB is assumed: "
                         f"{hardware.name})") from e
    report = {
        "world_size": num_ranks, "batch_size": batch, "steps": steps, "hardware": vars(hardware),
        "audio_mode": recipe.model.audio.mode, "without": sorted(without),
        "balanced": recipe.balance.enabled, "reference": reference(recipe, num_ranks, without),
        "checkpointing": choice, "memory_budget_bytes": budget, "allowed_by": allowed_by(recipe),
        "model": sharded_on_meta(recipe, num_ranks, choice),
        "state_bytes_predicted": memory.state_bytes(),
    }
    report |= _workload(recipe, drawn, spec, memory, choice, hardware, steps)
    report["exchange"] = exchange_report(first, recipe.fsdp.shard_size)
    peak = report["memory"]["balanced"]["peak_bytes"]
    report["fits"] = peak <= budget
    report["largest_batch"] = _largest(recipe, drawn, spec, memory, choice, budget, peak)
    report["elapsed_s"] = time.perf_counter() - started
    report["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return report


def sharded_on_meta(recipe: Recipe, num_ranks: int, choice: dict[str, str]) -> dict:
    """Parameters per module and bytes of rank 0's shards, of the real model under FSDP2."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from orchmllm.models.mllm import MultimodalModel
    from orchmllm.sharding.fsdp import shard

    started = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with torch.device("meta"):
            model = MultimodalModel(recipe.model)
        model = shard(model, recipe.fsdp, torch.device("cpu"), choice)
        modules: dict[str, int] = {}
        held = trained = 0
        for name, p in model.named_parameters():
            module = _module_of(name)
            modules[module] = modules.get(module, 0) + p.numel()
            local = p.to_local()
            held += local.numel() * local.element_size()
            trained += local.numel() * local.element_size() * p.requires_grad
        return {"parameters": modules, "total": sum(modules.values()), "shard_bytes": held,
                "state_bytes": held + 3 * trained, "build_s": time.perf_counter() - started}
    finally:
        dist.destroy_process_group()


def _module_of(name: str) -> str:
    phase = name.split(".")[0]
    for part, label in (("connector", "connector"), ("embed_tokens", "embedding"),
                        ("lm_head", "lm_head")):
        if part in name:
            return f"{phase} {label}"
    return f"{phase} {'layers' if 'layers' in name or 'blocks' in name else 'front and norms'}"


def _workload(recipe: Recipe, drawn: Callable[..., BatchLayout], spec: PlanSpec,
              memory: MemoryModel, choice: dict[str, str], hardware: Hardware, steps: int) -> dict:
    """Imbalance, time, memory and plan cost over `steps` drawn steps."""
    schemes = {"none": replace(spec, balance=NONE),
               "LLM only": replace(spec, balance=llm_only(spec.balance)), "balanced": spec}
    rows: dict[str, list[dict]] = {name: [] for name in schemes}
    loads: dict[str, list[Loads]] = {name: [] for name in schemes}
    for step in range(steps):
        layout = drawn(recipe.train.batch_size, recipe.run.seed + step)
        for name, scheme in schemes.items():
            started = time.perf_counter()
            plan = plan_step(replace(layout), scheme)
            plan_s = time.perf_counter() - started
            loads[name].append(loads_of(plan, padded_phases(recipe.model)))
            rows[name].append({"plan_s": plan_s} | measure(plan, memory, choice, hardware))
    names = ["none", "LLM only"]
    ratios = {}
    for kind in ("slowest_s", "slowest_padded_s"):
        best = _mean(rows["balanced"], "slowest_s")
        ratios[kind] = {f"{n} / balanced": _mean(rows[n], kind) / best for n in names}
    uneven = {n: [r["imbalance"] for r in rows[n]] for n in schemes} | {
        "padded none": [r["imbalance_padded"] for r in rows["none"]]}
    return {
        # A step that has nothing for a phase says nothing about its imbalance.
        "phases": {p: {n: _mean([r for r in x if p in r], p) for n, x in uneven.items()}
                   for p in PHASES if any(p in r for r in uneven["none"])},
        "flops": {p: _mean([r["flops"] for r in rows["none"]], p) for p in PHASES},
        "predicted": {n: {k: _mean(rows[n], k) for k in (
            "step_s", "mfu", "tokens_per_gpu", "exchange_s", "internode_bytes")} for n in schemes},
        "ratio": ratios,
        "plan_ms": {n: 1e3 * float(np.median([r["plan_s"] for r in rows[n]])) for n in schemes},
        "memory": {n: memory_report(memory, joined(loads[n]), choice) for n in schemes},
    }


def measure(plan: StepPlan, memory: MemoryModel, choice: dict[str, str],
            hardware: Hardware) -> dict:
    """One plan: imbalance (max / mean of computing) of the phases that have something to do,
    predicted step, bytes between nodes."""
    slowest, padded_s, even, uneven = 0.0, 0.0, {}, {}
    padded = padded_phases(memory.model)
    for phase in PHASES:
        seconds, pad = (sum(rank_seconds(plan, phase, memory.model, hardware, "none", p))
                        for p in (phase in padded, phase == "audio"))
        slowest, padded_s = slowest + float(seconds.max()), padded_s + float(pad.max())
        if seconds.any():
            even[phase] = imbalance(seconds)
            uneven[phase] = imbalance(pad)
    time_: StepTime = predict(plan, memory, choice, hardware, padded)
    return {"imbalance": even, "imbalance_padded": uneven, "slowest_s": slowest,
            "slowest_padded_s": padded_s, "flops": step_flops(memory.model, plan.layout),
            "step_s": time_.seconds, "mfu": time_.mfu(hardware), "exchange_s": time_.exchange,
            "tokens_per_gpu": time_.tokens_per_gpu,
            "internode_bytes": sum(s["internode_bytes"] for s in plan.stats.values())}


def memory_report(memory: MemoryModel, loads: Loads, choice: dict[str, str]) -> dict:
    peaks = {k: float(np.max(v)) for k, v in memory.peaks(loads, choice).items()}
    return {"moments": peaks, "peak_bytes": max(peaks.values())}


def _largest(recipe: Recipe, drawn: Callable[..., BatchLayout], spec: PlanSpec,
             memory: MemoryModel, choice: dict[str, str], budget: float, same: float) -> dict:
    """Examples per rank that fit, over three drawn steps: within the budget, and within what the
    recipe's balanced mini-batch takes. Nothing above `tried` was tried."""
    @functools.cache
    def peak(batch: int, balanced: bool, pad: frozenset[str]) -> float:
        scheme = spec if balanced else replace(spec, balance=NONE)
        loads = [loads_of(plan_step(drawn(batch, recipe.run.seed + s), scheme), pad)
                 for s in range(3)]
        return memory.peak(joined(loads), choice)

    high = 4 * recipe.train.batch_size
    padded = padded_phases(recipe.model)
    runs = {"balanced": (True, padded), "none": (False, padded),
            "none, audio padded": (False, frozenset({"audio"}))}
    return {where: {name: largest_fitting(lambda b, how=how: peak(b, *how), limit, high)
                    for name, how in runs.items()}
            for where, limit in (("budget", budget), ("same_memory", same))} | {"tried": high}


def exchange_report(plan: StepPlan, shard_size: int) -> dict:
    """Volume and peers of a plan; and what balancing inside shard groups costs."""
    d = plan.layout.num_ranks
    node = min(plan.spec.ranks_per_node, d)
    pairs: list[np.ndarray] = []
    send = np.zeros(d)
    for phase in PHASES:
        for move, volume in plan.transfers(phase):
            source, target, held = move.volume(volume)
            between = source // node != target // node
            send += np.bincount(source[between], held[between], d)
            pairs.append(source[(source != target) & (held > 0)] * d
                         + target[(source != target) & (held > 0)])
    met = np.unique(np.concatenate(pairs))
    source, target = met // d, met % d
    flat = np.bincount(source, minlength=d)
    outside = source // node != target // node  # the own node is in the second hop
    nodes = np.unique((source * (d // node + 1) + target // node)[outside])
    hop = np.bincount(nodes // (d // node + 1), minlength=d)
    out = {"ranks_per_node": node, "internode_bytes_per_rank": float(send.mean()),
           "busiest_send_bytes": float(send.max()),
           "peers_flat": [float(flat.mean()), int(flat.max()), d - 1],
           "peers_two_hop": [float(hop.mean()) + node - 1, int(hop.max()) + node - 1,
                             -(-d // node) + node - 2]}
    if shard_size and shard_size < d:
        out["shard_size"] = shard_size
        out["imbalance_world"] = _imbalance(plan)
        out["imbalance_shard_groups"] = _imbalance(
            plan_step(plan.layout, replace(plan.spec, group_size=shard_size)))
    return out


def _imbalance(plan: StepPlan) -> dict[str, float]:
    costs = {p: plan.phase_cost(p)[1] for p in PHASES}
    return {p: imbalance(c) for p, c in costs.items() if c.any()}


def _mean(rows: list[dict], key: str) -> float:
    return float(np.mean([r[key] for r in rows]))
