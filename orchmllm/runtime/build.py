"""From a recipe to the parts that a trainer, a dry run or a comparison needs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from orchmllm.comm.exchange import RowGather, bytes_group
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.survey import survey
from orchmllm.models.spec import spec_of
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.preflight import check_vocabulary


def build_dataset(recipe: Recipe, log: Callable[[str], object] = lambda line: None
                  ) -> ConversationDataset:
    """log: is told what of the data is never learnt. Raises ValueError naming the file if data or
    tokenizer cannot be used with the model."""
    dataset = spec_of(recipe.model).dataset(recipe.data, recipe.model, seed=recipe.run.seed)
    check_vocabulary(dataset.tokenizer, recipe.model)
    survey(dataset.sources, dataset.reader, recipe.data, log)
    return dataset


def build_orchestrator(
    recipe: Recipe, spec: PlanSpec, world_size: int, device: torch.device,
    device_group: dist.ProcessGroup | None = None,
) -> Orchestrator:
    """One with groups of its own, for one prefetch thread. Collective. device_group: see
    Orchestrator."""
    timeout = recipe.launch.timeout_s
    # The text of whole examples moves in the prefetch thread.
    kinds = ("bytes", "tensors") if spec.fills else ("bytes",)
    group = bytes_group(range(world_size), timeout) if spec.balance.dispatch in kinds else None
    return Orchestrator(spec, RowGather(spec.ranks_per_node, timeout), device=device, group=group,
                        device_group=device_group)
