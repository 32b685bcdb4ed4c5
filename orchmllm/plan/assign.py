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
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np

from orchmllm.config.schema import Conflict, key, section
from orchmllm.plan import balance as balancing
from orchmllm.plan.balance import DEFAULT_TOLERANCE, OPTIONS, POLICIES, RENAMED, balance
from orchmllm.plan.cost import CostModel
from orchmllm.plan.homes import Pieces, example_bytes, example_pieces, feature_home
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.nodewise import OBJECTIVES, SOLVERS, assign_nodes

PHASES = (*ENCODERS, "llm")
DISPATCHES = ("tensors", "bytes", "load")
NODE_BLIND = ("greedy", "padded", "conv_transformer")  # policies whose batches may be permuted
SOLVER_PACKAGES = {"cbc": ("cvxpy", "cylp"), "highs": ("cvxpy", "highspy")}


@dataclass(frozen=True)
class PhasePolicy:
    """How one phase is balanced."""

    policy: str = key("least_move", "Which algorithm chooses the ranks; see orchmllm.plan.balance.",
                      choices=POLICIES, renamed=RENAMED)
    tolerance: float = key(
        DEFAULT_TOLERANCE, "Allowed excess of the largest load over its lower bound (0.005: half a "
        "percent), for policies that trade balance for movement; others ignore the default.",
        at_least=0, at_most=1)
    max_rank_tokens: int = key(
        0, "Hard cap of a rank's positions (activation memory); 0: none.", at_least=0)
    nodewise: bool = key(
        False, "Permute the finished batches over the ranks to spare the network between nodes "
        "(OrchMLLM Algorithm 3), for policies that ignore nodes.")

    @property
    def sets_tolerance(self) -> bool:
        """Whether the tolerance is one that a policy without tolerances must refuse."""
        return self.tolerance not in (0, DEFAULT_TOLERANCE)

    def conflicts(self) -> Iterator[Conflict]:
        """What the policy would have to ignore."""
        honoured = OPTIONS[self.policy]
        if self.sets_tolerance and "tolerance" not in honoured:
            yield Conflict(("tolerance", "policy"),
                           f"policy {self.policy!r} has no tolerance: leave it out")
        if self.max_rank_tokens and "max_rank_tokens" not in honoured:
            yield Conflict(("max_rank_tokens", "policy"),
                           f"policy {self.policy!r} has no token cap: set it to 0")
        if self.nodewise and self.policy not in NODE_BLIND:
            yield Conflict(("nodewise", "policy"),
                           f"policy {self.policy!r} knows nodes already: set it to false")


@dataclass(frozen=True)
class BalanceConfig:
    """Which rank processes what, phase by phase."""

    enabled: bool = key(True, "false runs the sampled mini-batches as they are (policy `none` "
                        "everywhere).")
    dispatch: str = key(
        "tensors", "How inputs reach the rank that processes them: `tensors` moves decoded rows by "
        "all-to-all, `bytes` encoded media (in the prefetch thread, to be decoded there), `load` "
        "lets each rank read what it will process.", choices=DISPATCHES)
    group: str = key(
        "world", "Ranks that balance with each other: all, or those of a `shard` (hybrid "
        "sharding's fsdp.shard_size), which nothing leaves then.", choices=("world", "shard"))
    exchange: str = key(
        "flat", "How rows travel: `flat` from rank to rank, `two_hop` between equal places of the "
        "nodes, then inside the node.", choices=("flat", "two_hop"))
    min_gain: float = key(
        0.0, "Steps that balancing is predicted to shorten by less run as sampled (0.02: 2%).",
        at_least=0, below=1)
    ranks_per_node: int = key(0, "Ranks that share a node; 0 takes the launcher's "
                              "LOCAL_WORLD_SIZE.", at_least=0)
    whole_examples: bool = key(
        False, "Move whole examples by the total cost of their phases with the LLM's policy, as "
        "balancing before sampling would; the encoder phases then stay unbalanced (a baseline).")
    calibrate_steps: int = key(
        0, "Fit the cost of a position and of a pair of positions to the phase times of so many "
        "steps (after a first one), from then on and in checkpoints; 0: as derived from the "
        "model.", at_least=0, aliases=("fit_steps",))
    nodewise_solver: str = key(
        "search", "How the permutation of `nodewise` is found: `search`, or the paper's integer "
        "program by `cbc` or `highs` (pip install cvxpy highspy cylp), solved on one rank and sent "
        "to all.", choices=SOLVERS)
    nodewise_objective: str = key(
        "send", "What it keeps low: what the busiest rank sends to other nodes, or the larger of "
        "what it sends and receives.", choices=OBJECTIVES)
    nodewise_limit_s: float = key(
        60.0, "Seconds for each integer program; the best permutation found by then is used, and "
        "none found is an error.", above=0, at_most=86400)
    vision: PhasePolicy = section(PhasePolicy)
    audio: PhasePolicy = section(PhasePolicy)
    llm: PhasePolicy = section(PhasePolicy)

    @property
    def num_programs(self) -> int:
        """Integer programs of a microbatch."""
        if self.nodewise_solver == "search" or not self.enabled:
            return 0
        phases = (self.llm,) if self.whole_examples else (self.vision, self.audio, self.llm)
        return sum(phase.nodewise for phase in phases)

    def conflicts(self) -> Iterator[Conflict]:
        """balance.nodewise_solver: its packages are installed, some phase has `nodewise`, and
        balance.group is world; balance.calibrate_steps needs balance.enabled."""
        if self.calibrate_steps and not self.enabled:
            yield Conflict(("calibrate_steps", "enabled"), "nothing is balanced: set it to 0")
        if self.nodewise_solver == "search":
            return
        if not self.num_programs:
            yield Conflict(("nodewise_solver",), "nothing would be solved: set nodewise of a phase "
                           "to true, or use search")
        if self.group != "world":
            yield Conflict(("nodewise_solver", "group"), "one rank would solve for all shards, one "
                           "after the other: set balance.group to world, or use search")
        missing = [p for p in SOLVER_PACKAGES[self.nodewise_solver]
                   if importlib.util.find_spec(p) is None]
        if missing:
            yield Conflict(("nodewise_solver",), f"needs {' and '.join(missing)}: "
                           f"pip install {' '.join(missing)}, or use search")


@dataclass(frozen=True)
class PlanSpec:
    """What the planner knows of the model and the cluster; equal on all ranks.

    costs: phase -> cost of one item. row_bytes: encoder phase -> bytes of one input row.
    feature_bytes: bytes of one feature row (LLM width in the compute dtype). group_size:
    consecutive ranks that balance among themselves; 0: all.
    """

    costs: Mapping[str, CostModel]
    row_bytes: Mapping[str, int]
    feature_bytes: int
    ranks_per_node: int
    balance: BalanceConfig
    group_size: int = 0

    @cached_property
    def digest(self) -> int:
        """64 bits over every field."""
        text = repr((sorted((k, astuple(v)) for k, v in self.costs.items()),
                     sorted(self.row_bytes.items()), self.feature_bytes, self.ranks_per_node,
                     astuple(self.balance), self.group_size))
        return digest64(text.encode())


NodeSolver = Callable[..., np.ndarray]  # has assign_nodes' arguments and result


def assign_phases(
    layout: BatchLayout, spec: PlanSpec, solve: NodeSolver = assign_nodes
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(encode, llm): encode[m] (s_m,) rank of each of the phase's segments, llm (n,) rank of each
    example. Raises ValueError for a policy or option that cannot be honoured."""
    sampled = layout.rank_of_example
    if not spec.balance.enabled:
        return {m: sampled[_owner(layout, m)] for m in ENCODERS}, sampled
    if 0 < spec.group_size < layout.num_ranks:
        groups = [(first, *assign_phases(part, inside, solve))
                  for first, part, inside in _groups(layout, spec)]
        return ({m: np.concatenate([first + e[m] for first, e, _ in groups]) for m in ENCODERS},
                np.concatenate([first + llm for first, _, llm in groups]))
    if spec.balance.whole_examples:
        return _assign_whole_examples(layout, spec, solve)
    if spec.balance.dispatch == "load":
        llm = _assign_llm(layout, sampled, None, spec, solve)
        return {m: _assign_encoder(layout, m, llm, spec, solve) for m in ENCODERS}, llm
    encode = {m: _assign_encoder(layout, m, sampled, spec, solve) for m in ENCODERS}
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
    """(n, 3) cost of each example in each of PHASES."""
    cost = np.zeros((layout.num_examples, len(PHASES)), np.int64)
    cost[:, PHASES.index("llm")] = spec.costs["llm"](layout.tokens_per_example)
    for phase, modality in ENCODERS.items():
        np.add.at(cost[:, PHASES.index(phase)], _owner(layout, phase),
                  spec.costs[phase](layout.attn_len[layout.segments[modality]]))
    return cost


def _assign_whole_examples(
    layout: BatchLayout, spec: PlanSpec, solve: NodeSolver
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    cost = example_costs(layout, spec).sum(axis=1)
    pieces = example_pieces(layout, None, spec.feature_bytes) if spec.balance.llm.nodewise else None
    llm = _assign("llm", layout.tokens_per_example, cost, layout.rank_of_example, pieces,
                  layout.num_ranks, spec, solve)
    return {m: llm[_owner(layout, m)] for m in ENCODERS}, llm


def _assign(
    phase: str, lengths: np.ndarray, cost: np.ndarray, home: np.ndarray, pieces: Pieces | None,
    num_ranks: int, spec: PlanSpec, solve: NodeSolver, move_cost: np.ndarray | None = None,
) -> np.ndarray:
    """(n,) rank of each item by the phase's policy; options the policy has no use for stay out."""
    chosen: PhasePolicy = getattr(spec.balance, phase)
    honoured = OPTIONS.get(chosen.policy, frozenset())
    model = spec.costs[phase]
    options = {"cost": cost, "move_cost": move_cost}
    if chosen.policy == "conv_transformer":
        options = {"cost": model.linear_part(lengths), "padded_cost": model.quadratic_part(lengths)}
    rank_of = np.zeros(0, np.int64) if not len(lengths) else balance(
        lengths, num_ranks=num_ranks, policy=chosen.policy, home=home,
        tolerance=chosen.tolerance if chosen.sets_tolerance or "tolerance" in honoured else None,
        ranks_per_node=spec.ranks_per_node, max_rank_tokens=chosen.max_rank_tokens or None,
        **{option: value for option, value in options.items() if option in honoured},
    )
    if not chosen.nodewise:
        return rank_of
    if chosen.policy not in NODE_BLIND:
        raise ValueError(f"balance.{phase}: policy {chosen.policy!r} does not honour nodewise; "
                         f"only {', '.join(NODE_BLIND)} do")
    chosen_solver = spec.balance.nodewise_solver
    rank, item, num_bytes = pieces
    return solve(
        rank, rank_of[item], num_bytes, num_ranks=num_ranks, ranks_per_node=spec.ranks_per_node,
        solver=chosen_solver, objective=spec.balance.nodewise_objective,
        limit=None if chosen_solver == "search" else spec.balance.nodewise_limit_s)[rank_of]


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
    return balancing.assign_microbatches(example_costs(layout, spec), num_microbatches)


def digest64(*parts: bytes) -> int:
    h = hashlib.blake2b(digest_size=8)
    for p in parts:
        h.update(p)
    return int.from_bytes(h.digest(), "little", signed=True)
