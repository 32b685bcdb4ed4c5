"""Which rank encodes which item: a pure function of what was gathered, equal on all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from orchmllm.encoders.spec import Encoder
from orchmllm.encoders.table import GatheredItems
from orchmllm.plan.balance import balance
from orchmllm.plan.cost import CostModel
from orchmllm.plan.rearrange import Rearrangement
from orchmllm.plan.step import imbalance

MOVED_BOTH_WAYS = 2  # the media there, the features back


@dataclass(frozen=True)
class EncoderStep:
    """One encoder in the forward last balanced. num_items: in the world; imbalance: cost of the
    slowest rank / mean, as sampled and as planned; moved: items that changed rank; gain: share by
    which the slowest rank's encoder time falls, by the plan."""

    num_items: int
    imbalance: tuple[float, float]
    moved: int
    gain: float


@dataclass(frozen=True)
class Assignment:
    """move: n items from the ranks that hold them to those that encode them; cost (n,) of each."""

    move: Rearrangement
    cost: np.ndarray
    step: EncoderStep


def assign(
    encoder: Encoder, world: GatheredItems, cost_model: CostModel, *, min_gain: float,
    ranks_per_node: int,
) -> Assignment:
    """The assignment of one encoder's items. min_gain: all stay where they are unless the cost of
    the slowest rank falls, and by this share."""
    num_ranks = len(world.sizes)
    home = np.repeat(np.arange(num_ranks), world.sizes)
    cost = cost_model(*encoder.layout.lengths(world.meta))
    num_bytes = np.zeros(len(home), np.int64)
    for tensor, rows in zip(world.tensors, encoder.layout.rows(world.meta), strict=True):
        if tensor is not None:
            dtype, shape = tensor
            num_bytes += dtype.itemsize * math.prod(shape) * rows
    rank_of = balance(cost, num_ranks=num_ranks, policy="least_move", home=home, cost=cost,
                      move_cost=num_bytes * MOVED_BOTH_WAYS,
                      ranks_per_node=min(ranks_per_node, num_ranks))
    before, after = (np.bincount(rank, weights=cost, minlength=num_ranks).astype(np.int64)
                     for rank in (home, rank_of))
    gain = 1 - int(after.max()) / max(int(before.max()), 1)
    if gain <= 0 or gain < min_gain:
        rank_of, after, gain = home, before, 0.0
    step = EncoderStep(len(cost), (imbalance(before), imbalance(after)),
                       int((rank_of != home).sum()), gain)
    return Assignment(Rearrangement.from_rank_of(rank_of, world.sizes), cost, step)
