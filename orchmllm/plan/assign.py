"""Which rank processes which item in each phase: policies, home ranks, cost of moving.

Home of an item is where moving it costs nothing. Encoder phase: the sampling rank. LLM phase: the
rank that holds most of the example's features after encoding, so that features mostly stay where
they are, and text-only examples (bytes per token, not a feature row per token) move first. With
`load` dispatch nothing is held anywhere: the LLM phase is planned first and encoders follow it.

Schemes: the paper's is `greedy` with nodewise (audio `padded`); its ablations are `none`, LLM only
(encoders `none`), whole_examples, all `greedy`, all `padded`, and nodewise off. Ours is
`least_move`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np

from orchmllm.plan import balance as balancing
from orchmllm.plan.balance import DEFAULT_TOLERANCE, POLICIES, balance, check_policy
from orchmllm.plan.cost import CostModel
from orchmllm.plan.homes import Pieces, example_bytes, example_pieces, feature_home
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.nodewise import assign_nodes

PHASES = (*ENCODERS, "llm")
DISPATCHES = ("tensors", "bytes", "load")


@dataclass(frozen=True)
class PhasePolicy:
    """How one phase is balanced; orchmllm.config.balance describes every field."""

    policy: str = "least_move"
    tolerance: float = DEFAULT_TOLERANCE
    max_rank_tokens: int = 0
    nodewise: bool = False

    @property
    def sets_tolerance(self) -> bool:
        """Whether the tolerance is one that a policy without tolerances must refuse."""
        return self.tolerance not in (0, DEFAULT_TOLERANCE)


@dataclass(frozen=True)
class BalancePolicy:
    """Which rank processes what, phase by phase; orchmllm.config.balance describes every field."""

    enabled: bool = True
    dispatch: str = "tensors"
    group: str = "world"
    min_gain: float = 0.0
    ranks_per_node: int = 0
    whole_examples: bool = False
    nodewise_solver: str = "search"
    nodewise_limit_s: float = 60.0
    vision: PhasePolicy = PhasePolicy()
    audio: PhasePolicy = PhasePolicy()
    llm: PhasePolicy = PhasePolicy()

    @property
    def num_programs(self) -> int:
        """Integer programs of a microbatch."""
        if self.nodewise_solver == "search" or not self.enabled:
            return 0
        phases = (self.llm,) if self.whole_examples else (self.vision, self.audio, self.llm)
        return sum(phase.nodewise for phase in phases)


@dataclass(frozen=True)
class PlanSpec:
    """What the planner knows of the model and the cluster; equal on all ranks.

    costs: phase -> cost of one item; an encoder phase without one is not planned (a loader of whole
    examples has the LLM phase alone). row_bytes: encoder phase -> bytes of one input row.
    feature_bytes: bytes of one feature row (LLM width in the compute dtype). group_size:
    consecutive ranks that balance among themselves; 0: all. fills: whether every rank gets an
    example in every microbatch where there are enough: beside a long example balancing may leave a
    rank without one.
    """

    costs: Mapping[str, CostModel]
    row_bytes: Mapping[str, int]
    feature_bytes: int
    ranks_per_node: int
    balance: BalancePolicy
    group_size: int = 0
    fills: bool = False

    @cached_property
    def encoders(self) -> dict[str, int]:
        """Encoder phases that are planned, in their fixed order -> modality."""
        return {phase: code for phase, code in ENCODERS.items() if phase in self.costs}

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """All phases that are planned, in their fixed order."""
        return (*self.encoders, "llm")

    @cached_property
    def digest(self) -> int:
        """64 bits over every field."""
        text = repr((sorted((k, astuple(v)) for k, v in self.costs.items()),
                     sorted(self.row_bytes.items()), self.feature_bytes, self.ranks_per_node,
                     astuple(self.balance), self.group_size, self.fills))
        return digest64(text.encode())


NodeSolver = Callable[..., np.ndarray]  # has assign_nodes' arguments and result


def assign_phases(
    layout: BatchLayout, spec: PlanSpec, solve: NodeSolver = assign_nodes
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(encode, llm): encode[m] (s_m,) rank of each of the phase's segments, llm (n,) rank of each
    example. Raises ValueError for a policy or option that cannot be honoured."""
    sampled = layout.rank_of_example
    if not spec.balance.enabled:
        return {m: sampled[_owner(layout, m)] for m in spec.encoders}, sampled
    if 0 < spec.group_size < layout.num_ranks:
        groups = [(first, *assign_phases(part, inside, solve))
                  for first, part, inside in _groups(layout, spec)]
        return ({m: np.concatenate([first + e[m] for first, e, _ in groups])
                 for m in spec.encoders},
                np.concatenate([first + llm for first, _, llm in groups]))
    if spec.balance.whole_examples:
        return _assign_whole_examples(layout, spec, solve)
    if spec.balance.dispatch == "load":
        llm = _assign_llm(layout, sampled, None, spec, solve)
        return {m: _assign_encoder(layout, m, llm, spec, solve) for m in spec.encoders}, llm
    encode = {m: _assign_encoder(layout, m, sampled, spec, solve) for m in spec.encoders}
    home = feature_home(layout, encode, spec.feature_bytes)
    return encode, _assign_llm(layout, home, encode, spec, solve)


def _groups(layout: BatchLayout, spec: PlanSpec) -> Iterator[tuple[int, BatchLayout, PlanSpec]]:
    """(first rank, layout, spec) of each group, as if there were no other."""
    size = spec.group_size
    inside = replace(spec, group_size=0, ranks_per_node=min(spec.ranks_per_node, size))
    for k, part in enumerate(layout.split_ranks(size)):
        yield k * size, part, inside


def _owner(layout: BatchLayout, phase: str) -> np.ndarray:
    """(s_m,) example of each of the phase's segments."""
    return layout.example_of_segment[layout.segments[ENCODERS[phase]]]


def _assign_encoder(
    layout: BatchLayout, phase: str, rank_of_example: np.ndarray, spec: PlanSpec,
    solve: NodeSolver,
) -> np.ndarray:
    seg = layout.segments[ENCODERS[phase]]
    home = rank_of_example[layout.example_of_segment[seg]]
    lengths = layout.attn_len[seg]
    pieces = None
    if getattr(spec.balance, phase).nodewise:
        pieces = home, np.arange(len(seg)), layout.rows[seg] * spec.row_bytes[phase]
    return _assign(phase, lengths, spec.costs[phase](lengths), home, pieces, layout.num_ranks, spec,
                   solve)


def _assign_llm(
    layout: BatchLayout, home: np.ndarray, encode: Mapping[str, np.ndarray] | None, spec: PlanSpec,
    solve: NodeSolver,
) -> np.ndarray:
    lengths = layout.tokens_per_example
    pieces = None
    if spec.balance.llm.nodewise:
        pieces = example_pieces(layout, encode, spec.feature_bytes)
    return _assign("llm", lengths, spec.costs["llm"](lengths), home, pieces, layout.num_ranks, spec,
                   solve, example_bytes(layout, spec.feature_bytes))


def example_costs(layout: BatchLayout, spec: PlanSpec) -> np.ndarray:
    """(n, phases) cost of each example in each of spec.phases."""
    cost = np.zeros((layout.num_examples, len(spec.phases)), np.int64)
    cost[:, -1] = spec.costs["llm"](layout.tokens_per_example)
    for k, (phase, modality) in enumerate(spec.encoders.items()):
        np.add.at(cost[:, k], _owner(layout, phase),
                  spec.costs[phase](layout.attn_len[layout.segments[modality]]))
    return cost


def _assign_whole_examples(
    layout: BatchLayout, spec: PlanSpec, solve: NodeSolver
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    cost = example_costs(layout, spec).sum(axis=1)
    pieces = example_pieces(layout, None, spec.feature_bytes) if spec.balance.llm.nodewise else None
    llm = _assign("llm", layout.tokens_per_example, cost, layout.rank_of_example, pieces,
                  layout.num_ranks, spec, solve)
    return {m: llm[_owner(layout, m)] for m in spec.encoders}, llm


def _assign(
    phase: str, lengths: np.ndarray, cost: np.ndarray, home: np.ndarray, pieces: Pieces | None,
    num_ranks: int, spec: PlanSpec, solve: NodeSolver, move_cost: np.ndarray | None = None,
) -> np.ndarray:
    """(n,) rank of each item by the phase's policy; options the policy has no use for stay out."""
    chosen: PhasePolicy = getattr(spec.balance, phase)
    check_policy(chosen.policy)
    policy, model = POLICIES[chosen.policy], spec.costs[phase]
    options = {"cost": cost, "move_cost": move_cost, "tolerance": chosen.tolerance}
    if "padded_cost" in policy.options:
        options = {"cost": model.linear_part(lengths), "padded_cost": model.quadratic_part(lengths)}
    options = {name: value for name, value in options.items() if name in policy.options}
    if chosen.sets_tolerance:  # refused by balance() where the policy has none
        options["tolerance"] = chosen.tolerance
    rank_of = np.zeros(0, np.int64) if not len(lengths) else balance(
        lengths, num_ranks=num_ranks, policy=chosen.policy, home=home,
        ranks_per_node=spec.ranks_per_node, max_rank_tokens=chosen.max_rank_tokens or None,
        **options)
    if not chosen.nodewise:
        return rank_of
    if not policy.node_blind:
        blind = ", ".join(name for name, row in POLICIES.items() if row.node_blind)
        raise ValueError(f"balance.{phase}: policy {chosen.policy!r} does not honour nodewise; "
                         f"only {blind} do")
    solver, (rank, item, num_bytes) = spec.balance.nodewise_solver, pieces
    return solve(
        rank, rank_of[item], num_bytes, num_ranks=num_ranks, ranks_per_node=spec.ranks_per_node,
        solver=solver, limit=None if solver == "search" else spec.balance.nodewise_limit_s)[rank_of]


def assign_microbatches(layout: BatchLayout, spec: PlanSpec, num_microbatches: int) -> np.ndarray:
    """(n,) microbatch of each example. With balancing, a deterministic vector LPT on the phase
    costs; without, every rank's share is cut in order."""
    if not spec.balance.enabled:
        sizes = layout.examples_per_rank
        first = np.repeat(np.cumsum(sizes) - sizes, sizes)
        slot = np.arange(layout.num_examples) - first
        return slot * num_microbatches // np.maximum(sizes[layout.rank_of_example], 1)
    if 0 < spec.group_size < layout.num_ranks:
        return np.concatenate([assign_microbatches(part, inside, num_microbatches)
                               for _, part, inside in _groups(layout, spec)])
    micro = balancing.assign_microbatches(example_costs(layout, spec), num_microbatches)
    if not spec.fills:
        return micro
    return at_least(micro, layout.tokens_per_example, num_microbatches, layout.num_ranks)


def at_least(place_of: np.ndarray, lengths: np.ndarray, num_places: int, least: int) -> np.ndarray:
    """(n,) places of n items, the shortest moved from places with more than `least` items to those
    with fewer; as they are where n is less than least * num_places."""
    counts = np.bincount(place_of, minlength=num_places)
    if len(place_of) < least * num_places or counts.min() >= least:
        return place_of
    out = place_of.copy()
    wanting = iter(np.repeat(np.arange(num_places), np.maximum(least - counts, 0)).tolist())
    for item in np.argsort(lengths, kind="stable"):
        if counts[out[item]] > least:
            if (place := next(wanting, None)) is None:
                break
            counts[out[item]] -= 1
            out[item] = place
    return out


def digest64(*parts: bytes) -> int:
    h = hashlib.blake2b(digest_size=8)
    for p in parts:
        h.update(p)
    return int.from_bytes(h.digest(), "little", signed=True)
