"""Examples that several ranks share: which run of its positions each of them processes.

Balancing moves whole examples, so that no plan is faster than the heaviest of them. An example that
is *shared* is cut into pieces, runs of its positions, and ranks of one node process some of them
each. Everything but attention treats a position by itself; attention of a piece reads keys and
values of the whole example, which the ranks that share it send each other in every layer
(orchmllm.models.shared).

Objective: the cost of the slowest rank. Nothing is shared where the heaviest example costs at most
WAITS times the mean rank and fits every rank; else each example above LARGE times the mean rank, or
above what a rank holds, is shared by the fewest of 2, 4, 8, ... ranks whose shares are below that,
as far as balance.llm.max_shares and the node allow.

Invariants:
- The pieces of an example are disjoint runs of positions that cover it; of one that is not shared
  there is one piece.
- Pieces of an example are on ranks of one node. A piece costs what its last position makes of an
  example that ends there, less what the position before its first one does: pieces add up to the
  example, in whole numbers.
- Of an example that g ranks share, rank i has the runs i and 2g - 1 - i of 2g equal ones, since
  later positions attend to more. A medium that cannot be cut stays in one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from orchmllm.plan.assign import (
    PlanSpec,
    example_bytes,
    feature_home,
    group_layouts,
    most_shares,
)
from orchmllm.plan.balance import balance, core
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, TEXT, BatchLayout
from orchmllm.plan.rearrange import Exchange, Rearrangement, ranges, sums_of

WAITS = 1.05  # times the mean rank: what one example may cost
LARGE = 0.5  # of the mean rank, or of what a rank holds

# Position in the batch of each example that is shared -> (first positions of its pieces, ascending;
# their ranks).
Shared = Mapping[int, tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Pieces:
    """The k pieces of a batch of n examples and s segments, in the order of their examples.

    layout: of the pieces, each as an example of its own; a segment that was cut is a segment in
    each of them. example (k,): position in the batch; start (k,): first position in the example.
    cuts (s,): segments that each segment of the batch became."""

    layout: BatchLayout
    example: np.ndarray
    start: np.ndarray
    cuts: np.ndarray

    @cached_property
    def end(self) -> np.ndarray:
        """(k,) the position after the last one, in the example."""
        return self.start + self.layout.tokens_per_example

    @cached_property
    def is_shared(self) -> np.ndarray:
        """(k,) whether a piece is not a whole example."""
        return np.bincount(self.example)[self.example] > 1

    @cached_property
    def segment(self) -> np.ndarray:
        """Of each segment of `layout` the segment of the batch that it is of."""
        return np.repeat(np.arange(len(self.cuts)), self.cuts)

    def costs(self, model: CostModel) -> np.ndarray:
        """(k,) cost of each piece."""
        return model(self.end) - np.where(self.start > 0, model(self.start), 0)

    @classmethod
    def of(cls, layout: BatchLayout, shared: Shared) -> Pieces:
        """The pieces of a batch in which some examples are shared."""
        counts = np.ones(layout.num_examples, np.int64)
        for example, (starts, _) in shared.items():
            counts[example] = len(starts)
        example, last = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts)
        start = np.zeros(len(example), np.int64)
        for one, (starts, _) in shared.items():
            start[last[one] - counts[one]: last[one]] = starts
        # Positions in the whole batch, one example after the other.
        tokens = layout.tokens_per_example
        first = (np.cumsum(tokens) - tokens)[example] + start
        begins = np.cumsum(layout.num_tokens) - layout.num_tokens
        at = first[start > 0]
        low = np.searchsorted(at, begins, "right")
        cuts = 1 + np.maximum(np.searchsorted(at, begins + layout.num_tokens) - low, 0)
        place, ends = np.repeat(begins, cuts), np.repeat(begins + layout.num_tokens, cuts)
        later = ranges(np.zeros_like(cuts), cuts)  # of a segment's parts, which one it is
        inside = at[np.repeat(low, cuts)[later > 0] + later[later > 0] - 1]
        place[later > 0] = inside
        ends[np.flatnonzero(later) - 1] = inside
        # An empty segment where an example ends belongs to its last piece.
        piece = np.minimum(np.searchsorted(first, place, "right"),
                           np.repeat(last[layout.example_of_segment], cuts)) - 1
        rows = np.bincount(piece, ends - place, len(example)).astype(np.int64)
        return cls(BatchLayout(
            layout.example_id[example], sums_of(counts, layout.examples_per_rank),
            np.minimum(layout.num_targets[example], rows),
            np.bincount(piece, minlength=len(example)), *(
                np.repeat(values, cuts) for values in (
                    layout.modality, layout.rows, layout.attn_len)),
            ends - place, np.repeat(layout.grid, cuts, axis=0)), example, start, cuts)


def share(layout: BatchLayout, encode: Mapping[str, np.ndarray], llm: np.ndarray, spec: PlanSpec
          ) -> tuple[Shared, np.ndarray]:
    """(What is shared, rank of each other example (n,)): nothing, and `llm`, where nothing should
    be shared or that does not help. encode, llm: see assign_phases. Raises CapError where a rank
    would hold more of the LLM's positions than max_rank_tokens."""
    if 0 < spec.group_size < layout.num_ranks:
        return _share_in_groups(layout, encode, llm, spec)
    lengths, d, chosen = layout.tokens_per_example, layout.num_ranks, spec.balance.llm
    cost, count = spec.costs["llm"](lengths), _num_ranks(layout, spec)
    rest, large = np.flatnonzero(count == 1), np.flatnonzero(count > 1)
    if not len(large):
        return {}, llm
    home = (layout.rank_of_example if spec.balance.dispatch == "load"
            else feature_home(layout, encode, spec.feature_bytes))
    shared = _placed(layout, large[np.argsort(-cost[large], kind="stable")], count, home, spec)
    pieces, out = Pieces.of(layout, shared), llm.copy()
    rank, held = ranks_of(pieces, shared, llm), np.isin(pieces.example, large)
    load, positions = np.zeros((2, d), np.int64)
    np.add.at(load, rank[held], pieces.costs(spec.costs["llm"])[held])
    np.add.at(positions, rank[held], pieces.layout.tokens_per_example[held])
    cap = chosen.max_rank_tokens or None
    out[rest] = balance(
        lengths[rest], num_ranks=d, policy=chosen.policy, home=home[rest], cost=cost[rest],
        ranks_per_node=spec.ranks_per_node, tolerance=chosen.tolerance, held=load,
        move_cost=example_bytes(layout, spec.feature_bytes)[rest], max_rank_tokens=cap,
        held_lengths=positions if cap else None)
    np.add.at(load, out[rest], cost[rest])
    helps = load.max() < np.bincount(llm, cost, d).max() or lengths.max() > _most_held(spec)
    return (shared, out) if helps else ({}, llm)


def _placed(layout: BatchLayout, large: np.ndarray, count: np.ndarray, home: np.ndarray,
            spec: PlanSpec) -> Shared:
    """The pieces and ranks of the examples `large`, in this order. count, home (n,): ranks that
    share each example, and the one that holds most of it."""
    cost = spec.costs["llm"](layout.tokens_per_example)
    ranks = core().place_shares(
        -(-cost[large] // count[large]), count[large], home[large], layout.num_ranks,
        spec.ranks_per_node, int(cost.sum()) // layout.num_ranks)
    can_cut = np.isin(layout.modality, [TEXT, *(ENCODERS[phase] for phase in spec.cut_media)])
    shared = {}
    for example, of in zip(large.tolist(), np.split(ranks, np.cumsum(count[large])[:-1]),
                           strict=True):
        starts, place = _runs(layout, example, len(of), can_cut)
        shared[example] = starts, of[place]
    return shared


def _share_in_groups(
    layout: BatchLayout, encode: Mapping[str, np.ndarray], llm: np.ndarray, spec: PlanSpec
) -> tuple[Shared, np.ndarray]:
    """`share` of each group of ranks that balance among themselves."""
    shared: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    out, start = llm.copy(), 0
    for first, part, inside in group_layouts(layout, spec):
        end = start + part.num_examples
        of_group = {}
        for phase, ranks in encode.items():
            owner = layout.item_owner(phase)
            of_group[phase] = ranks[(owner >= start) & (owner < end)] - first
        found, ranks = share(part, of_group, llm[start:end] - first, inside)
        shared |= {start + e: (starts, first + rank) for e, (starts, rank) in found.items()}
        out[start:end], start = first + ranks, end
    return shared, out


def ranks_of(pieces: Pieces, shared: Shared, llm: np.ndarray) -> np.ndarray:
    """(k,) rank of each piece. shared, llm: what `share` returns."""
    rank = llm[pieces.example]
    first = np.searchsorted(pieces.example, list(shared))
    for at, (_, of) in zip(first.tolist(), shared.values(), strict=True):
        rank[at: at + len(of)] = of
    return rank


def _most_held(spec: PlanSpec) -> float:
    """Positions of the LLM that a rank may have, if it has nothing else."""
    return min(spec.hard_caps.get("llm", np.inf), *(
        limit.most // limit.each["llm"] for limit in spec.room if limit.each.get("llm")), np.inf)


def _num_ranks(layout: BatchLayout, spec: PlanSpec) -> np.ndarray:
    """(n,) ranks that should share each example."""
    lengths, d = layout.tokens_per_example, layout.num_ranks
    cost, held = spec.costs["llm"](lengths), max(_most_held(spec), 1)
    size = np.where(lengths > held, lengths / (LARGE * held), 1.0)
    if cost.max(initial=0) * float(d) > WAITS * cost.sum():  # the product may pass 2**63
        size = np.maximum(size, cost * float(d) / (LARGE * cost.sum()))
    return np.minimum(2 ** np.ceil(np.log2(size)).astype(np.int64),
                      most_shares(spec.balance, spec.ranks_per_node, d))


def _runs(layout: BatchLayout, example: int, num_ranks: int, can_cut: np.ndarray
          ) -> tuple[np.ndarray, np.ndarray]:
    """(First positions of the pieces of an example that so many ranks share, ascending; which of
    these ranks has each). can_cut: (s,) of each segment of the batch."""
    segments = slice(layout.segment_start[example], layout.segment_start[example + 1])
    tokens, n = layout.num_tokens[segments], int(layout.tokens_per_example[example])
    border, ends = n * np.arange(1, 2 * num_ranks) // (2 * num_ranks), np.cumsum(tokens)
    at = np.searchsorted(ends, border, "right")
    low, high = (ends - tokens)[at], ends[at]
    nearest = np.where(border - low <= high - border, low, high)
    border = np.where(can_cut[segments][at], border, nearest)
    border = np.concatenate([[0], border, [n]])
    run = np.flatnonzero(np.diff(border))
    place = np.minimum(run, 2 * num_ranks - 1 - run)
    begins = np.append(True, np.diff(place) != 0)  # the two runs in the middle are one piece
    return border[run[begins]], place[begins]


@dataclass(frozen=True)
class SharedRows:
    """What a rank's attention needs of the examples that it shares in a microbatch.

    exchange: of the rows of its packed row with the ranks of its node; it receives those of each
    example that it shares, whole, one example after the other. places: for each piece in its row,
    None for a whole example, or (first of the rows that were received for its example, first
    position of the piece in the example, positions of the example). texts: examples that were
    received, as positions in the batch."""

    exchange: Exchange
    places: tuple[tuple[int, int, int] | None, ...]
    texts: np.ndarray


def shared_rows(pieces: Pieces, llm: Rearrangement, rank: int, node: range) -> SharedRows | None:
    """None where no rank of the rank's node shares an example. llm: how the pieces move."""
    here = [llm.items_on(r) for r in node]
    held = np.concatenate(here)
    if not pieces.is_shared[held].any():
        return None
    wanted = []
    slot = np.argsort(held, kind="stable")  # pieces of an example follow each other
    for mine in here:
        examples = np.unique(pieces.example[mine[pieces.is_shared[mine]]])
        wanted.append(slot[np.isin(pieces.example[held[slot]], examples)])
    lengths = pieces.layout.tokens_per_example[held]
    move = Rearrangement(np.concatenate(wanted), np.array([len(x) for x in here]),
                         np.array([len(x) for x in wanted]))
    mine = here[rank - node.start]
    texts = np.unique(pieces.example[mine[pieces.is_shared[mine]]])
    size = {e: int(pieces.end[pieces.example == e].max()) for e in texts.tolist()}
    begin = dict(zip(size, np.cumsum([0, *size.values()]).tolist(), strict=False))
    places = tuple((begin[e], s, size[e]) if e in size else None for e, s in zip(
        pieces.example[mine].tolist(), pieces.start[mine].tolist(), strict=True))
    return SharedRows(move.exchange(lengths, rank - node.start), places, texts)

