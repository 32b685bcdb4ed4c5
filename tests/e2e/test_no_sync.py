"""A training step waits for its device once, to log: on `meta`, where nothing can be read, on CPU
with every operator watched that would wait on a GPU, and on a GPU by its own account."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from orchmllm.batch import on_device
from orchmllm.config import FsdpConfig, plan_spec
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.launch import World
from orchmllm.models.mllm import MultimodalModel
from orchmllm.orchestrator import Microbatch, Orchestrator
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import BalanceConfig
from orchmllm.trainer import Trainer
from tests.lib.gradients import RandomPlanner
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import MODEL, SyntheticDataset, recipe

WAITING = ("local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "equal.",
           "repeat_interleave.Tensor", "assert_async")
READING = ("cpu", "numpy", "tolist")  # on the host they are no operators


class Waits(AssertionError):
    """A step would have waited for its device."""


class NoSync(TorchDispatchMode):
    """Raises Waits for operators whose result's size or Python value depends on the data, for
    blocking copies to another device, and for reading a tensor in Python. device: the one that is
    computed on; what is on another is not watched. `paused`: for what a step may wait for."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.device, self.paused = device, False
        self._methods = {name: getattr(torch.Tensor, name) for name in READING}

    def __enter__(self):
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, self._guarded(name, method))
        return super().__enter__()

    def __exit__(self, *error):
        for name, method in self._methods.items():
            setattr(torch.Tensor, name, method)
        return super().__exit__(*error)

    def _guarded(self, name: str, method):
        def read(tensor, *args, **kwargs):
            self._watch(f"Tensor.{name}", tensor.device.type == self.device)
            return method(tensor, *args, **kwargs)
        return read

    def _watch(self, name: str, waits: bool) -> None:
        if waits and not self.paused:
            raise Waits(f"{name} waits for the device")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.__name__
        if name.lstrip("_").startswith(WAITING):
            self._watch(name, args[0].device.type == self.device)
        elif name.startswith(("index.", "index_put")):
            self._watch(f"{name} by a mask", any(
                x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]))
        elif name.startswith("_to_copy"):
            to = torch.device(kwargs.get("device") or args[0].device)
            blocking = not kwargs.get("non_blocking")
            self._watch("a copy", to.type != args[0].device.type and blocking)
        elif name.startswith("copy_"):
            blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking"))
            self._watch("a copy", args[0].device.type != args[1].device.type and blocking)
        return func(*args, **kwargs)


@pytest.mark.parametrize("code", [
    lambda x: float(x.sum()), lambda x: x[x > 0], lambda x: x.nonzero(), lambda x: x.unique(),
    lambda x: bool((x > 0).any()), lambda x: torch.repeat_interleave(x, x.long()),
    lambda x: x.tolist(), lambda x: x.cpu(), lambda x: torch.zeros(3).to("meta"),
    lambda x: torch.empty(3, device="meta").copy_(x)])
def test_the_watch_notices(code):
    with NoSync(), pytest.raises(Waits):
        code(torch.ones(3))


def test_the_watch_lets_pass_what_does_not_wait():
    with NoSync():
        on_device(np.arange(3), "meta")
        torch.arange(3).add(1)[1:].float()
        torch.ones(3).cumsum(0).index_select(0, torch.tensor([1]))


def microbatch(num_ranks: int, rank: int, audio_mode: str, dispatch: str):
    """(spec, a rank's microbatch with inputs on the CPU) of a random rearrangement."""
    model = replace(MODEL, audio=replace(MODEL.audio, mode=audio_mode))
    chosen = recipe(model=model, balance=BalanceConfig(dispatch=dispatch))
    spec, data = plan_spec(chosen, num_ranks), SyntheticDataset(audio=model.audio.geometry)
    layout = BatchLayout.from_examples([data.layout(i) for i in range(4 * num_ranks)],
                                       [4] * num_ranks)
    plan = RandomPlanner(0)(layout, spec)
    mine = plan.for_rank(rank)
    moved = dispatch == "tensors"
    inputs = {
        m: torch.zeros(mine.encode[m].num_rows_in if moved else int(mine.encode[m].lengths.sum()),
                       getattr(model, m).geometry.row_size,
                       dtype=torch.uint8 if m == "vision" else torch.float32) for m in ENCODERS}
    rows = mine.llm.num_rows_in if moved else int(mine.llm.lengths.sum())
    text = torch.zeros(rows, 2, dtype=torch.int32)
    return model, spec, Microbatch(plan, mine, inputs, text, frozenset({int(mine.examples[0])}))


@pytest.mark.parametrize("audio_mode", ["packed", "padded", "fixed"])
@pytest.mark.parametrize("dispatch, chunk_rows", [("tensors", 0), ("load", 16)])
def test_a_step_on_meta_reads_nothing(audio_mode, dispatch, chunk_rows):
    """Dispatch, forward with its exchanges, backward, clipping and AdamW on a device without data,
    on one of four ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        model_config, spec, micro = microbatch(4, 1, audio_mode, dispatch)
        assert micro.rank_plan.encode["vision"].moves and micro.rank_plan.llm.moves
        with torch.device("meta"):
            model = MultimodalModel(model_config)
        model.llm.loss_chunk_rows = chunk_rows
        optimizer = torch.optim.AdamW(model.parameters())
        orchestrator = Orchestrator(spec, SimpleNamespace(rank=1, world_size=4), device="meta")
        with NoSync("meta"):
            loss = model(orchestrator.dispatch(micro, 10))
            (loss / 10).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        assert loss.device.type == norm.device.type == "meta"
    finally:
        dist.destroy_process_group()


def watched_step(world: World, spoil: bool = False) -> str:
    """One step of the real trainer after a first one, watched; what was waited for, or nothing."""
    data = SyntheticDataset()
    trainer = Trainer(recipe(fsdp=FsdpConfig(compute_dtype="bfloat16")), world, dataset=data)
    loader = iter(StepLoader(data, GlobalSampler(range(16), 8, shuffle=False),
                             trainer.orchestrator, num_steps=2, prefetch=0))
    trainer.train_step(next(loader))
    step = next(loader)
    watch = NoSync()
    allowed(trainer, watch)
    if spoil:
        gather = trainer._gather
        trainer._gather = lambda values: gather([float(v) for v in values])
    try:
        with watch:
            trainer.train_step(step)
    except Waits as e:
        return str(e)
    return ""


def allowed(trainer: Trainer, watch: NoSync) -> None:
    """The log's one synchronisation, and AdamW's counters (on the host on a GPU, too)."""
    gather, update = trainer._gather, trainer.optimizer.step

    def paused(call):
        def run(*args):
            watch.paused = True
            try:
                return call(*args)
            finally:
                watch.paused = False
        return run

    trainer._gather, trainer.optimizer.step = paused(gather), paused(update)


@pytest.mark.dist
def test_the_trainers_step_waits_once():
    assert run_ranks(watched_step, 2) == ["", ""]
    assert "_local_scalar_dense" in run_ranks(watched_step, 1, True)[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only CUDA counts its syncs")
@pytest.mark.parametrize("compute_dtype", ["", "bfloat16"])
def test_a_step_on_a_gpu_waits_once(tmp_path, compute_dtype):
    """torch.cuda.set_sync_debug_mode("error") around all of a step but its log."""
    dist.init_process_group("cpu:gloo,cuda:nccl", rank=0, world_size=1,
                            store=dist.FileStore(str(tmp_path / "store"), 1))
    try:
        data = SyntheticDataset()
        fsdp = FsdpConfig(param_dtype="float32", compute_dtype=compute_dtype, loss_chunk_rows=64)
        trainer = Trainer(recipe(fsdp=fsdp), World(0, 1, 0, 1, "", 0), dataset=data)
        loader = iter(StepLoader(data, GlobalSampler(range(24), 8, shuffle=False),
                                 trainer.orchestrator, num_steps=3, prefetch=0))
        for _ in range(2):
            trainer.train_step(next(loader))
        step, gather, syncs = next(loader), trainer._gather, []

        def logged(values):
            syncs.append(len(values))
            torch.cuda.set_sync_debug_mode("default")
            try:
                return gather(values)
            finally:
                torch.cuda.set_sync_debug_mode("error")

        trainer._gather = logged
        torch.cuda.set_sync_debug_mode("error")
        try:
            row = trainer.train_step(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert len(syncs) == 1 and np.isfinite(row["loss"])
    finally:
        dist.destroy_process_group()
