"""The peak memory of a real forward and backward pass beside the memory model's."""

from __future__ import annotations

import gc

import numpy as np
from torch.profiler import ProfilerActivity, profile

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.plan.assign import PHASES
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry
from orchmllm.sharding.memory import Loads, MemoryModel, loads_of
from orchmllm.trainer import Trainer
from tests.lib.drawn import model_of
from tests.lib.synthetic import SyntheticDataset, recipe


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


def _joined(memory: MemoryModel, loads: Loads, choice: str, rank: int) -> float:
    """Bytes of what attention made of each example, which a CPU keeps beside what it joins of them:
    of all blocks, or of the one that computes again."""
    of = [loads.phases[p].positions[rank] * memory.element * memory._counts[p].width *
          (memory.num_layers(p) if choice == "none" else 1)
          for p in PHASES if memory.kept(p, choice)]
    return float(sum(of) if choice == "none" else max(of))


def measured(world, fsdp: FsdpConfig, kinds: tuple[str, ...],
             model: ModelConfig, batch_size: int = 24, joined: bool = False
             ) -> tuple[float, float]:
    """(measured, predicted) peak bytes of one forward and backward pass above what is resident
    before it but the batch (parameters and optimizer state), from the allocator's own events: the
    least of three passes. joined: with what a CPU keeps more than a GPU."""
    data = SyntheticDataset(kinds=kinds, size=1000, vision=VisionGeometry(max_side=224),
                            audio=AudioGeometry(num_mels=8, stack=2))
    trainer = Trainer(recipe(model=model, fsdp=fsdp, balance=BalanceConfig(enabled=False)), world,
                      dataset=data)
    n = batch_size * world.world_size
    loader = iter(StepLoader(data, GlobalSampler(range(2 * n), n, shuffle=False),
                             trainer.orchestrator, num_steps=2, prefetch=0, feed=trainer._feed))
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
    if joined:
        choice = fsdp.activation_checkpointing
        predicted += _joined(memory, loads_of(step.plans[0]), choice, world.rank)
    held = []  # a batch that is on the device already
    step.micro[0].content.moved(lambda x: held.append(x.nbytes) or x)
    return peak + sum(held), predicted - state["parameters"] - state["optimizer"]
