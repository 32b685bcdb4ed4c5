"""From a recipe to the parts that a trainer, a dry run or a comparison needs."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from orchmllm.comm.exchange import RowGather, bytes_group, hop_groups
from orchmllm.config import Recipe, TrainConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.stream import open_dataset
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.step import PlanSpec, StepPlan
from orchmllm.runtime.preflight import check_vocabulary


def build_dataset(recipe: Recipe) -> ConversationDataset:
    """Raises ValueError naming the file if data or tokenizer cannot be used with the model."""
    dataset = open_dataset(recipe.data, recipe.model.vision.geometry, recipe.model.audio.geometry,
                           seed=recipe.run.seed)
    check_vocabulary(dataset.tokenizer, recipe.model.llm)
    return dataset


def build_orchestrators(
    recipe: Recipe, spec: PlanSpec, world_size: int, device: torch.device,
    planner: Callable[..., StepPlan], *, count: int,
) -> list[Orchestrator]:
    """`count` of them, each with groups of its own: one for each prefetch thread. Collective."""
    timeout, ranks = recipe.launch.timeout_s, range(world_size)
    hops = (hop_groups(ranks, spec.ranks_per_node, timeout)
            if recipe.balance.exchange == "two_hop" else None)
    return [
        Orchestrator(
            spec, RowGather(spec.ranks_per_node, timeout), device=device, planner=planner,
            group=bytes_group(ranks, timeout) if recipe.balance.dispatch == "bytes" else None,
            hop_groups=hops)
        for _ in range(count)]


def learning_rate(step: int, config: TrainConfig) -> float:
    """Linear warm-up, then cosine to lr * min_lr_ratio at the last step."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(config.num_steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)
