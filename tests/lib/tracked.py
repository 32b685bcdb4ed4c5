"""Peak memory of the real model's forward and backward pass without memory: fake tensors, a fake
process group of any size, and torch's tracker of what FSDP2 holds."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchmllm.batch import Batch, SequenceLengths
from orchmllm.config.job import resolve
from orchmllm.config.recipe import Recipe
from orchmllm.models.flops import padded_phases, plan_spec
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import RankPlan, StepPlan, plan_step
from orchmllm.sharding.fsdp import shard
from orchmllm.sharding.memory import MemoryModel, loads_of
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
