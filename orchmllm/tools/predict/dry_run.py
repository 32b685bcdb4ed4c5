"""A recipe tried without its GPUs, on any number of ranks, by real plans of a drawn workload.

    orchmllm dry-run recipes/mllm84b.yaml --ranks 2560

Real: plans and their times, loads, bytes. Counted by the shapes that tests compare with the built
and sharded model: parameters and their shards. Predicted: memory (orchmllm.sharding.memory) and
time (orchmllm.tools.predict.step_time, a roofline with stated or measured efficiencies). Lengths
come from orchmllm.tools.predict.examples.
"""

from __future__ import annotations

import functools
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

import numpy as np

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import check_world
from orchmllm.config.recipe import Recipe
from orchmllm.models.whole_flops import plan_spec, step_flops
from orchmllm.plan.assign import EVERY_PHASE, PhasePolicy, PlanSpec
from orchmllm.plan.layout import OF_MEDIA, BatchLayout
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.step import StepPlan, imbalance, plan_step
from orchmllm.sharding.caps import with_count
from orchmllm.sharding.fits import decide, joined, with_real_batch
from orchmllm.sharding.loads import Loads, loads_of
from orchmllm.sharding.longest import Room, heaviest, table
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.examples import Examples, of_mix
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.step_time import StepTime, rank_seconds, timed, work_of
from orchmllm.tools.predict.whole import absent, parameters

NONE = BalanceConfig(enabled=False)
OF_A_SECOND = ("mfu", "tokens_per_gpu")  # a step that takes longer counts for more


def not_modelled(recipe: Recipe, examples: Examples) -> list[str]:
    """What of a recipe changes no figure of a prediction, though it may change a run."""
    left = ["waiting for data and for the host that launches kernels", "saving and validating"]
    if recipe.data.batching == "capped" and not examples.capped:
        left.append(f"data.batching=capped ({recipe.train.batch_size} examples a rank are taken: "
                    "only the recipe's own index has its mini-batches)")
    if recipe.fsdp.compile:
        left.append("fsdp.compile, which joins kernels that are no products")
    if recipe.balance.measure_every:
        left.append("steps as sampled (balance.measure_every)")
    if recipe.balance.enabled and recipe.balance.dispatch == "bytes":
        left.append("the exchange of stored media in the background (balance.dispatch: bytes)")
    if recipe.model.lora.rank:
        left.append("what adapters (model.lora) compute and keep themselves")
    return left


def dry_run(recipe: Recipe, num_ranks: int, hardware: Hardware, steps: int = 20,
            examples: Examples | None = None) -> dict:
    """The report as plain data. examples: where lengths come from (the paper's mix).
    Raises ValueError, before anything is built, for a world or a memory that the recipe does not
    fit."""
    started = time.perf_counter()
    job, hardware = hardware.job(recipe, num_ranks)
    check_world(job)
    spec, memory = plan_spec(job), MemoryModel.of(job)
    recipe = with_real_batch(recipe, num_ranks)
    examples = examples or of_mix(recipe)
    drawn = functools.partial(examples.draw, num_ranks)
    room = Room.of(job, hardware.sheet.memory_bytes, memory)
    step = drawn(recipe.train.batch_size * recipe.train.least_microbatches, recipe.run.seed)
    _, spec, caps = with_count(recipe, [step], spec, memory, room.budget)
    train = recipe.train
    first = [plan for _, plan in plan_microbatches(step, spec, train.accumulation_steps)]
    choice = _checkpointing(recipe, first, room, hardware, examples)
    room = replace(room, choice=choice)
    held = train.batch_size * train.least_microbatches
    count = num_ranks * held
    if examples.capped:
        held = float(np.mean([drawn(held, recipe.run.seed + k).num_examples
                              for k in range(steps)])) / num_ranks
    report = {
        "world_size": num_ranks, "caps": caps,
        "examples_per_step": job.global_batch_size * held * num_ranks / count,
        "lengths": examples.what, "epoch": examples.epoch,
        "not_modelled": not_modelled(recipe, examples),
        "hardware": asdict(hardware), "dtype": memory.fsdp.forward_dtype,
        "without": sorted(absent(recipe.model)),
        "balanced": recipe.balance.enabled,
        "checkpointing": choice, "memory_budget_bytes": room.budget, "allowed_by": room.why,
        "parameters": parameters(recipe.model),
        "state_bytes": memory.state_bytes(),
        "save_bytes": memory.save_bytes(recipe.checkpoint),
        "writers_per_node": min(job.ranks_per_node, job.shard_size),
    }
    report |= _workload(recipe, drawn, spec, memory, choice, hardware, steps,
                        job.global_batch_size / count)
    report["batch_size"] = held / report["microbatches"]
    batches = [drawn(-(-count // num_ranks // len(first)), recipe.run.seed + k)
               for k in range(min(steps, 4))]
    found = heaviest(batches, spec.costs, examples.rows(), room.fits)
    report["long_examples"] = [asdict(item) for item in found]
    report["long_lines"] = table(found, room, examples.place) + room.misfits(
        examples.rows(), examples.place)
    report["exchange"] = exchange_report(first[0], job.shard_size)
    report["fits"] = report["memory"]["balanced"]["peak_bytes"] <= room.budget
    report["elapsed_s"] = time.perf_counter() - started
    report["peak_rss_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return report


def _checkpointing(recipe: Recipe, plans: Sequence[StepPlan], room: Room, hardware: Hardware,
                   examples: Examples) -> dict[str, str]:
    """phase -> checkpointing. Raises ValueError if a microbatch does not fit, naming the rows that
    can not."""
    loads = joined([loads_of(plan) for plan in plans])
    try:
        return decide(recipe, room.memory, loads, room.budget, room.why)
    except ValueError as e:
        assumed = (f"{e} (a GPU of {hardware.sheet.memory_bytes / 1e9:.0f} GB is assumed: "
                   f"{hardware.name})")
        named = room.misfits(examples.rows(), examples.place)
        raise ValueError("\n".join([assumed, *named])) from e


def _workload(recipe: Recipe, drawn: Callable[..., BatchLayout], spec: PlanSpec,
              memory: MemoryModel, choice: dict[str, str], hardware: Hardware, steps: int,
              share: float) -> dict:
    """Imbalance, time, memory and plan cost over drawn steps, of at least `steps` microbatches
    together. share: of the drawn examples that a step has, which is below 1 where
    train.global_batch_size does not divide."""
    without = dict.fromkeys(OF_MEDIA, PhasePolicy("none"))  # what balancing before sampling can do
    free = spec.without_room  # what others do knows no limit of memory
    schemes = {"balanced": spec, "none": replace(free, balance=NONE),
               "LLM only": replace(free, balance=replace(spec.balance, **without))}
    rows: dict[str, list[dict]] = {name: [] for name in schemes}
    loads: dict[str, list[Loads]] = {name: [] for name in schemes}
    counts: list[int] = []  # microbatches of the steps
    while sum(counts) < steps:
        layout = drawn(recipe.train.batch_size * recipe.train.least_microbatches,
                       recipe.run.seed + len(counts))
        count = recipe.train.accumulation_steps  # 0: as many as the step needs
        for name, scheme in schemes.items():
            started = time.perf_counter()
            plans = [plan for _, plan in plan_microbatches(replace(layout), scheme, count)]
            plan_s, count = time.perf_counter() - started, len(plans)
            loads[name] += [loads_of(plan) for plan in plans]
            in_step = replace(memory, microbatches=count)
            rows[name] += [{"plan_s": plan_s, "share": 1 / count} | measure(
                plan, in_step, choice, hardware, share) for plan in plans]
        counts.append(count)
    moments = {n: {k: float(np.max(v)) for k, v in memory.peaks(joined(x), choice).items()}
               for n, x in loads.items()}
    best = _mean(rows["balanced"], "slowest_s")
    computing = {n: [r["computing"] for r in rows[n]] for n in schemes}
    return {
        "steps": len(counts), "microbatches": float(np.mean(counts)),
        "phases": {p: {n: imbalance([r[p] for r in x if p in r]) for n, x in computing.items()}
                   for p in EVERY_PHASE if any(p in r for r in computing["none"])},
        "flops": {p: _mean([r | r["flops"] for r in rows["none"]], p) for p in spec.phases},
        "predicted": {n: {k: _mean(x, k) for k in x[0] if not isinstance(x[0][k], dict)}
                      for n, x in rows.items()},
        "ratio": {f"{n} / balanced": _mean(rows[n], "slowest_s") / best
                  for n in ("none", "LLM only")},
        "plan_ms": {n: 1e3 * float(np.median([r["plan_s"] for r in rows[n]])) for n in schemes},
        "memory": {n: {"moments": m, "peak_bytes": max(m.values())}
                   for n, m in moments.items()},
    }


def measure(plan: StepPlan, memory: MemoryModel, choice: dict[str, str],
            hardware: Hardware, share: float = 1.0) -> dict:
    """One plan, and the step of memory.microbatches such plans: (d,) seconds of computing of the
    phases that have something to do; the predicted step and where its time goes, its FLOP and its
    bytes between nodes. share: see _workload."""
    work = work_of(plan, memory.model)
    slowest, computing = 0.0, {}
    for phase in plan.spec.phases:
        seconds = rank_seconds(work, phase, memory, hardware).sum(axis=0)
        slowest += float(seconds.max())
        if work.positions[phase].any():
            computing[phase] = seconds
    count, flops = memory.microbatches, step_flops(memory.model, plan.layout)
    time_: StepTime = timed(work, memory, choice, hardware)
    return {"computing": computing, "slowest_s": count * slowest,
            "flops": {phase: share * count * flop for phase, flop in flops.items()},
            "step_s": time_.seconds, "mfu": share * time_.mfu, "exchange_s": time_.exchange,
            "traffic_s": time_.traffic, "update_s": time_.update,
            **{f"{p}_s": float(sum(x)) for p, x in time_.phases.items()},
            "waiting_s": float(sum(time_.waiting.values())),
            "tokens_per_gpu": share * time_.tokens_per_gpu,
            "internode_bytes": float(count * sum(
                s["internode_bytes"] for s in plan.stats.values()))}


def exchange_report(plan: StepPlan, shard_size: int) -> dict:
    """Volume and peers of a plan; and what balancing inside shard groups costs."""
    d = plan.layout.num_ranks
    node = min(plan.spec.ranks_per_node, d)
    pairs: list[np.ndarray] = []
    send = np.zeros(d)
    for phase in plan.spec.phases:
        for move, volume in plan.transfers(phase):
            source, target, held = move.volume(volume)
            between = source // node != target // node
            send += np.bincount(source[between], held[between], d)
            pairs.append(source * d + target)
    met = np.unique(np.concatenate(pairs))
    flat = np.bincount(met // d, minlength=d)
    out = {"ranks_per_node": node, "internode_bytes_per_rank": float(send.mean()),
           "busiest_send_bytes": float(send.max()),
           "peers": [float(flat.mean()), int(flat.max()), d - 1]}
    if shard_size < d:
        out["shard_size"] = shard_size
        out["imbalance_world"] = _imbalance(plan)
        out["imbalance_shard_groups"] = _imbalance(
            plan_step(plan.layout, replace(plan.spec.without_room, group_size=shard_size)))
    return out


def _imbalance(plan: StepPlan) -> dict[str, float]:
    costs = {p: plan.phase_cost(p)[1] for p in plan.spec.phases}
    return {p: imbalance(c) for p, c in costs.items() if c.any()}


def _mean(rows: list[dict], key: str) -> float:
    """Of steps. rows: of their microbatches."""
    weights = [r["share"] * (r["step_s"] if key in OF_A_SECOND else 1) for r in rows]
    return float(np.average([r[key] for r in rows], weights=weights))
