"""From a recipe to the parts that a trainer, a dry run or a comparison needs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from orchmllm.comm.exchange import RowGather, gloo_group
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.sampler import check_indexed
from orchmllm.data.stream import open_dataset
from orchmllm.data.survey import survey
from orchmllm.models.families import read_config
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PlanSpec
from orchmllm.runtime.preflight import check_vocabulary

MOST_CHARS = 100_000  # of a variable in the environment of the ranks, which has room for 131,000


def build_dataset(recipe: Recipe, log: Callable[[str], object] = lambda line: None, *,
                  seen: bool = False) -> ConversationDataset:
    """log: is told where rows of its sources go, unless that was seen. Raises ValueError naming the
    file if data or tokenizer cannot be used with the model, or too much of the data is lost."""
    read_config(Path(recipe.model.folder))  # other versions of transformers lack what reads rows
    dataset = open_dataset(recipe.data, recipe.model.folder, seed=recipe.run.seed)
    check_vocabulary(dataset.tokenizer, recipe.model)
    if not seen:
        survey(dataset.sources, dataset.reader, recipe.data, log)
    return dataset


def open_data(recipe: Recipe) -> ConversationDataset:
    """The dataset of a recipe. Raises ValueError for data of which ranks could draw nothing."""
    dataset = build_dataset(recipe, seen=True)
    dataset.split(recipe.data.num_validation)  # raises what the ranks would
    if recipe.data.batching == "capped":
        check_indexed(dataset)
    return dataset


def look_at_data(recipe: Recipe, log: Callable[[str], object]) -> str:
    """Before there are ranks: rows of each source go the whole way to a model, and ranks that start
    here need not look again. Returns the ledgers as JSON, as many as fit. Raises ValueError."""
    dataset = open_data(recipe)
    ledgers = [ledger.saved() for ledger in survey(
        dataset.sources, dataset.reader, recipe.data, log, decode=True)]
    while len(json.dumps(ledgers)) > MOST_CHARS:
        ledgers.pop()
    os.environ["ORCHMLLM_LEDGERS"] = json.dumps(ledgers)
    return os.environ["ORCHMLLM_LEDGERS"]


def build_orchestrator(
    recipe: Recipe, spec: PlanSpec, world_size: int, device: torch.device,
    device_group: dist.ProcessGroup | None = None,
) -> Orchestrator:
    """One with groups of its own, for one prefetch thread. Collective. device_group: see
    Orchestrator."""
    timeout = recipe.launch.timeout_s
    # Text moves in the prefetch thread.
    moves = spec.balance.dispatch in ("bytes", "tensors")
    group = gloo_group(range(world_size), timeout) if moves else None
    return Orchestrator(spec, RowGather(spec.ranks_per_node, timeout), device=device, group=group,
                        device_group=device_group)
