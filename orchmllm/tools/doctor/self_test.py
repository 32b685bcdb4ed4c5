"""Trains a tiny model on the ranks that are there, in every way in which a wrong exchange, a wrong
group or a wrong order of collectives would show: as a difference of gradients, or as a hang.

Started by `orchmllm doctor --self-test` under torchrun or srun. It ends at the first failure, which
all ranks tell.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import CheckpointConfig, FsdpConfig, LaunchConfig, Recipe
from orchmllm.launch import World, device_of
from orchmllm.plan.assign import PhasePolicy
from orchmllm.tools.doctor.synthetic import SyntheticDataset, recipe
from orchmllm.train import run_rank
from orchmllm.trainer import Trainer

BATCH = 3  # examples of a rank
LIMITS = LaunchConfig(timeout_s=90, stall_timeout_s=60)  # seconds after which a hang is told
TOLERANCE = 1e-9  # relative, of a gradient in float64
ROUNDING = 0.3  # the same in bfloat16, whose own rounding makes up to 0.1 of it
_PHASE = PhasePolicy("greedy")  # which moves much, so that what is moved wrongly shows
GREEDY = BalanceConfig(vision=_PHASE, audio=_PHASE, llm=_PHASE, dispatch="tensors")
NUM_STEPS = 4  # of the run that is stopped half-way


def run(world: World) -> int:
    """The exit code of this rank."""
    def work(watch: object) -> None:
        started = last = time.perf_counter()
        for test in (gradients, no_media, half_precision, save_and_resume):
            for name in test(world):
                now = time.perf_counter()
                if world.rank == 0:
                    print(f"ok    {name} ({now - last:.1f} s)", flush=True)
                last = now
        if world.rank == 0:
            print(f"self-test on {world.world_size} ranks of {device_of(world).type}: no failure, "
                  f"in {time.perf_counter() - started:.1f} s")

    return run_rank(recipe_of(), world, work)


def gradients(world: World) -> Iterator[str]:
    """The gradients of a step, balanced in several ways, are those of the step as sampled."""
    plain = step_gradients(world, recipe_of())
    on = replace(GREEDY, ranks_per_node=max(1, world.world_size // 2))
    ways = {
        "balanced, rows by all-to-all": recipe_of(balance=on),
        "balanced, media over the control groups": recipe_of(balance=replace(on, dispatch="bytes")),
        "exchanges beside gathers of two units ahead": recipe_of(
            balance=on, fsdp=FsdpConfig(param_dtype="float64", prefetch=2)),
    }
    if world.world_size % 2 == 0:
        ways["balanced, hybrid sharding"] = recipe_of(
            balance=on, fsdp=FsdpConfig(param_dtype="float64", shard_size=world.world_size // 2))
    for name, how in ways.items():
        compare(name, step_gradients(world, how), plain)
        yield f"the same gradients: {name}"


def no_media(world: World) -> Iterator[str]:
    """Ranks but the last sample text alone."""
    kinds = ("TT",) * (BATCH * (world.world_size - 1)) + ("TVAVT",) * BATCH
    data = {"dataset": SyntheticDataset(kinds=kinds, size=len(kinds))}
    plain = step_gradients(world, recipe_of(), in_order=True, **data)
    balanced = step_gradients(world, recipe_of(balance=GREEDY), in_order=True, **data)
    compare("ranks without media", balanced, plain)
    yield "the same gradients: ranks without media"


def half_precision(world: World) -> Iterator[str]:
    """A step in bfloat16, with the attention kernels of the device, beside one in float64."""
    how = recipe_of(balance=GREEDY, fsdp=FsdpConfig(compute_dtype="bfloat16"))
    compare("a step in bfloat16", step_gradients(world, how), step_gradients(world, recipe_of()),
            ROUNDING)
    yield "a step in bfloat16"


def save_and_resume(world: World) -> Iterator[str]:
    """A run that is stopped half-way and goes on has the losses of one that is not. Raises
    RuntimeError if it has others."""
    # Nodes share the folder where the command is started rather than /tmp.
    where = None if world.local_world_size == world.world_size else "."
    folder = [os.path.abspath(tempfile.mkdtemp(dir=where)) if world.rank == 0 else ""]
    dist.broadcast_object_list(folder)
    losses = {}
    for name, steps in (("whole", (NUM_STEPS,)), ("resumed", (NUM_STEPS // 2, NUM_STEPS))):
        rows: list[dict] = []
        for num_steps in steps:
            how = recipe_of(num_steps=num_steps, balance=GREEDY)
            how = replace(how, run=replace(how.run, dir=str(Path(folder[0]) / name)),
                          checkpoint=CheckpointConfig())
            with trainer_of(world, how) as trainer:
                trainer.run(rows)
        losses[name] = [row["loss"] for row in rows]
    dist.barrier()
    if world.rank == 0:
        shutil.rmtree(folder[0])
    if not np.allclose(losses["resumed"], losses["whole"], rtol=TOLERANCE, atol=0):
        raise RuntimeError(f"a resumed run has other losses: {losses}")
    yield f"a run of {NUM_STEPS} steps, saved and resumed half-way"


def recipe_of(*, num_steps: int = 1, balance: BalanceConfig | None = None, **sections) -> Recipe:
    """Of the tiny model; as sampled without `balance`."""
    base = recipe(balance=balance or BalanceConfig(enabled=False), launch=LIMITS, **sections)
    return replace(base, train=replace(base.train, num_steps=num_steps, batch_size=BATCH,
                                       max_grad_norm=0.0, warmup_steps=0, min_lr_ratio=1.0))


@contextmanager
def trainer_of(world: World, how: Recipe, dataset: SyntheticDataset | None = None
               ) -> Iterator[Trainer]:
    size = max(24, 2 * BATCH * world.world_size)
    torch.manual_seed(0)
    with redirect_stdout(None):  # the output of a run would hide the list of tests
        trainer = Trainer(how, world, dataset=dataset or SyntheticDataset(size=size))
        try:
            yield trainer
        finally:
            trainer.close()


def step_gradients(world: World, how: Recipe, in_order: bool = False,
                   dataset: SyntheticDataset | None = None) -> dict[str, torch.Tensor]:
    """Parameter -> its whole gradient in the first step, on every rank. in_order: each rank samples
    consecutive examples. Raises RuntimeError if there was no update, or nothing moved in a step
    that is balanced."""
    found: dict[str, torch.Tensor] = {}
    with trainer_of(world, how, dataset) as trainer:
        def keep(*_: object) -> None:
            for name, p in trainer.model.named_parameters():
                if p.grad is not None:
                    found[name] = p.grad.full_tensor().double().cpu()

        trainer.optimizer.register_step_pre_hook(keep)
        loader = trainer.loader() if not in_order else in_order_loader(trainer)
        row = trainer.train_step(next(iter(loader)))
    if not found:
        raise RuntimeError("a step made no update")
    if how.balance.enabled and world.world_size > 1 and not all(
            phase["moved_bytes"] for phase in row["phases"].values()):
        raise RuntimeError("a step was balanced and moved nothing in some phase")
    return found


def in_order_loader(trainer: Trainer):
    from orchmllm.data.loading.step_loader import StepLoader
    from orchmllm.data.sampler import GlobalSampler

    size = trainer.progress.global_batch_size
    return StepLoader(trainer.dataset, GlobalSampler(range(size), size, shuffle=False),
                      trainer.orchestrator, num_steps=1, prefetch=0, feed=trainer._feed)


def compare(what: str, got: dict[str, torch.Tensor], want: dict[str, torch.Tensor],
            tolerance: float = TOLERANCE) -> None:
    """Gradients of any shapes by parameter. Raises RuntimeError naming the one that differs most.
    """
    error, name = largest_error(got, want)
    if not error <= tolerance:
        raise RuntimeError(f"{what}: the gradient of {name} differs by {error:.1e} of its size "
                           "from that of the step as sampled")


def largest_error(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]
                  ) -> tuple[float, str]:
    """(||got - want|| / ||want||, parameter) where it is largest, or is no number: one that lost
    its gradient has 1, however small it is beside others. Infinite for one that is not in both."""
    if other := got.keys() ^ want.keys():
        return float("inf"), min(other)
    errors = {name: float((got[name] - exact).norm() / exact.norm().clamp(min=1e-12))
              for name, exact in want.items()}
    name = max(errors, key=lambda name: (errors[name] != errors[name], errors[name]))
    return errors[name], name
