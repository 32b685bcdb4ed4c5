"""From a recipe to its sharded model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.comm.agree import RemoteError, describe, raise_first
from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import RowGather, gather_texts, node_group
from orchmllm.config.recipe import Recipe
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.hf.sources import WeightSource, fingerprint
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PlanSpec, most_shares
from orchmllm.sharding.load_whole import load_whole
from orchmllm.sharding.optimizer import describe_learning


def build_model(
    recipe: Recipe, device: torch.device, checkpointing: Mapping[str, str],
    gather: RowGather, ranks_per_node: int, group: dist.ProcessGroup | None,
    log: Callable[[str], None],
) -> WholeModel:
    """The model. Collective; gather: of all ranks. group: for what moves in a forward (default: the
    default group). checkpointing: see orchmllm.sharding.blocks.recompute; ranks_per_node: see
    orchmllm.sharding.gathers."""
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
    model.encoders, model.device_group = PlannedEncoders(model.hf, group), group
    model.seed = recipe.run.seed
    return model


def share_in_nodes(model: WholeModel, recipe: Recipe, spec: PlanSpec, num_ranks: int,
                   device: torch.device, log: Callable[[str], None]) -> None:
    """Lets the ranks of a node share examples, where the recipe says so. Collective. Raises
    ValueError for a model whose examples cannot be shared."""
    asked = recipe.balance.llm.max_shares
    if asked == 1:
        return
    model.check_shares()
    nodes = [spec.node_of(rank, num_ranks) for rank in range(num_ranks)]
    model.node_group = node_group(nodes, device, recipe.launch.timeout_s)
    most = most_shares(recipe.balance, len(nodes[0]), num_ranks)
    log(f"balance.llm.max_shares = {asked}: up to {most} ranks of a node share an example"
        + " (a node has no more, or balancing is off)" * (most < asked))


def agreed(gather: RowGather, error: Exception | None) -> None:
    """Waits for all ranks. Raises RemoteError on all of them if one has an error."""
    text = describe(error)
    sizes = gather(np.array([len(text.encode())], np.int64))[:, 0]
    raise_first(0, gather_texts(gather, text, sizes), error)


def agreed_fingerprint(sources: Sequence[WeightSource],
                       gather: Callable[[Sequence[int]], np.ndarray]) -> int:
    """The fingerprint. gather: gives (d, n) for n numbers of each rank. Raises AgreedError on all
    ranks if they would shard different weights: nodes may each have a copy of a folder."""
    mine = fingerprint(sources)
    fingerprints = gather([mine])[:, 0]
    values, counts = np.unique(fingerprints, return_counts=True)
    if len(values) > 1:
        odd = np.flatnonzero(fingerprints != values[counts.argmax()]).tolist()
        raise AgreedError(
            f"pretrained weights: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} "
            f"read{'' if len(odd) > 1 else 's'} other weights than the rest: give every node the "
            "same copy of the folders")
    return mine
