"""A training step waits for nothing of its device until it is read: on CPU with every operator
watched that would wait on a GPU, and on a GPU by its own account."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchmllm.batch import on_device
from orchmllm.config.recipe import FsdpConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.launch import World
from orchmllm.trainer import Trainer
from tests.lib.no_sync import Mixes, NoSync, Waits
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe


@pytest.mark.parametrize("code, error", [
    *((code, Waits) for code in (
        lambda x: float(x.sum()), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.unique(),
        lambda x: bool((x > 0).any()), lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: x.tolist(), lambda x: x.cpu(), lambda x: torch.zeros(3).to("meta"),
        lambda x: torch.empty(3, device="meta").copy_(x))),
    (lambda x: torch.zeros(3, 3, device="meta") + x, Mixes),
    (lambda x: torch.zeros(3, device="meta")[x.long()], Mixes)])
def test_the_watch_notices(code, error):
    with NoSync(), pytest.raises(error):
        code(torch.ones(3))


def test_the_watch_lets_pass_what_does_not_wait():
    with NoSync():
        on_device(np.arange(3), "meta")
        torch.arange(3).add(1)[1:].float()
        torch.ones(3).cumsum(0).index_select(0, torch.tensor([1]))


def watched_step(world: World, spoil: bool = False) -> str:
    """One step of the real trainer after a first one, watched; what was waited for, or nothing."""
    data = SyntheticDataset()
    trainer = Trainer(recipe(fsdp=FsdpConfig(compute_dtype="bfloat16")), world, dataset=data)
    loader = iter(StepLoader(data, GlobalSampler(range(16), 8, shuffle=False),
                             trainer.orchestrator, num_steps=2, prefetch=0, feed=trainer._feed))
    trainer.reads_late = True
    for group in trainer.optimizer.param_groups:
        group["fused"] = True
    trainer.train_step(next(loader))
    step = next(loader)
    watch = NoSync()
    uncounted(trainer, watch)
    if spoil:
        send = trainer._send
        trainer._send = lambda values: send([float(v) for v in values])
    try:
        with watch:
            trainer._unread = trainer._update(step, *trainer._compute(step))
        assert np.isfinite(trainer._read()["loss"])
    except Waits as e:
        return str(e)
    return ""


def uncounted(trainer: Trainer, watch: NoSync) -> None:
    """AdamW's kernel of a CPU reads found_inf on the host."""
    update = trainer.optimizer.step

    def step() -> None:
        watch.paused = True
        update()
        watch.paused = False

    trainer.optimizer.step = step


@pytest.mark.dist
def test_the_trainers_step_waits_for_nothing():
    assert run_ranks(watched_step, 2) == ["", ""]
    assert "_local_scalar_dense" in run_ranks(watched_step, 1, True)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only CUDA counts its syncs")
@pytest.mark.parametrize("compute_dtype", ["", "bfloat16"])
def test_a_step_on_a_gpu_waits_for_nothing(tmp_path, compute_dtype):
    """torch.cuda.set_sync_debug_mode("error") around all of a step but what reads it."""
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1,
                            store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        data = SyntheticDataset()
        fsdp = FsdpConfig(param_dtype="float32", compute_dtype=compute_dtype, loss_chunk_rows=64)
        trainer = Trainer(recipe(fsdp=fsdp), World(0, 1, 0, 1, "", 0), dataset=data)
        loader = iter(StepLoader(data, GlobalSampler(range(24), 8, shuffle=False),
                                 trainer.orchestrator, num_steps=3, prefetch=0,
                                 feed=trainer._feed))
        for _ in range(2):
            trainer.train_step(next(loader))
        step = next(loader)
        torch.cuda.set_sync_debug_mode("error")
        try:
            trainer._unread = trainer._update(step, *trainer._compute(step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert np.isfinite(trainer._read()["loss"])
    finally:
        dist.destroy_process_group()
