"""The peak memory of a real forward and backward pass beside the memory model's."""

from __future__ import annotations

import gc

import numpy as np
from torch.profiler import ProfilerActivity, profile

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.memory import MemoryModel, loads_of
from orchmllm.trainer import Trainer
from tests.lib.synthetic import SyntheticDataset, recipe

WIDE = ModelConfig(  # activations, not weights, take the memory
    VisionConfig(4, 96, 384, 4, merge_size=2, max_side=224),
    AudioConfig(4, 96, 384, 4, num_mels=80, stack=2), LLMConfig(512, 4, 128, 352, 4, 4))



def _peak(trainer: Trainer, step) -> float:
    """Of one forward and backward pass. What gloo is late with on a busy machine comes on top."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        trainer._accumulate(step)
    trainer.optimizer.zero_grad()
    events = sorted((e.start_ns(), e.nbytes()) for e in prof.profiler.kineto_results.events()
                    if e.name() == "[memory]")
    return float(np.cumsum([b for _, b in events]).max())


def measured(world, fsdp: FsdpConfig, kinds: tuple[str, ...],
             model: ModelConfig = WIDE, batch_size: int = 24) -> tuple[float, float]:
    """(measured, predicted) peak bytes of one forward and backward pass above what is resident
    before it (parameters and optimizer state), from the allocator's own events: the least of
    three passes."""
    data = SyntheticDataset(kinds=kinds, size=1000, vision=model.vision.geometry,
                            audio=model.audio.geometry)
    trainer = Trainer(recipe(model=model, fsdp=fsdp, balance=BalanceConfig(enabled=False)), world,
                      dataset=data)
    n = batch_size * world.world_size
    loader = iter(StepLoader(data, GlobalSampler(range(2 * n), n, shuffle=False),
                             trainer.orchestrator, num_steps=2, prefetch=0))
    trainer._accumulate(next(loader))
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    step = next(loader)
    gc.collect()
    peak = min(_peak(trainer, step) for _ in range(3))
    memory = MemoryModel(model, fsdp, world.world_size)
    state = memory.state_bytes()
    moments = memory.peaks(loads_of(step.plans[0]),
                           {p: fsdp.checkpointing(p) for p in PHASES})
    predicted = max(float(v[world.rank]) for k, v in moments.items() if k != "optimizer")
    return peak, predicted - state["parameters"] - state["optimizer"]
