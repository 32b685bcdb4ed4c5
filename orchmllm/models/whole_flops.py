"""What a model of transformers computes: the FLOP of its parts as they were counted
(orchmllm.models.counting), of items of any lengths, and the costs that the planner gets from them.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.job import Job
from orchmllm.config.model import ModelConfig
from orchmllm.counts.kept import kept
from orchmllm.models.counted_parts import PartCounts, pairs
from orchmllm.models.flops import Lengths, Work, phase_lengths
from orchmllm.models.shapes import description
from orchmllm.plan.assign import EVERY_PHASE, PHASES, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, OF_MEDIA, BatchLayout


@lru_cache(maxsize=64)
def part_counts(model: ModelConfig, dtype: str = "bfloat16") -> dict[str, PartCounts]:
    """Phase -> what was counted, of those that the model has. dtype: of forward and backward, by
    which bytes differ. Raises ValueError where they cannot be counted."""
    learns = tuple(part for part in (*EVERY_PHASE, "connector") if model.learns(part))
    adapters = bool(model.lora.rank)

    def counted() -> dict:
        from orchmllm.models.counting import count  # with torch
        return count(model.folder, learns, adapters, dtype)

    key = [description(model.folder), learns, adapters, dtype]
    return {part: PartCounts.from_json(found) for part, found in kept(key, counted).items()}


def phase_work(phase: str, model: ModelConfig, lengths: Lengths,
               checkpointing: str = "none") -> Work:
    """Work of each item. checkpointing: none, selective (no product is repeated) or full."""
    if (flops := part_counts(model).get(phase)) is None:
        return Work(*np.zeros((3, 2, len(lengths.positions))))
    products = np.add.outer(flops.item, np.zeros(len(lengths.positions))) + np.outer(
        flops.row, lengths.rows) + np.outer(flops.position, lengths.positions)
    attention = sum((np.outer(flop, pairs(kind, lengths))
                     for kind, flop in flops.attention.items()), np.zeros_like(products))
    forward, backward, again = np.stack([products, attention], axis=1)
    return Work(forward, backward, again * (checkpointing == "full"))


def moved_by(model: ModelConfig, dtype: str) -> dict[str, np.ndarray]:
    """Phase that the model has -> (2, 3) bytes that it moves forward and backward outside of
    products and attention: once, of a row (patches, frames, targets) and of a position. Without
    the head and its loss, and with nothing recomputed. dtype: of forward and backward. Raises
    ValueError where they cannot be counted."""
    return {part: counts.moved for part, counts in part_counts(model, dtype).items()}


def pair_flop(phase: str, model: ModelConfig) -> float:
    """FLOP of the forward pass for a position that attends to one, in all layers."""
    one = np.ones(1, np.int64)
    return float(phase_work(phase, model, Lengths(one, one, one)).forward[1, 0])


def step_flops(model: ModelConfig, layout: BatchLayout) -> dict[str, float]:
    """phase -> useful FLOP of a global batch."""
    return {phase: float(phase_work(phase, model, phase_lengths(layout, phase)).useful.sum())
            for phase in EVERY_PHASE if phase in PHASES or phase in part_counts(model)}


def plan_spec(job: Job) -> PlanSpec:
    """What the planner has to know. Images move as bytes, which a run finds out to be so or not
    (orchmllm.data.loading.whole_examples), frames of clips in float32. A medium costs by its
    positions and an example by its tokens what they compute, without the logits of what is learnt:
    exactly, but for an LLM with sliding windows, whose cost is exact for examples of one and of
    four windows, for the edges of windows of images, and for an image that is made, whose cost does
    not count the states that it is made from."""
    recipe, parts = job.recipe, part_counts(job.recipe.model)
    costs = {phase: _cost(phase, parts[phase]) if phase in parts else CostModel(1, 0)
             for phase in EVERY_PHASE  # what the model has not has no items
             if phase in parts or phase in PHASES}
    return PlanSpec(
        costs=costs,
        row_bytes={part: parts[part].row_bytes if part in parts else 0 for part in OF_MEDIA},
        feature_bytes=feature_width(recipe.model) * DTYPE_BYTES[recipe.fsdp.forward_dtype],
        ranks_per_node=job.ranks_per_node, fills=True, balance=recipe.balance,
        group_size=job.shard_size if recipe.balance.group == "shard" else 0)


def _cost(phase: str, flops: PartCounts) -> CostModel:
    """Forward and backward, of an item by its positions."""
    window = max((a.size**2 if a.kind == "square" else a.size or 1 for a in flops.attention),
                 default=1)
    n = window * np.array([1, 4])
    near, far = sum((flop[:2].sum() * pairs(kind, Lengths(n, n, n)) / n
                     for kind, flop in flops.attention.items() if kind.kind != "crossed"),
                    np.zeros(2))
    square = (far - near) / (3 * window)
    rows = {"vision": 1, "audio": 2}.get(phase, 0)  # of a position
    products = (flops.position + rows * flops.row)[:2].sum()
    return CostModel(round(products + near - square * window), round(square),
                     max(0, round(flops.item[:2].sum())))


def feature_width(model: ModelConfig) -> int:
    """Numbers that the LLM gets for a token of a medium, those of several layers, too."""
    return max((counts.outputs for part, counts in part_counts(model).items() if part in ENCODERS),
               default=part_counts(model)["llm"].width)


@lru_cache(maxsize=64)
def moved_by_head(model: ModelConfig, dtype: str, chunk_rows: int) -> np.ndarray:
    """(2, 2) bytes of the head's loss, forward and backward: once, and of a row of logits.
    chunk_rows: of the loss."""
    llm = part_counts(model, dtype)["llm"]
    shape = [llm.width, llm.outputs, chunk_rows, dtype, model.llm_weights_learn]

    def count() -> list:
        from orchmllm.models.counting_head import count_head  # with torch

        return count_head(*shape)

    return np.array(kept(["head", *shape], count))
