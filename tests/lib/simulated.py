"""One of several simulated ranks: the tiny model on its device, and microbatches of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist

from orchmllm.batch import Microbatch
from orchmllm.comm.pieces import Media, Piece
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.data.made import described as made
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.layout import GENERATOR
from orchmllm.plan.step import StepPlan
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.fsdp import compute_dtype, shard_all
from orchmllm.sharding.load_whole import ordered
from tests.lib.drawn import build
from tests.lib.synthetic import SyntheticDataset


def on_meta(model: ModelConfig, fsdp: FsdpConfig, group: dist.ProcessGroup | None) -> WholeModel:
    """A model without memory, whose encoders are planned. group: of their exchanges."""
    with torch.device("meta"):
        whole = build(model, getattr(torch, fsdp.param_dtype))
    whole.dtype, whole.loss_chunk_rows = compute_dtype(fsdp), fsdp.loss_chunk_rows
    whole.encoders = PlannedEncoders(whole.hf, group)
    recompute(whole, {p: fsdp.checkpointing(p) for p in EVERY_PHASE})
    return whole


def shard_on(device: torch.device, whole: WholeModel, fsdp: FsdpConfig) -> None:
    """In place; on nodes of two ranks."""
    shard_all(whole, ordered(whole, fsdp), fsdp, device, 2)
    whole.to_empty(device=device)


def microbatch(whole: WholeModel, data: SyntheticDataset, plan: StepPlan, rank: int, dispatch: str
               ) -> Microbatch:
    """What a rank has of a plan before it is dispatched, on the CPU."""
    layout, mine = plan.layout, plan.for_rank(rank)
    micro = Microbatch(plan, mine, positions=np.arange(layout.num_examples))

    def load(example: int, **how):
        return data.load(int(layout.example_id[example]), **how)

    def piece(phase: str, tensors: dict[str, torch.Tensor]) -> Piece:
        return made(tensors) if phase == GENERATOR else whole.encoders.described(phase, tensors)

    def described(phase: str, places: np.ndarray) -> list[Piece]:
        return [piece(phase, load(e, text=False, segments=[s]).parts[s])
                for e, s in places.tolist()]

    media = {}
    for phase, code in plan.spec.of_media.items():
        if phase not in whole.blocks():
            continue
        move = plan.encode[phase]
        blank = piece(phase, data.reader.blank(code))
        pieces = described(phase, mine.media[phase])
        if dispatch == "tensors":
            sent = layout.places(layout.segments[code][move.items_of(rank)])
            media[phase] = Media.elsewhere(pieces, described(phase, sent), move, rank,
                                           lambda blank=blank: blank)
        else:
            media[phase] = Media.here(pieces or [blank])
    examples = [replace(load(e, segments=[]), parts={}) for e in mine.examples.tolist()]
    micro.content = whole.join(examples, media, micro)
    return micro
