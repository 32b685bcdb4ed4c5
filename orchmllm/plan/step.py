"""Plan of one step or microbatch: from the lengths of a global batch to what every rank does.

`plan_step` balances each phase (OrchMLLM section 5.1) and composes the rearrangements so that
encoded features travel once, from the encoder rank to the LLM rank (section 6). Everything here is
a pure function of its arguments and so the same on all ranks; `StepPlan.digest` lets them check it.

Flow: BatchLayout + PlanSpec -> rank of every item per phase -> StepPlan -> for_rank(r) -> RankPlan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial

import numpy as np

from orchmllm.plan.assign import (
    PHASES,
    TEXT_BYTES,
    NodeSolver,
    PlanSpec,
    assign_phases,
    at_least,
    digest_of_arrays,
)
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.nodewise import assign_nodes
from orchmllm.plan.rearrange import Exchange, Rearrangement, sums_of


def plan_step(
    layout: BatchLayout, spec: PlanSpec, solve: NodeSolver = assign_nodes
) -> StepPlan:
    """Balances every phase of one step or microbatch, or leaves it as sampled where that gains less
    than balance.min_gain and no rank holds more than it may. solve: permutes finished
    batches over the ranks, in place of assign_nodes. Raises ValueError for a policy or option that
    cannot be honoured."""
    plan = build_plan(layout, *assign_phases(layout, spec, solve), spec)
    if spec.balance.min_gain and plan.predicted_gain < spec.balance.min_gain:
        unmoved = replace(spec.as_sampled, fills=spec.fills, room=spec.room)
        sampled = build_plan(layout, *assign_phases(layout, unmoved, solve), unmoved)
        if sampled.is_within_caps:
            return sampled
    return plan


def build_plan(
    layout: BatchLayout, encode: Mapping[str, np.ndarray], llm: np.ndarray, spec: PlanSpec
) -> StepPlan:
    """The plan for given ranks: encode[m] (s_m,) per segment, llm (n,) per example; with spec.fills
    a rank without an example is given one of its group."""
    size = spec.group_size or layout.num_ranks
    for first in range(0, layout.num_ranks, size) if spec.fills else ():
        # The slowest rank takes no longer: what moves is alone there, and was not before.
        inside, num_ranks = llm // size == first // size, min(size, layout.num_ranks - first)
        llm = llm.copy()
        llm[inside] = first + at_least(
            llm[inside] - first, layout.tokens_per_example[inside], num_ranks, 1)
    llm_move = Rearrangement.from_rank_of(llm, layout.examples_per_rank)
    encode_moves, feature_moves = {}, {}
    for phase, modality in spec.encoders.items():
        counts = layout.items_per_example[modality]
        sizes = sums_of(counts, layout.examples_per_rank)
        encode_moves[phase] = Rearrangement.from_rank_of(encode[phase], sizes)
        feature_moves[phase] = encode_moves[phase].inverse.then(llm_move.expand(counts))
    return StepPlan(layout, spec, encode_moves, feature_moves, llm_move)


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
        sizes = sums_of(layout.items_per_example[ENCODERS[phase]], sizes)
    costs = run_costs(spec.costs[phase], layout.item_lengths(phase), sizes)
    return costs.reshape(layout.num_ranks, num_microbatches).T


def run_costs(model: CostModel, lengths: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(d,) cost of ranks that have consecutive runs of items of `lengths` (n,), sizes (d,) each."""
    if model.padded:
        return model.of_ranks(lengths, np.repeat(np.arange(len(sizes)), sizes), len(sizes))
    return sums_of(model(lengths), sizes)


@dataclass(frozen=True)
class StepPlan:
    """The same on all ranks. encode[m] and feature[m] move the phase's segments (the first from
    the sampling rank to the encoder rank, the second from there to the LLM rank), llm moves
    examples from the sampling rank."""

    layout: BatchLayout
    spec: PlanSpec
    encode: Mapping[str, Rearrangement]
    feature: Mapping[str, Rearrangement]
    llm: Rearrangement

    @cached_property
    def digest(self) -> int:
        """64 bits over lengths, plan and configuration (compared by all ranks in COMMIT)."""
        moves = [self.llm, *self.encode.values()]
        return digest_of_arrays([
            *(getattr(self.layout, field.name) for field in fields(self.layout)),
            *(move.order for move in moves), *(move.target_sizes for move in moves),
            np.array([self.spec.digest])])

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
            return layout.tokens_per_example[items], layout.example_id[items]
        segments = layout.segments[ENCODERS[phase]][items]
        return (layout.attn_len[segments],
                layout.example_id[layout.example_of_segment[segments]])

    def phase_cost(self, phase: str) -> tuple[np.ndarray, np.ndarray]:
        """(d,) predicted cost per rank, as sampled and as planned, in kFLOP."""
        return sampled_costs(self.layout, self.spec, phase)[0], self.planned_cost(phase)

    def planned_cost(self, phase: str) -> np.ndarray:
        """(d,) predicted cost per rank as planned, in kFLOP."""
        move = self.rearrangement(phase)
        return run_costs(self.spec.costs[phase], self.layout.item_lengths(phase)[move.order],
                         move.target_sizes)

    def positions(self, phase: str) -> np.ndarray:
        """(d,) positions that each rank processes, with those that it pads."""
        move = self.rearrangement(phase)
        return run_costs(self.spec.costs[phase].positions,
                         self.layout.item_lengths(phase)[move.order], move.target_sizes)

    @property
    def is_within_caps(self) -> bool:
        """Whether no rank holds more than a phase's max_rank_tokens, or than its memory holds."""
        return self.spec.allows({phase: self.positions(phase) for phase in self.spec.phases})

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
            return [(self.llm, layout.tokens_per_example * TEXT_BYTES)] if inputs_move else []
        seg = layout.segments[ENCODERS[phase]]
        features = layout.num_tokens[seg] * self.spec.feature_bytes
        out = [(self.feature[phase], features[self.encode[phase].order])]
        if inputs_move:
            out.append((self.encode[phase], layout.rows[seg] * self.spec.row_bytes[phase]))
        return out

    def for_rank(self, rank: int) -> RankPlan:
        """`rank`'s part, as index arrays."""
        layout = self.layout
        encode, feature, media, grid = {}, {}, {}, {}
        examples = self.llm.items_on(rank)
        for phase, modality in self.spec.encoders.items():
            seg = layout.segments[modality]
            move = self.encode[phase]
            encode[phase] = move.exchange(layout.rows[seg], rank)
            feature[phase] = self.feature[phase].exchange(layout.num_tokens[seg][move.order], rank)
            mine = seg[move.items_on(rank)]
            grid[phase], media[phase] = layout.grid[mine], layout.places(mine)
        return RankPlan(
            rank=rank, encode=encode, feature=feature, media=media, grid=grid, examples=examples,
            example_ids=layout.example_id[examples],
            make_llm=partial(self.llm.exchange, layout.tokens_per_example, rank),
        )


@dataclass(frozen=True)
class RankPlan:
    """One rank's part of a StepPlan. llm, which has an entry per position of the text, is computed
    when it is first read: training never does.

    encode[m], feature[m], llm: Exchange of input rows, feature rows, text positions.
    media[m] (n_m, 2): (example position in the global batch, segment within the example) of what
    this rank encodes, in slot order; grid[m] (n_m, 3). examples (n_r,): positions in the global
    batch of what its LLM processes; example_ids (n_r,) their dataset indices.
    make_llm: computes llm.
    """

    rank: int
    encode: Mapping[str, Exchange]
    feature: Mapping[str, Exchange]
    media: Mapping[str, np.ndarray]
    grid: Mapping[str, np.ndarray]
    examples: np.ndarray
    example_ids: np.ndarray
    make_llm: Callable[[], Exchange]

    @cached_property
    def llm(self) -> Exchange:
        return self.make_llm()


def phase_figures(
    layout: BatchLayout, plans: Sequence[StepPlan]
) -> dict[str, dict[str, float]]:
    """Per phase, over a step's microbatches: imbalance before and after (sum of the slowest rank's
    cost / sum of the mean), that mean in kFLOP, and bytes moved between ranks and between nodes.
    layout: of the whole step."""
    out = {}
    for phase in PHASES:
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
