"""Node-wise rearrangement: which rank processes which given batch (OrchMLLM section 5.2.2, Alg. 3).

Objective: the permutation of finished batches whose busiest rank sends least to other nodes. The
paper solves an integer program; the search (C++) finds as good a permutation in a thousandth of the
time (docs/notes/tried.md).

Invariants: the result is a permutation, so that the balance stays what it was; the same on all
ranks.
"""

from __future__ import annotations

import numpy as np

from orchmllm.plan.balance import as_int64, at_least_1, check_ranks, core


def assign_nodes(
    source_rank: np.ndarray, batch: np.ndarray, volume: np.ndarray, *, num_ranks: int,
    ranks_per_node: int, num_swaps: int = 40000,
) -> np.ndarray:
    """rank_of_batch (num_ranks,) int64, a permutation.

    source_rank, batch, volume: (m,) triplets: volume bytes of batch are on source_rank. Triplets of
    the same pair add up. num_swaps: that the search tries.
    Raises ValueError for malformed input."""
    num_ranks = at_least_1("num_ranks", num_ranks)
    ranks_per_node = at_least_1("ranks_per_node", ranks_per_node)
    volume = as_int64("volume", volume)
    source_rank = check_ranks("source_rank", source_rank, len(volume), num_ranks)
    batch = check_ranks("batch", batch, len(volume), num_ranks)
    return core().nodewise(source_rank, batch, volume, num_ranks, ranks_per_node, num_swaps)
