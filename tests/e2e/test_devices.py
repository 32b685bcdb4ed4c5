"""Every part of a step that runs on the device, under FSDP2 on a device that is not the host: no
operator mixes the two, none waits for the data. It stands in for CUDA where there is no GPU."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily

from orchmllm.comm.exchange import exchange_group
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig, TrainConfig
from orchmllm.models import attention
from orchmllm.models.whole_flops import plan_spec
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.layout import BatchLayout
from orchmllm.runtime.display import RunDisplay
from orchmllm.sharding.optimizer import clip_gradients, learning_parts, make_optimizer
from tests.lib.accelerator import accelerator
from tests.lib.drawn import model_of
from tests.lib.gradients import RandomPlanner
from tests.lib.no_sync import NoSync
from tests.lib.ranks import run_ranks
from tests.lib.simulated import microbatch, on_meta, shard_on
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.training import train

RANKS = 4
CHECKPOINTING = [
    FsdpConfig(compute_dtype="bfloat16", prefetch=2),
    FsdpConfig(activation_checkpointing="selective", loss_chunk_rows=16, shard_size=2, prefetch=1),
    FsdpConfig(activation_checkpointing="full", audio_reshard="node", llm_reshard="none"),
    # torch.compile traces nothing under a watch: the operators of its graph are called one by one.
    FsdpConfig(compute_dtype="bfloat16", llm_checkpointing="selective", compile=True),
]


class Groups(NoSync):
    """Also notes the process groups of each kind of collective. What it finds is noted: an
    exception in the backward pass of such a device ends the process."""

    def __init__(self, device: str, noted: list[Exception]) -> None:
        super().__init__(device, noted)
        self.groups: dict[str, set[str]] = {}
        self.own_operators: set[str] = set()

    def _tell(self, error: Exception) -> None:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        super()._tell(error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "orchmllm":
            self.own_operators.add(func.__name__.split(".")[0])
        if func.namespace == "c10d":
            for arg in args:
                if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
                    name = dist.ProcessGroup.unbox(arg).group_name
                    self.groups.setdefault(func.__name__.split(".")[0], set()).add(name)
        return super().__torch_dispatch__(func, types, args, kwargs)


def step(device: torch.device, fsdp: FsdpConfig, dispatch: str, noted: list[Exception],
         encoder_layers: int = 2) -> Groups:
    """Dispatch, forward, backward, clipping and AdamW of one rank, watched."""
    with unset_fake_temporarily():
        model = model_of(vision={"depth": encoder_layers}, audio={"encoder_layers": encoder_layers})
        spec = plan_spec(resolve(recipe(
            model=model, balance=BalanceConfig(dispatch=dispatch)), RANKS, RANKS))
        group, data = exchange_group(device, 60.0), SyntheticDataset()
        whole = on_meta(model, fsdp, group)
        layout = BatchLayout.concat([data.layout(i) for i in range(4 * RANKS)], [4] * RANKS)
        micro = microbatch(whole, data, RandomPlanner(0)(layout, spec), 1, dispatch)
    shard_on(device, whole, fsdp)
    optimizer = make_optimizer(whole, TrainConfig())
    planner = Orchestrator(spec, SimpleNamespace(rank=1, world_size=RANKS), device=device,
                           group=group, device_group=group)
    with (Groups(device.type, noted) as watch,
          patch.object(attention, "is_compiling", lambda: fsdp.compile)):
        row = planner.dispatch(micro)
        loss = whole(row)
        (loss / 10).backward()
        clip_gradients(learning_parts(whole), 1.0, device)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    assert len(watch.own_operators) == 2 * fsdp.compile
    assert loss.device == device and row.targets.device == device
    return watch


DISPATCHES = ("tensors", "load", "bytes")
SOME = list(zip((*DISPATCHES, "load"), CHECKPOINTING, strict=True))
ALL = list(product(DISPATCHES, CHECKPOINTING))


def settings(world, chosen: list[tuple], encoder_layers: int) -> list[dict[str, set[str]]]:
    found, noted = [], []
    with accelerator(RANKS) as device:
        for dispatch, fsdp in chosen:
            found.append(step(device, fsdp, dispatch, noted, encoder_layers).groups)
            assert not noted, (dispatch, fsdp, noted)
    return found


@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chosen, encoder_layers", [
    (SOME, 1), pytest.param(ALL, 2, marks=pytest.mark.slow)], ids=["some", "all"])
def test_no_setting_mixes_devices_or_waits(chosen, encoder_layers):
    """Exchanges run in a group in which no parameters are gathered or reduced."""
    for groups in run_ranks(settings, 1, chosen, encoder_layers, timeout_s=1700.0)[0]:
        exchanges = groups.pop("alltoall_base_")
        assert groups and len(exchanges) == 1
        assert all(exchanges.isdisjoint(others) for others in groups.values()), groups


def threads_devices(world, folder: Path) -> dict[str, set[int]]:
    """The current GPUs of the threads of a run whose main thread has the fourth: a new thread has
    the first until it chooses another. torch.cuda is a stand-in."""
    current, seen = threading.local(), defaultdict(set)

    def note(*_) -> None:
        seen[threading.current_thread().name].add(getattr(current, "index", 0))

    class Noted(SyntheticDataset):
        def load(self, *args, **how):
            note()
            return super().load(*args, **how)

    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: getattr(current, "index", 0)
    torch.cuda.set_device = lambda index: setattr(current, "index", index)
    torch.cuda.set_device(3)
    RunDisplay.note = note  # a save is told by the thread that writes it
    base = recipe(model=SHALLOW)
    train(world, replace(
        base, run=replace(base.run, dir=str(folder)), train=replace(base.train, num_steps=2),
        data=replace(base.data, prefetch=1)), Noted())
    return dict(seen)


def test_threads_use_the_gpu_of_their_rank(tmp_path):
    (seen,) = run_ranks(threads_devices, 1, tmp_path)
    assert seen == {name: {3} for name in (
        "MainThread", "orchmllm-prefetch", "orchmllm-checkpoint")}
