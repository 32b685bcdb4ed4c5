"""What a model of transformers computes: the FLOP of its parts as they were counted
(orchmllm.models.counting), of items of any lengths, and the costs that the planner gets from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.job import Job
from orchmllm.config.model import ModelConfig
from orchmllm.counts.kept import kept
from orchmllm.models.flops import Lengths, Work, phase_lengths
from orchmllm.models.shapes import description
from orchmllm.plan.assign import EVERY_PHASE, PHASES, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, OF_MEDIA, BatchLayout

ARRAYS = ("item", "row", "position", "moved")  # of PartCounts


class Attention(NamedTuple):
    """Which positions of an item attend to each other. kind: `all`; those of a `frame` of a grid;
    those of a `square` of `size` x `size` positions of it, or of a `run` of `size`; `causal`, each
    with those before it, `size` with its own at most (0: all); those of a `tile` of `size`, all of
    which are alike, so that a position has as many in each item; `crossed`, each to all rows."""

    kind: str
    size: int = 0


class BlockCounts(NamedTuple):
    """Bytes of a block of transformers for a position. none, selective, full: what it keeps by each
    choice of checkpointing; largest: the largest tensor of these; moved: what operators but
    products read and write until all of it is there. repeated: share of the products' FLOP until
    then."""

    none: float
    selective: float
    full: float
    largest: float
    moved: float
    repeated: float


@dataclass(frozen=True)
class PartCounts:
    """What a part computes and keeps.

    FLOP, (3,) float64 each: of the forward pass, of the backward pass, and what activation
    checkpointing repeats. item, row, position: of products, of an item beside those of its rows
    (frames of sound, the LLM's targets, or states that an image is made from) and of its
    positions. attention: of a pair of positions.
    Bytes: moved, (2, 3), see moved_by; blocks, in their order; kept_row, kept_position: what is
    kept around them; kept_behind: of a position, what of it comes after them; row_bytes: of a patch
    or a frame that moves. Numbers: width, in a position of the blocks; outputs, in a token for the
    LLM or in a row of its logits; row_values, in a patch or frame for the encoder; attended, in the
    keys and values of a position in a layer of the LLM."""

    item: np.ndarray
    row: np.ndarray
    position: np.ndarray
    attention: Mapping[Attention, np.ndarray]
    moved: np.ndarray
    blocks: Sequence[BlockCounts]
    kept_row: float
    kept_position: float
    kept_behind: float
    width: int
    outputs: int
    row_bytes: int = 0
    row_values: int = 0
    attended: int = 0

    def as_json(self) -> dict:
        arrays = {name: getattr(self, name).tolist() for name in ARRAYS}
        attention = [[*kind, flop.tolist()] for kind, flop in self.attention.items()]
        return {**vars(self), **arrays, "attention": attention}

    @classmethod
    def from_json(cls, found: dict) -> PartCounts:
        arrays = {name: np.array(found[name]) for name in ARRAYS}
        attention = {Attention(kind, size): np.array(flop)
                     for kind, size, flop in found["attention"]}
        return cls(**{**found, **arrays, "attention": attention,
                      "blocks": [BlockCounts(*block) for block in found["blocks"]]})


def part_counts(model: ModelConfig, dtype: str = "bfloat16") -> dict[str, PartCounts]:
    """Phase -> what was counted, of those that the model has. dtype: of forward and backward, by
    which bytes differ. Raises ValueError where they cannot be counted."""
    learns = {part: model.learns(part) for part in (*EVERY_PHASE, "connector")}
    return _known(model.folder, tuple(part for part in learns if learns[part]),
                  bool(model.lora.rank), dtype)


@lru_cache(maxsize=64)
def _known(folder: str, learns: tuple[str, ...], adapters: bool, dtype: str
           ) -> dict[str, PartCounts]:
    def counted() -> dict:
        from orchmllm.models.counting import count  # with torch

        found = count(folder, learns, adapters, dtype)
        return {part: counts.as_json() for part, counts in found.items()}

    key = [description(folder), learns, adapters, dtype]
    return {part: PartCounts.from_json(found) for part, found in kept(key, counted).items()}


def pairs(attention: Attention, lengths: Lengths) -> np.ndarray:
    """(n,) pairs of positions that attend to each other."""
    if lengths.before is not None:  # as of what ends with the piece, less what was before
        ends, before = (replace(lengths, positions=n, before=None) for n in (
            lengths.before + lengths.positions, lengths.before))
        return pairs(attention, ends) - pairs(attention, before)
    n, size = lengths.positions.astype(float), attention.size
    match attention.kind:
        case "crossed":
            return n * lengths.rows
        case "tile":
            return n * np.minimum(n, size)
        case "causal":
            seen = np.minimum(n, size or np.inf)
            return seen * (2 * n - seen + 1) / 2
        case "run":
            return _pieces(n, size)
        case "frame" | "square" if lengths.grid is not None:
            t, h, w = lengths.grid.T.astype(float)
            return t * (_pieces(h, size or np.inf) * _pieces(w, size or np.inf))
        case "square":
            return _pieces(n, size * size)
    return n * n


def _pieces(n: np.ndarray, size: float) -> np.ndarray:
    """Pairs inside of pieces of so many positions, of which the last one may be shorter."""
    whole = n // size
    return whole * np.minimum(size, n)**2 + (n - whole * np.minimum(size, n))**2


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
