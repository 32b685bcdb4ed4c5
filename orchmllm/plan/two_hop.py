"""An all-to-all in two hops: between the ranks with the same place in their nodes, then inside the
node. A rank then talks to (nodes - 1) + (ranks per node - 1) others instead of all.

Pure index arithmetic on the plan's row counts; orchmllm.comm.exchange carries it out.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from orchmllm.plan.rearrange import Rearrangement, ranges, starts_of


@dataclass(frozen=True)
class TwoHops:
    """One rank's view; N nodes of L ranks, this is rank (node, place).

    cross_in, cross_out (N,): rows to and from the ranks of the same place. middle (R_mid,): order
    in which what arrived is sent on. node_in, node_out (L,): rows to and from the ranks of this
    node. last (R_out,): what arrives in the end, in order of its source rank.
    """

    cross_in: np.ndarray
    cross_out: np.ndarray
    middle: np.ndarray
    node_in: np.ndarray
    node_out: np.ndarray
    last: np.ndarray


def two_hops(move: Rearrangement, rows: np.ndarray, rank: int, ranks_per_node: int) -> TwoHops:
    """The hops of the flat exchange `move.exchange(rows, rank)`, whose send buffer is ordered by
    target rank and whose receive buffer by source rank. rows: of each source item. Raises
    ValueError if the nodes do not hold equally many ranks."""
    d = len(move.source_sizes)
    if d % ranks_per_node:
        raise ValueError(f"balance.exchange is two_hop: {ranks_per_node} ranks per node do not "
                         f"divide {d} ranks; use flat")
    num_nodes, (node, place) = d // ranks_per_node, divmod(rank, ranks_per_node)
    source, target = move.source_rank[move.order], move.target_rank
    count = rows[move.order]

    def between(chosen: np.ndarray, a: np.ndarray, size_a: int, b: np.ndarray,
                size_b: int) -> np.ndarray:
        """(size_a, size_b) rows of the chosen items by a and b."""
        table = np.zeros((size_a, size_b), np.int64)
        np.add.at(table, (a[chosen], b[chosen]), count[chosen])
        return table

    cross_in = between(source == rank, target // ranks_per_node, num_nodes,
                       np.zeros_like(target), 1)[:, 0]
    # What passes here: from (m, place) to (node, l), arriving by m, then l.
    passing = between((source % ranks_per_node == place) & (target // ranks_per_node == node),
                      source // ranks_per_node, num_nodes, target % ranks_per_node, ranks_per_node)
    # What ends here: from (m, l), arriving by l, then m.
    ending = between(target == rank, source % ranks_per_node, ranks_per_node,
                     source // ranks_per_node, num_nodes)
    return TwoHops(
        cross_in=cross_in, cross_out=passing.sum(1), middle=_transposed(passing),
        node_in=passing.sum(0), node_out=ending.sum(1), last=_transposed(ending))


def _transposed(table: np.ndarray) -> np.ndarray:
    """Rows lie in blocks by (a, b) of table[a, b] rows each: their order by (b, a)."""
    first = starts_of(table.ravel())[:-1].reshape(table.shape)
    return ranges(first.T.ravel(), table.T.ravel())
