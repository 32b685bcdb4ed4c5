"""Which rank encodes which item: a pure function of what was gathered, equal on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchmllm.encoders.spec import Encoder
from orchmllm.encoders.table import Gathered
from orchmllm.plan.balance import balance
from orchmllm.plan.cost import CostModel
from orchmllm.plan.rearrange import Rearrangement

MOVED_BOTH_WAYS = 2  # the media there, the features back


@dataclass(frozen=True)
class Assignment:
    """move: items from the ranks that sampled them to those that encode them. cost (n,) of each
    item; before, after (d,): cost of each rank. moves: False where nothing moves because the gain
    is too small."""

    move: Rearrangement
    cost: np.ndarray
    before: np.ndarray
    after: np.ndarray
    moves: bool


def assign(
    encoder: Encoder, world: Gathered, cost_model: CostModel, *, min_gain: float,
    ranks_per_node: int,
) -> Assignment:
    """The assignment of one encoder's items. min_gain: move only if the slowest rank's cost falls
    by this share."""
    d, sizes = len(world.sizes), world.sizes
    home = np.repeat(np.arange(d), sizes)
    lengths, frames = encoder.layout.lengths(world.meta)
    cost = cost_model(lengths, frames)
    row_bytes = sum(dtype.itemsize * int(np.prod(shape, dtype=np.int64)) * rows
                    for (dtype, shape), rows in zip(
                        (t or (np.dtype(bool), (0,)) for t in world.tensors),
                        encoder.layout.rows(world.meta), strict=True))
    rank_of = balance(cost, num_ranks=d, policy="least_move", home=home, cost=cost,
                      move_cost=np.asarray(row_bytes, np.int64) * MOVED_BOTH_WAYS,
                      ranks_per_node=min(ranks_per_node, d))
    before, after = (np.bincount(r, weights=cost, minlength=d).astype(np.int64)
                     for r in (home, rank_of))
    saved = int(before.max()) - int(after.max())
    moves = saved > 0 and saved >= min_gain * int(before.max())
    return Assignment(Rearrangement.from_rank_of(rank_of if moves else home, sizes), cost, before,
                      after, moves)
