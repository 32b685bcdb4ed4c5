"""What fits: the recomputation that `auto` stands for, and the largest mini-batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.models.flops import Lengths
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.sharding.choice import choose_checkpointing
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import Choice, MemoryModel

# Of a GPU's memory: 74 of an H100's 85 GB. The rest is for CUDA's context, NCCL's buffers,
# fragments, and what the prediction misses.
DEVICE_SHARE = 0.87
TRIED = 64  # at once, for the largest that fits: a power of 2
MISSED = 1.04  # tracked peaks are up to so much of the prediction (docs/scale.md)


def with_real_batch(recipe: Recipe, num_ranks: int, kept: int = 0) -> Recipe:
    """The recipe with what a rank and microbatch (with accumulation_steps=auto: a rank) gets at
    most as train.batch_size, where train.global_batch_size decides it. kept: examples a step of
    the run that is resumed, which decide it, too."""
    whole = resolve(recipe, num_ranks, 1, kept=kept).global_batch_size
    share = -(-whole // (num_ranks * recipe.train.least_microbatches))
    return replace(recipe, train=replace(recipe.train, batch_size=share))


def joined(loads: Sequence[Loads]) -> Loads:
    """The ranks of several steps, as if of one."""
    def join(parts) -> np.ndarray:
        return np.concatenate([np.asarray(p, float) for p in parts])

    return Loads(
        {p: Lengths(*(join(getattr(x.phases[p], name) for x in loads)
                      for name in ("rows", "positions", "tokens"))) for p in EVERY_PHASE},
        {p: join(x.received[p] for x in loads) for p in loads[0].received},
        {p: join(x.pairs[p] for x in loads) for p in EVERY_PHASE},
        join(np.broadcast_to(x.gathered, x.phases["llm"].positions.shape) for x in loads))


def decide(
    recipe: Recipe, memory: MemoryModel, loads: Loads, budget_bytes: float,
    allowed_by: str = "fsdp.memory_gb", kept: int = 0, taken: float = MISSED, by_layer: bool = True
) -> dict[str, str]:
    """phase -> checkpointing. Raises ValueError if the recipe cannot fit the budget, naming what
    would; without a budget (0) `auto` cannot be decided and everything else is taken as it is.
    kept: as in with_real_batch. taken: what a rank may need of the prediction where something is
    chosen; if then nothing fits that is predicted to fit, all that is open is recomputed.
    by_layer: see choose_checkpointing."""
    asked = {p: recipe.fsdp.checkpointing(p) for p in EVERY_PHASE}
    if not budget_bytes:
        if "auto" in asked.values():
            raise ValueError("fsdp.activation_checkpointing=auto has to know the memory of a rank: "
                             "set fsdp.memory_gb")
        return asked
    asked = {p: asked[p] for p in memory.phases}
    fixed = {p: c for p, c in asked.items() if c != "auto"}
    full = {p: fixed.get(p, "full") for p in asked}
    try:
        return choose_checkpointing(memory, loads, budget_bytes / taken, fixed, by_layer)
    except ValueError:
        if memory.peak(loads, full) <= budget_bytes:
            return full
    try:  # what is said is of the whole budget
        return choose_checkpointing(memory, loads, budget_bytes, fixed, by_layer)
    except ValueError as e:
        given, cure = (_in_microbatches if kept else _smaller)(
            recipe, memory, loads, full, budget_bytes, kept)
        cure = (f"{cure} would fit if the load of a rank shrinks in proportion" if cure else
                f"{smaller_state(recipe, memory.shards)} would help")
        raise ValueError(
            f"the recipe does not fit: {given} on shard groups of {memory.shards} "
            f"{e} ({allowed_by}); {cure}") from e


def smaller_state(recipe: Recipe, shards: int) -> str:
    """What makes parameters, gradients and the optimizer's state of a rank smaller."""
    return ", ".join([
        f"{'fsdp.shard_size above' if recipe.fsdp.shard_size else 'more ranks than'} {shards}",
        *["fsdp.cpu_offload=true"] * (not recipe.fsdp.cpu_offload),
        *["fsdp.param_dtype=bfloat16"] * (recipe.fsdp.param_dtype != "bfloat16"),
        "or fewer parameters that learn"])


def _smaller(recipe: Recipe, memory: MemoryModel, loads: Loads, choice: dict[str, str],
             budget_bytes: float, _: int) -> tuple[str, str]:
    """What a rank holds by the recipe, and the most of it that fits, "" if nothing does."""
    batch, whole = recipe.train.batch_size, recipe.train.global_batch_size
    key, now = ("train.global_batch_size", whole) if whole else ("train.batch_size", batch)
    if recipe.data.batching == "capped":  # the caps decide what a rank holds
        key, now = "data.max_batch_tokens", recipe.data.max_batch_tokens
        batch = now
    fits = largest_fitting(memory, loads, choice, budget_bytes, batch, batch)
    return f"{key}={now}", f"{key}={now * fits // batch}" if fits else ""


def _in_microbatches(recipe: Recipe, memory: MemoryModel, loads: Loads, choice: dict[str, str],
                     budget_bytes: float, kept: int) -> tuple[str, str]:
    """The same of a resumed run, which keeps its examples a step: more microbatches, or ""."""
    batch, count = recipe.train.batch_size, recipe.train.least_microbatches
    fits = (n for n in range(count + 1, batch * count + 1) if replace(memory, microbatches=n).peak(
        scaled(loads, -(-batch * count // n) / batch), choice) <= budget_bytes)
    more = next(fits, 0)
    return f"the checkpoint's step of {kept} examples", (
        f"train.global_batch_size={kept} train.accumulation_steps={more}" if more else "")


def budget_of(recipe: Recipe, device_bytes: float) -> tuple[float, str]:
    """(bytes that tensors of a rank may take, where the figure comes from): fsdp.memory_gb if it is
    set and no more than the GPU has, else a share of that. device_bytes: 0 on a CPU."""
    asked = 1e9 * recipe.fsdp.memory_gb
    if not device_bytes or 0 < asked <= device_bytes:
        return asked, "fsdp.memory_gb"
    return DEVICE_SHARE * device_bytes, f"{DEVICE_SHARE:.0%} of the GPU's; fsdp.memory_gb is " + (
        f"{recipe.fsdp.memory_gb:g}" if asked else "not set")


def scaled(loads: Loads, factor: float | np.ndarray) -> Loads:
    """The loads of a mini-batch `factor` times as large, to first order, or of (n, 1) cases."""
    return loads.each(lambda _, values: values * factor)


def largest_fitting(memory: MemoryModel, loads: Loads, choice: Choice, budget_bytes: float,
                    now: int, high: int) -> int:
    """Largest b in 1 .. high for which `b / now` times these loads of (d,) ranks fit; 0 if there is
    none. Many are tried at once, first far apart."""
    found, step = 0, TRIED ** ((high.bit_length() - 1) // (TRIED.bit_length() - 1))
    while step:
        tried = np.arange(found + step, min(high, found + TRIED * step) + 1, step)
        needed = memory.highest(scaled(loads, tried[:, None] / now), choice).max(axis=1)
        found, step = found + step * int((needed <= budget_bytes).sum()), step // TRIED
    return found
