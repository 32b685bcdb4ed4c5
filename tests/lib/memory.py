"""The peak memory of a real forward and backward pass beside the memory model's."""

from __future__ import annotations

import gc
from contextlib import nullcontext

import numpy as np
from torch.profiler import ProfilerActivity, profile

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.plan.assign import PHASES
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.trainer import Trainer
from tests.lib.drawn import model_of
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.tracked import as_on_a_gpu, tracked_peak


def wide() -> ModelConfig:
    """Activations, not weights, take the memory."""
    return model_of(
        num_layers=4,
        vision={"embed_dim": 96, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 4},
        audio={"d_model": 96, "encoder_ffn_dim": 384, "encoder_attention_heads": 4},
        text={"hidden_size": 128, "intermediate_size": 352, "num_attention_heads": 4,
              "num_key_value_heads": 4, "vocab_size": 512})


def _peak(trainer: Trainer, step) -> float:
    """Of one forward and backward pass. What gloo is late with on a busy machine comes on top."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        trainer._accumulate(step)
    trainer.optimizer.zero_grad()
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events()
                    if e.name() == "[memory]")
    return float(np.cumsum([b for _, b in events]).max())


def dataset(kinds: tuple[str, ...]) -> SyntheticDataset:
    return SyntheticDataset(kinds=kinds, size=1000, max_side=224)


def of(model: ModelConfig, fsdp: FsdpConfig) -> Recipe:
    return recipe(model=model, fsdp=fsdp, balance=BalanceConfig(enabled=False))


def measured(world, one: Recipe, kinds: tuple[str, ...], batch_size: int = 24
             ) -> tuple[float, StepPlan]:
    """(Measured peak bytes of one forward and backward pass above what is resident before it but
    the batch, from the allocator's own events: the least of three passes; its plan)."""
    data = dataset(kinds)
    trainer = Trainer(one, world, dataset=data)
    n = batch_size * world.world_size
    loader = iter(StepLoader(data, GlobalSampler(range(2 * n), n, shuffle=False),
                             trainer.orchestrator, num_steps=2, prefetch=0, feed=trainer._feed))
    trainer._accumulate(next(loader))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    step = next(loader)
    gc.collect()
    peak = min(_peak(trainer, step) for _ in range(3))
    held = []  # a batch that is on the device already
    step.micro[0].content.moved(lambda x: held.append(x.nbytes) or x)
    return peak + sum(held), step.plans[0]


def compared(one: Recipe, kinds: tuple[str, ...]) -> list[tuple[float, float]]:
    """(Measured, predicted) of two ranks, without parameters and the optimizer's state. A CPU keeps
    more than the GPU of the memory model: what torch's tracker finds with its own kernels, less
    what it finds with those of a GPU, is added to what is predicted."""
    out, memory = [], MemoryModel(one.model, one.fsdp, 2)
    state, found = memory.state_bytes(), run_ranks(measured, 2, one, kinds)
    choice = {p: one.fsdp.checkpointing(p) for p in PHASES}
    for rank, (peak, plan) in enumerate(found):
        moments = memory.peaks(loads_of(plan), choice)
        predicted = max(float(v[rank]) for k, v in moments.items() if k != "optimizer")
        of_cpu, of_gpu = (tracked_peak(one, plan, dataset(kinds), rank, kernels)
                          for kernels in (nullcontext, as_on_a_gpu))
        out.append((peak, predicted - state["parameters"] - state["optimizer"] + of_cpu - of_gpu))
    return out
