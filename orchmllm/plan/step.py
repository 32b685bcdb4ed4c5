"""Plan of one step or microbatch: from the lengths of a global batch to what every rank does.

Objective: each phase is balanced (OrchMLLM section 5.1), and the rearrangements are composed so
that encoded features travel once, from the encoder rank to the LLM rank (section 6).

Flow: BatchLayout + PlanSpec -> rank of every item per phase -> StepPlan -> for_rank(r) -> RankPlan.

Invariants:
- A plan is a pure function of its arguments and so the same on all ranks; `StepPlan.digest` lets
  them check it.
- feature[m] = encode[m].inverse.then(llm.expand(counts[m])), and its inverse for images that are
  made; without balancing they are identities of the same types.
- A plan that balances is within the caps of a rank, or CapError is raised. With `fills` no rank is
  without an example where there are enough of them that no ranks share.
orchmllm.plan.microbatches.assert_invariants checks plans of whole steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from types import MappingProxyType

import numpy as np

from orchmllm.plan.assign import (
    TEXT_BYTES,
    PlanSpec,
    assign_phases,
    at_least,
    digest_of_arrays,
)
from orchmllm.plan.balance import CapError
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, GENERATOR, MADE, OF_MEDIA, BatchLayout
from orchmllm.plan.rearrange import Exchange, Rearrangement, ranges, sums_of
from orchmllm.plan.shares import Pieces, Shared, SharedRows, ranks_of, share, shared_rows


def plan_step(layout: BatchLayout, spec: PlanSpec) -> StepPlan:
    """Balances every phase of one step or microbatch, or leaves it as sampled where that gains less
    than balance.min_gain and no rank holds more than it may. Raises ValueError for a policy or
    option that cannot be honoured."""
    plan = _balanced(layout, spec)
    if spec.balance.min_gain and plan.predicted_gain < spec.balance.min_gain:
        unmoved = replace(spec.as_sampled, fills=spec.fills, room=spec.room)
        sampled = build_plan(layout, *assign_phases(layout, unmoved), unmoved)
        if sampled.is_within_caps:
            return sampled
    return plan


def _balanced(layout: BatchLayout, spec: PlanSpec) -> StepPlan:
    """See plan_step. Examples are shared where that keeps below the caps of a rank."""
    if not spec.balance.enabled or spec.balance.llm.max_shares == 1:
        return build_plan(layout, *assign_phases(layout, spec), spec)
    error = None
    try:
        encode, llm = assign_phases(layout, spec)
    except CapError as e:  # an example may be too long for one rank
        error = e
        encode, llm = assign_phases(layout, spec.without_room.capped({"llm": 0}))
    try:
        shared, rest = share(layout, encode, llm, spec)
        plan = build_plan(layout, encode, rest, spec, shared)
        if plan.is_within_caps:
            return plan
    except CapError as e:
        error = error and e  # without one before, the plan without shares keeps below the caps
    if error is not None:
        raise error
    return build_plan(layout, encode, llm, spec)


def build_plan(
    layout: BatchLayout, encode: Mapping[str, np.ndarray], llm: np.ndarray, spec: PlanSpec,
    shared: Shared = MappingProxyType({}),
) -> StepPlan:
    """The plan for given ranks: encode[m] (s_m,) per segment, llm (n,) per example that is not
    `shared`; with spec.fills a rank without an example is given one of its group."""
    pieces = None
    whole, others = np.full(layout.num_examples, True), np.zeros(layout.num_ranks, np.int64)
    for example, (_, ranks) in shared.items():
        whole[example] = False
        np.add.at(others, ranks, 1)
    size = spec.group_size or layout.num_ranks
    for first in range(0, layout.num_ranks, size) if spec.fills else ():
        # The slowest rank takes no longer: what moves is alone there, and was not before.
        inside = whole & (llm // size == first // size)
        group = others[first: first + size]
        llm = llm.copy()
        llm[inside] = first + at_least(
            llm[inside] - first, layout.tokens_per_example[inside], len(group), 1, group)
    parts, rank = layout, llm
    if shared:
        pieces = Pieces.of(layout, shared)
        parts, rank = pieces.layout, ranks_of(pieces, shared, llm)
    llm_move = Rearrangement.from_rank_of(rank, parts.examples_per_rank)
    encode_moves, feature_moves = {}, {}
    for phase, modality in spec.of_media.items():
        sizes = sums_of(layout.items_per_example[modality], layout.examples_per_rank)
        encode_moves[phase] = encoded = Rearrangement.from_rank_of(encode[phase], sizes)
        if pieces is not None:
            encoded = encoded.expand(pieces.cuts[layout.segments[modality]])
        feature = encoded.inverse.then(llm_move.expand(parts.items_per_example[modality]))
        feature_moves[phase] = feature.inverse if phase == GENERATOR else feature
    return StepPlan(layout, spec, encode_moves, feature_moves, llm_move, pieces)


def imbalance(costs: np.ndarray) -> float:
    """How much longer the slowest rank takes than the mean rank: 1 if nobody waits, or has nothing.

    costs: (d,) of the ranks, or (k, d) of k microbatches, each of which waits for its slowest."""
    costs = np.atleast_2d(np.asarray(costs, float))
    mean = costs.mean(axis=1).sum()
    return float(costs.max(axis=1).sum() / mean) if mean else 1.0


def sampled_costs(
    layout: BatchLayout, spec: PlanSpec, phase: str, num_microbatches: int = 1
) -> np.ndarray:
    """(num_microbatches, d) predicted cost per rank of a step as it was sampled, in kFLOP: each
    rank's share is cut in order."""
    sizes = layout.examples_per_rank
    if num_microbatches > 1:  # a rank's share is cut in order: its microbatches are runs, too
        slot = layout.rank_of_example * num_microbatches + layout.in_order(num_microbatches)
        sizes = np.bincount(slot, minlength=layout.num_ranks * num_microbatches)
    if phase != "llm":
        sizes = sums_of(layout.items_per_example[OF_MEDIA[phase]], sizes)
    costs = run_costs(spec.costs[phase], layout.item_lengths(phase), sizes)
    return costs.reshape(layout.num_ranks, num_microbatches).T


def run_costs(model: CostModel, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(d,) cost of ranks that have consecutive runs of items of `lengths` (n,), sizes (d,) each."""
    if model.padded:
        return model.of_ranks(lengths, np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    return sums_of(model(lengths), sizes)


@dataclass(frozen=True)
class StepPlan:
    """The same on all ranks. encode[m] and feature[m] move the phase's segments (the first from the
    sampling rank to the rank that processes them, the second from there to the LLM rank, or of
    images that are made from the LLM rank to there), llm moves examples from the sampling rank.
    pieces: where ranks share examples, what llm moves, and feature[m] the segments that they are
    cut into, instead."""

    layout: BatchLayout
    spec: PlanSpec
    encode: Mapping[str, Rearrangement]
    feature: Mapping[str, Rearrangement]
    llm: Rearrangement
    pieces: Pieces | None = None

    @cached_property
    def digest(self) -> int:
        """64 bits over lengths, plan and configuration (compared by all ranks in COMMIT)."""
        moves = [self.llm, *self.encode.values()]
        pieces = [] if self.pieces is None else [self.pieces.example, self.pieces.start]
        return digest_of_arrays([
            *(getattr(self.layout, field.name) for field in fields(self.layout)),
            *(move.order for move in moves), *(move.target_sizes for move in moves), *pieces,
            np.array([self.spec.digest])])

    @property
    def parts(self) -> BatchLayout:
        """What the LLM processes, each piece as an example of its own."""
        return self.layout if self.pieces is None else self.pieces.layout

    @cached_property
    def texts(self) -> Rearrangement:
        """How examples get to the ranks that process some of them: one may go to several ranks."""
        if self.pieces is None:
            return self.llm
        n = self.layout.num_examples
        order = np.unique(self.llm.target_rank * n + self.pieces.example[self.llm.order])
        return Rearrangement(order % n, self.layout.examples_per_rank, np.bincount(
            order // n, minlength=self.layout.num_ranks))

    @cached_property
    def stats(self) -> dict[str, dict[str, int]]:
        """Per phase: bytes of inputs and features that change rank, and that change node."""
        out, node = {}, self.spec.ranks_per_node
        for phase in self.spec.phases:
            moved = internode = 0
            for move, weight in self.transfers(phase):
                source, target, volume = move.volume(weight)
                moved += int(volume.sum())
                internode += int(volume[source // node != target // node].sum())
            out[phase] = {"moved_bytes": moved, "internode_bytes": internode}
        return out

    def rearrangement(self, phase: str) -> Rearrangement:
        """How the items of a phase move: segments of an encoder, examples of the LLM."""
        return self.llm if phase == "llm" else self.encode[phase]

    def items_of(self, phase: str, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """(length, dataset index of the example) of each item that a rank processes."""
        items, layout = self.rearrangement(phase).items_on(rank), self.layout
        if phase == "llm":
            return self.parts.tokens_per_example[items], self.parts.example_id[items]
        segments = layout.segments[OF_MEDIA[phase]][items]
        return (layout.attn_len[segments],
                layout.example_id[layout.example_of_segment[segments]])

    def phase_cost(self, phase: str) -> tuple[np.ndarray, np.ndarray]:
        """(d,) predicted cost per rank, as sampled and as planned, in kFLOP."""
        return sampled_costs(self.layout, self.spec, phase)[0], self.planned_cost(phase)

    def planned_cost(self, phase: str) -> np.ndarray:
        """(d,) predicted cost per rank as planned, in kFLOP."""
        move, model = self.rearrangement(phase), self.spec.costs[phase]
        if phase == "llm" and self.pieces is not None:
            return sums_of(self.pieces.costs(model)[move.order], move.target_sizes)
        return run_costs(model, self.layout.item_lengths(phase)[move.order], move.target_sizes)

    def positions(self, phase: str) -> np.ndarray:
        """(d,) positions that each rank processes, with those that it pads."""
        move = self.rearrangement(phase)
        return run_costs(self.spec.costs[phase].positions,
                         self.parts.item_lengths(phase)[move.order], move.target_sizes)

    @property
    def is_within_caps(self) -> bool:
        """Whether no rank holds more than a phase's max_rank_tokens, or than its memory holds."""
        return not (self.spec.hard_caps or self.spec.room) or self.spec.allows(
            {phase: self.positions(phase) for phase in self.spec.phases})

    @property
    def predicted_gain(self) -> float:
        """Share of the step's time that balancing is predicted to spare: phases run one after the
        other, each as long as its slowest rank, by the cost models; moving is not counted."""
        costs = [self.phase_cost(phase) for phase in self.spec.phases]
        before, after = (sum(int(cost[i].max(initial=0)) for cost in costs) for i in range(2))
        return 1.0 - after / before if before else 0.0

    def transfers(self, phase: str):
        """(rearrangement, bytes per source item) of everything that moves for a phase."""
        layout, inputs_move = self.layout, self.spec.balance.dispatch != "load"
        if phase == "llm":
            return [(self.texts, layout.tokens_per_example * TEXT_BYTES)] if inputs_move else []
        out = [(self.feature[phase], self.moved_tokens(phase) * self.spec.feature_bytes)]
        if inputs_move:
            seg = layout.segments[OF_MEDIA[phase]]
            out.append((self.encode[phase], layout.rows[seg] * self.spec.row_bytes[phase]))
        return out

    def moved_tokens(self, phase: str) -> np.ndarray:
        """Positions of the LLM of each item that self.feature[phase] moves, in its source order."""
        if phase == GENERATOR:
            made = self.llm.expand(self.layout.items_per_example[MADE])
            return self.layout.conditions[made.order]
        move, of_phase = self.encode[phase], ENCODERS[phase]
        if self.pieces is not None:
            move = move.expand(self.pieces.cuts[self.layout.segments[of_phase]])
        return self.parts.num_tokens[self.parts.segments[of_phase]][move.order]

    def for_rank(self, rank: int) -> RankPlan:
        """`rank`'s part, as index arrays."""
        layout, parts = self.layout, self.parts
        encode, feature, media, grid, taken = {}, {}, {}, {}, {}
        examples, mine = self.texts.items_on(rank), self.llm.items_on(rank)
        for phase, modality in self.spec.of_media.items():
            move, seg = self.encode[phase], layout.segments[modality]
            encode[phase] = move.exchange(layout.rows[seg], rank)
            feature[phase] = self.feature[phase].exchange(self.moved_tokens(phase), rank)
            seg = seg[move.items_on(rank)]
            grid[phase], media[phase] = layout.grid[seg], layout.places(seg)
            seg = ranges(parts.segment_start[mine], parts.segments_per_example[mine])
            seg = seg[parts.modality[seg] == modality]
            taken[phase] = layout.places(seg if self.pieces is None else self.pieces.segment[seg])
        example, start, shared = mine, np.zeros_like(mine), None
        if self.pieces is not None:
            example, start = self.pieces.example[mine], self.pieces.start[mine]
            shared = shared_rows(self.pieces, self.llm, rank,
                                 self.spec.node_of(rank, layout.num_ranks))
        return RankPlan(
            rank=rank, encode=encode, feature=feature, media=media, grid=grid, taken=taken,
            examples=examples, example_ids=layout.example_id[examples],
            row=np.stack([example, start, parts.tokens_per_example[mine]], 1), shared=shared)


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a StepPlan.

    encode[m], feature[m]: Exchange of input rows, feature rows.
    media[m] (n_m, 2): (example position in the global batch, segment within the example) of what
    this rank encodes, in slot order; grid[m] (n_m, 3). taken[m] (k_m, 2): the same of the features
    that its LLM takes, in the order of its row. examples (n_r,): positions in the global
    batch of what its LLM processes; example_ids (n_r,) their dataset indices. row (k, 3): of each
    piece in its row, the example (position in the global batch), the first position in it, and how
    many follow. shared: what its attention needs of other ranks, None where no rank of its node
    shares an example.
    """

    rank: int
    encode: Mapping[str, Exchange]
    feature: Mapping[str, Exchange]
    media: Mapping[str, np.ndarray]
    grid: Mapping[str, np.ndarray]
    taken: Mapping[str, np.ndarray]
    examples: np.ndarray
    example_ids: np.ndarray
    row: np.ndarray
    shared: SharedRows | None


def phase_figures(
    layout: BatchLayout, plans: Sequence[StepPlan]
) -> dict[str, dict[str, float]]:
    """Per phase, over a step's microbatches: imbalance before and after (sum of the slowest rank's
    cost / sum of the mean), that mean in kFLOP, and bytes moved between ranks and between nodes.
    layout: of the whole step."""
    out = {}
    for phase in plans[0].spec.phases:
        before = sampled_costs(layout, plans[0].spec, phase, len(plans))
        after = np.array([plan.planned_cost(phase) for plan in plans])
        stats = [plan.stats[phase] for plan in plans]
        out[phase] = {
            "imbalance_before": imbalance(before),
            "imbalance_after": imbalance(after),
            "mean_cost_kflop": float(before.mean(axis=1).sum()),
            **{name: sum(one[name] for one in stats) for name in stats[0]},
        }
    return out
