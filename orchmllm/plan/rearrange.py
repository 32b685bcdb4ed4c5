"""Permutations of a global batch's items over (rank, slot), and one rank's view of them.

Objective: one description of a move, from which all ranks take the same exchange. `Rearrangement`
is Pi of OrchMLLM section 5.1 in gather convention, y = x[order]; composition (section 6,
"Rearrangement composition") is `inverse` and `then`. `Exchange` is what one rank needs to carry it
out: which rows it sends where, and where the rows it receives belong.

Invariants: inside a target rank items are in ascending source order, whatever the policy. What one
rank sends another is what that one expects. Two moves are composed only where the second begins as
the first ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchmllm.plan.balance import core


def sums_of(values: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(d,) int64: sums over consecutive runs of values (n,), of sizes (d,) values each."""
    return core().sums_of(values, sizes)


def rank_at(slots: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(k,) rank of each of k slots, where ranks have sizes (d,) slots each."""
    return np.searchsorted(np.cumsum(sizes), slots, side="right")


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Concatenation of [starts[i], starts[i] + counts[i]) for all i, without a loop. starts,
    counts: (n,)."""
    first = np.cumsum(counts) - counts
    return np.repeat(starts - first, counts) + np.arange(int(counts.sum()))


@dataclass(frozen=True)
class Rearrangement:
    """order (n,): source item at each target slot; slots are grouped by rank, ascending.
    source_sizes (d,), target_sizes (d,): items per rank before and after.

    A permutation, but where a docstring says that items may go to several ranks, or to none: such
    a rearrangement has no inverse and cannot be composed."""

    order: np.ndarray
    source_sizes: np.ndarray
    target_sizes: np.ndarray

    @classmethod
    def from_rank_of(cls, rank_of: np.ndarray, source_sizes: np.ndarray) -> Rearrangement:
        """Item i goes to rank_of[i]; inside a target rank ascending source order, whatever the
        policy, so that the result depends on the assignment alone."""
        order, sizes = core().group_by_rank(np.asarray(rank_of, np.int64), len(source_sizes))
        return cls(order, np.asarray(source_sizes, np.int64), sizes)

    @cached_property
    def source_rank(self) -> np.ndarray:
        """(n,) rank of each source item."""
        return np.repeat(np.arange(len(self.source_sizes)), self.source_sizes)

    @cached_property
    def target_rank(self) -> np.ndarray:
        """(n,) rank of each target slot."""
        return np.repeat(np.arange(len(self.target_sizes)), self.target_sizes)

    @cached_property
    def moved(self) -> np.ndarray:
        """(k,) target slots of the items that change rank."""
        return np.flatnonzero(self.source_rank[self.order] != self.target_rank)

    def items_of(self, rank: int) -> slice:
        """Source items that a rank has before the move."""
        first = int(self.source_sizes[:rank].sum())
        return slice(first, first + int(self.source_sizes[rank]))

    def items_on(self, rank: int) -> np.ndarray:
        """Source items at the slots of a target rank."""
        first = self.target_sizes[:rank].sum()
        return self.order[first: first + self.target_sizes[rank]]

    @cached_property
    def inverse(self) -> Rearrangement:
        """The way back; its order (n,) is the target slot of each source item."""
        slot_of = np.empty_like(self.order)
        slot_of[self.order] = np.arange(len(self.order))
        return Rearrangement(slot_of, self.target_sizes, self.source_sizes)

    def then(self, after: Rearrangement) -> Rearrangement:
        """First self, then `after`: x[self.order][after.order]. Raises ValueError if `after` does
        not start where self ends."""
        if not np.array_equal(self.target_sizes, after.source_sizes):
            raise ValueError(
                f"cannot compose: the first ends with {self.target_sizes.tolist()} items per rank, "
                f"the second starts with {after.source_sizes.tolist()}"
            )
        return Rearrangement(self.order[after.order], self.source_sizes, after.target_sizes)

    def expand(self, counts: np.ndarray) -> Rearrangement:
        """The same move for items made of counts[i] >= 0 sub-items each (in source order)."""
        counts = np.asarray(counts, np.int64)
        order = core().expand_order(self.order, counts)
        return Rearrangement(order, sums_of(counts, self.source_sizes),
                             sums_of(counts[self.order], self.target_sizes))

    def volume(self, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(source rank, target rank, weight) of every item that changes rank; weight (n,) in source
        order, e.g. bytes. Sparse: never a (d, d) matrix."""
        slots = self.moved[weight[self.order[self.moved]] > 0]
        items = self.order[slots]
        return self.source_rank[items], self.target_rank[slots], weight[items]

    def exchange(self, rows: np.ndarray, rank: int) -> Exchange:
        """`rank`'s view when source item i consists of rows[i] rows; items may go to several ranks,
        or to none."""
        own = self.items_of(rank)
        slots = np.flatnonzero((self.order >= own.start) & (self.order < own.stop))
        send, mine = self.order[slots] - own.start, rows[own]
        sent = mine[send]
        input_splits, output_splits = np.zeros((2, len(self.source_sizes)), np.int64)
        np.add.at(input_splits, rank_at(slots, self.target_sizes), sent)

        items = self.items_on(rank)
        recv_rows, source_rank = rows[items], rank_at(items, self.source_sizes)
        np.add.at(output_splits, source_rank, recv_rows)
        arrival = np.argsort(source_rank, kind="stable")  # (source rank, slot) order
        buffer_start = np.empty_like(arrival)
        arriving = recv_rows[arrival]
        buffer_start[arrival] = np.cumsum(arriving) - arriving
        return Exchange(
            send_index=ranges((np.cumsum(mine) - mine)[send], sent),
            input_splits=input_splits, output_splits=output_splits,
            recv_index=ranges(buffer_start, recv_rows), lengths=recv_rows,
            moves=bool(rows[self.order[self.moved]].any()),
        )


@dataclass(frozen=True)
class Exchange:
    """One rank's view of a rearrangement of rows, known on the CPU before any data moves.

    send_index (R_in,): local row at each position of the send buffer. input_splits (d,),
    output_splits (d,): rows to and from each rank. recv_index (R_out,): position in the receive
    buffer of each target row. lengths (n_out,): rows of each target item.
    moves: whether ANY rank sends a row to another; if not, all ranks skip the collective.
    """

    send_index: np.ndarray
    input_splits: np.ndarray
    output_splits: np.ndarray
    recv_index: np.ndarray
    lengths: np.ndarray
    moves: bool
