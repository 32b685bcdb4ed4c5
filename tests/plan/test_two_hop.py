"""Two hops bring every row where one does, and its gradient back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from orchmllm.comm.exchange import RoutedExchange, exchange_rows, hop_groups
from orchmllm.plan.rearrange import Rearrangement
from orchmllm.plan.two_hop import two_hops
from tests.lib.ranks import run_ranks


def random_move(seed: int, num_ranks: int) -> tuple[Rearrangement, np.ndarray]:
    rng = np.random.default_rng(seed)
    sizes = rng.integers(0, 5, num_ranks)
    move = Rearrangement.from_rank_of(rng.integers(0, num_ranks, sizes.sum()), sizes)
    return move, rng.integers(0, 4, sizes.sum())


def both_ways(world, ranks_per_node: int, seeds: range) -> float:
    """Largest difference of rows and gradients between one hop and two."""
    cross, node = hop_groups(range(world.world_size), ranks_per_node, 30.0)
    worst = 0.0
    for seed in seeds:
        move, rows = random_move(seed, world.world_size)
        flat = move.exchange(rows, world.rank)
        routed = RoutedExchange(**vars(flat), cross=cross, node=node,
                                hops=two_hops(move, rows, world.rank, ranks_per_node))
        g = torch.Generator().manual_seed(100 * seed + world.rank)
        x = torch.randn(len(flat.send_index), 2, generator=g)
        weight = torch.randn(len(flat.recv_index), 2, generator=g)
        results = []
        for exchange in (flat, routed):
            mine = x.clone().requires_grad_()
            out = exchange_rows(mine, exchange)
            (out * weight).sum().backward()
            results.append((out.detach(), mine.grad))
        for a, b in zip(*results, strict=True):
            worst = max(worst, float((a - b).abs().max()) if a.numel() else 0.0)
    return worst


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks, ranks_per_node", [(4, 2), (6, 2), (6, 3), (3, 3), (2, 1)])
def test_two_hops_equal_one(num_ranks, ranks_per_node):
    assert run_ranks(both_ways, num_ranks, ranks_per_node, range(12)) == [0.0] * num_ranks


def test_nodes_of_different_sizes_are_refused():
    move, rows = random_move(0, 5)
    with pytest.raises(ValueError, match="two_hop"):
        two_hops(move, rows, 0, 2)
