"""Peak memory of the real model's forward and backward pass without memory: fake tensors, a fake
process group of any size, and torch's tracker of what FSDP2 holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchmllm.batch import Batch, PackedExamples, SequenceLengths
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig, Recipe
from orchmllm.models.families import model_class, read_config
from orchmllm.models.flops import Lengths, padded_phases, plan_spec
from orchmllm.models.hf import WholeModel
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import RankPlan, StepPlan, plan_step
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.fsdp import shard
from orchmllm.sharding.memory import Loads, MemoryModel, loads_of
from orchmllm.sharding.whole_memory import WholeMemory
from orchmllm.tools.predict.dry_run import NONE
from orchmllm.tools.predict.examples import of_mix


def tracked(recipe: Recipe, num_ranks: int) -> tuple[float, dict[str, float]]:
    """(tracked peak, predicted bytes by moment) of rank 0 in a drawn step without balancing:
    parameters, gradients, activations and exchanges, without the optimizer's moments."""
    memory, plan = planned(recipe, num_ranks)
    choice = {p: recipe.fsdp.checkpointing(p) for p in PHASES}
    moments = memory.peaks(loads_of(plan, padded_phases(recipe.model)), choice)
    moments.pop("optimizer")
    moves = memory.state_bytes()["optimizer"]
    return (tracked_peak(recipe, plan.for_rank(0), num_ranks),
            {name: float(values[0]) - moves for name, values in moments.items()})


def planned(recipe: Recipe, num_ranks: int) -> tuple[MemoryModel, StepPlan]:
    """The memory model of the step that is tracked, and its plan."""
    job = resolve(recipe, num_ranks, 8)
    layout = of_mix(recipe).draw(num_ranks, recipe.train.batch_size, 0)
    return MemoryModel.of(job, on_cpu=True), plan_step(
        layout, replace(plan_spec(job), balance=NONE))


def tracked_peak(recipe: Recipe, plan: RankPlan, num_ranks: int) -> float:
    """Bytes of rank 0 in a forward and backward pass of its part of a plan, without the optimizer's
    moments."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        with torch.device("meta"):
            model = MultimodalModel(recipe.model)
        model = shard(model, recipe.fsdp, torch.device("cpu"), ranks_per_node=8)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model.to_empty(device="cpu")
            batch = _batch(recipe, plan)
            tracker = FSDPMemTracker(model)
            tracker.track_inputs((vars(batch),))
            with tracker:
                for _ in range(recipe.train.accumulation_steps):
                    tracker.reset_mod_stats()
                    (model(batch) / batch.num_global_targets).backward()
        return float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])
    finally:
        dist.destroy_process_group()


def tracked_text(folder: Path, choice: Mapping[str, str], num_tokens: int, **fsdp: Any
                 ) -> tuple[float, float]:
    """(tracked, predicted) peak of one example of text in a model of transformers, in bfloat16 and
    one process, without the optimizer's moments. fsdp: more of the recipe's section."""
    sizes = np.full(1, num_tokens)
    lengths = {**dict.fromkeys(ENCODERS, Lengths(*np.zeros((3, 1)))), "llm": Lengths(*[sizes] * 3)}
    recipe = Recipe(model=ModelConfig(config=str(folder)),
                    fsdp=FsdpConfig(param_dtype="bfloat16", **fsdp))
    memory = WholeMemory.of(resolve(recipe, 1, 1), on_cpu=True)
    moments = memory.peaks(Loads(lengths, dict.fromkeys(ENCODERS, np.zeros(1))), choice)
    moments.pop("optimizer")
    config = read_config(folder)
    with torch.device("meta"):
        model = WholeModel(model_class(config)._from_config(config).bfloat16(), torch.bfloat16)
    model.loss_chunk_rows = recipe.fsdp.loss_chunk_rows
    recompute(model, choice)
    ids = torch.zeros(1, num_tokens, dtype=torch.long)
    inputs = {"input_ids": ids, "position_ids": torch.arange(num_tokens).repeat(4, 1, 1)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            model(PackedExamples(inputs, torch.arange(num_tokens), ids[0],
                                 SequenceLengths.from_lengths([num_tokens]), {})).backward()
    return (float(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]),
            max(float(m[0]) for m in moments.values()) - memory.state_bytes()["optimizer"])


def _batch(recipe: Recipe, plan: RankPlan) -> Batch:
    rows = {m: plan.encode[m].lengths for m in ENCODERS}
    sizes = {m: getattr(recipe.model, m).geometry.row_size for m in ENCODERS}
    kinds = {"vision": torch.uint8, "audio": torch.float32}
    tokens = torch.zeros(int(plan.llm.lengths.sum()), dtype=torch.long)
    return Batch(
        plan=plan, inputs={m: torch.zeros((int(rows[m].sum()), sizes[m]), dtype=kinds[m])
                           for m in ENCODERS},
        input_lengths={m: SequenceLengths.from_lengths(rows[m]) for m in ENCODERS},
        token_ids=tokens, labels=tokens.clone(),
        text_lengths=SequenceLengths.from_lengths(plan.llm.lengths),
        position_ids=torch.from_numpy(plan.position_ids),
        scatter={m: torch.from_numpy(plan.scatter[m]) for m in ENCODERS}, num_global_targets=1000)
