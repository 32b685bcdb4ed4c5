"""From a recipe to its sharded model: the three parts of this package, or a model of
transformers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.comm.agree import RemoteError, describe, raise_first
from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.recipe import Recipe
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.hf.sources import WeightSource
from orchmllm.models.hf import WholeModel
from orchmllm.models.mllm import MultimodalModel
from orchmllm.sharding.fsdp import build_model
from orchmllm.sharding.hf import load_whole
from orchmllm.sharding.optimizer import describe_learning


def build_parts(
    recipe: Recipe, device: torch.device, checkpointing: Mapping[str, str],
    sources: Sequence[WeightSource], gather: RowGather, ranks_per_node: int,
    group: dist.ProcessGroup | None, log: Callable[[str], None],
) -> MultimodalModel:
    """The model. Collective; gather: of all ranks. group: for what moves in a forward (default: the
    default group). The rest as in orchmllm.sharding.fsdp.build_model."""
    return build_model(recipe.model, recipe.fsdp, device, recipe.run.seed, checkpointing, sources,
                       ranks_per_node=ranks_per_node, group=group)


def build_whole(
    recipe: Recipe, device: torch.device, checkpointing: Mapping[str, str],
    sources: Sequence[WeightSource], gather: RowGather, ranks_per_node: int,
    group: dist.ProcessGroup | None, log: Callable[[str], None],
) -> WholeModel:
    """The same of a model of transformers."""
    error = None
    try:
        model = load_whole(Path(recipe.model.folder), recipe.model, recipe.fsdp, device,
                           checkpointing, ranks_per_node, recipe.run.seed,
                           lambda: agreed(gather, None))
    except RemoteError:  # all have it
        raise
    except Exception as e:  # the others wait
        error = e
    agreed(gather, error)
    if recipe.model.lora.rank:
        log(describe_learning(model))
    model.encoders = PlannedEncoders(model.hf, group)
    return model


def agreed(gather: RowGather, error: Exception | None) -> None:
    """Waits for all ranks. Raises RemoteError on all of them if one has an error."""
    text = describe(error)
    sizes = gather(np.array([len(text.encode())], np.int64))[:, 0]
    raise_first(0, gather_texts(gather, text, sizes), error)
