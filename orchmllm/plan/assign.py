"""Which rank processes which item in each phase: policies, home ranks, cost of moving.

Objective: in each phase a low cost of the slowest rank, by the phase's policy
(orchmllm.plan.balance), and among such plans few bytes that move.

Home of an item is where moving it costs nothing. Encoder phase: the sampling rank. LLM phase: the
rank that holds most of the example's features after encoding, so that features mostly stay where
they are, and text-only examples (bytes per token, not a feature row per token) move first. With
`load` dispatch nothing is held anywhere: the LLM phase is planned first and encoders follow it.

Invariants:
- Every item of a phase gets one rank, and with balance.group=shard one of its own group.
- No rank holds more positions than max_rank_tokens or `room` allow, or CapError is raised.
- With balancing off every item stays on the rank that sampled its example.
- The result depends on the arguments alone, so that all ranks compute the same.

Schemes: the paper's is `greedy` with nodewise (audio `padded`); its ablations are `none`, LLM only
(encoders `none`), whole_examples, all `greedy`, all `padded`, and nodewise off. Ours is
`least_move`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, replace
from functools import cached_property

import numpy as np

from orchmllm.plan.balance import (
    DEFAULT_TOLERANCE,
    POLICIES,
    CapError,
    balance,
    check_policy,
    core,
)
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, GENERATOR, OF_MEDIA, TEXT, BatchLayout
from orchmllm.plan.nodewise import assign_nodes
from orchmllm.plan.rearrange import sums_of
from orchmllm.plan.room import Limit, Share, caps_below

PHASES = (*ENCODERS, "llm")
EVERY_PHASE = (*PHASES, GENERATOR)  # in the order of a forward pass; few models have the last one
_FACTORS = np.random.PCG64(0).random_raw(2**16) | np.uint64(1)  # the same everywhere
DISPATCHES = ("tensors", "bytes", "load")
TEXT_BYTES = 8  # an int32 token id and an int32 label


@dataclass(frozen=True)
class PhasePolicy:
    """How one phase is balanced; orchmllm.config.balance describes every field."""

    policy: str = "least_move"
    tolerance: float = DEFAULT_TOLERANCE
    max_rank_tokens: int = 0
    nodewise: bool = False
    max_shares: int = 1

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
    measure_every: int = 0
    ranks_per_node: int = 0
    whole_examples: bool = False
    vision: PhasePolicy = PhasePolicy()
    audio: PhasePolicy = PhasePolicy()
    llm: PhasePolicy = PhasePolicy()
    generator: PhasePolicy = PhasePolicy()

    def measures(self, step: int) -> bool:
        """Whether a step is one that runs as sampled, to measure what balancing gains."""
        return self.enabled and self.measure_every > 0 and (step + 1) % self.measure_every == 0


def most_shares(balance: BalancePolicy, ranks_per_node: int, num_ranks: int) -> int:
    """Ranks that may share an example: a power of two."""
    most = min(balance.llm.max_shares if balance.enabled else 1, ranks_per_node, num_ranks)
    return 1 << most.bit_length() - 1


@dataclass(frozen=True)
class PlanSpec:
    """What the planner knows of the model and the cluster; equal on all ranks.

    costs: phase -> cost of one item; a phase of media without one is not planned (a loader of whole
    examples has the LLM phase alone). row_bytes: phase of media -> bytes of one input row.
    feature_bytes: bytes of one feature row (LLM width in the compute dtype). group_size:
    consecutive ranks that balance among themselves; 0: all. fills: whether every rank gets an
    example in every microbatch where there are enough: beside a long example balancing may leave a
    rank without one. room: what memory leaves a rank in a microbatch, () where nothing is known.
    cut_media: encoder phases of whose media a rank's LLM may get a part (orchmllm.plan.shares).
    """

    costs: Mapping[str, CostModel]
    row_bytes: Mapping[str, int]
    feature_bytes: int
    ranks_per_node: int
    balance: BalancePolicy
    group_size: int = 0
    fills: bool = False
    room: tuple[Limit, ...] = ()
    cut_media: tuple[str, ...] = ()

    @cached_property
    def of_media(self) -> dict[str, int]:
        """Phases of media that are planned, in their fixed order -> modality."""
        return {phase: code for phase, code in OF_MEDIA.items() if phase in self.costs}

    @cached_property
    def phases(self) -> tuple[str, ...]:
        """All phases that are planned, in their fixed order."""
        return tuple(phase for phase in EVERY_PHASE if phase in self.costs)

    @cached_property
    def hard_caps(self) -> dict[str, int]:
        """Phase -> its max_rank_tokens, where it has one."""
        return {phase: cap for phase in self.phases
                if (cap := getattr(self.balance, phase).max_rank_tokens)}

    @cached_property
    def without_room(self) -> PlanSpec:
        """Without the limits of memory."""
        return replace(self, room=()) if self.room else self

    def capped(self, caps: Mapping[str, int]) -> PlanSpec:
        """With these max_rank_tokens, by phase; 0: none."""
        return replace(self, balance=replace(self.balance, **{
            phase: replace(getattr(self.balance, phase), max_rank_tokens=cap)
            for phase, cap in caps.items()}))

    def can_cap(self, phase: str) -> bool:
        """Whether a max_rank_tokens decides what ranks hold of a phase."""
        return "max_rank_tokens" in POLICIES[getattr(self.balance, phase).policy].options and (
            phase == "llm" or not self.balance.whole_examples)

    def allows(self, positions: Mapping[str, np.ndarray]) -> bool:
        """Whether ranks that hold so many positions of each phase, (d,), are below every
        max_rank_tokens and below the limits of memory."""
        return all(positions[phase].max(initial=0) <= cap
                   for phase, cap in self.hard_caps.items()) and all(
            np.max(limit.taken(positions), initial=0) <= limit.most for limit in self.room)

    def node_of(self, rank: int, num_ranks: int) -> range:
        """The ranks of its node that a rank balances with."""
        size = self.group_size or num_ranks
        first, width = rank // size * size, min(self.ranks_per_node, size)
        start = first + (rank - first) // width * width
        return range(start, min(start + width, first + size, num_ranks))

    @cached_property
    def as_sampled(self) -> PlanSpec:
        """That of the same steps unbalanced: every example stays on the rank that drew it."""
        return replace(self, fills=False, room=(), balance=replace(self.balance, enabled=False))

    @cached_property
    def digest(self) -> int:
        """64 bits over every field."""
        text = repr((sorted((k, astuple(v)) for k, v in self.costs.items()),
                     sorted(self.row_bytes.items()), self.feature_bytes, self.ranks_per_node,
                     astuple(self.balance), self.group_size, self.fills, self.cut_media,
                     [(limit.most, sorted(limit.each.items()))
                      for limit in self.room]))
        return digest64(text.encode())


def assign_phases(layout: BatchLayout, spec: PlanSpec) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(encode, llm): encode[m] (s_m,) rank of each of the phase's segments, llm (n,) rank of each
    example. By cost alone where that keeps below spec.room; else every phase is capped such that
    all of them together do. Raises ValueError for a policy or option that cannot be honoured,
    CapError where no plan below a cap or below spec.room is found."""
    found = _assigned(layout, spec)
    if not spec.room or not spec.balance.enabled or (0 < spec.group_size < layout.num_ranks):
        return found
    held = positions_of(layout, *found, spec)
    if spec.allows(held):
        return found
    caps = caps_below(spec.room, {
        phase: Share(int(lengths.sum()), int(lengths.max(initial=0))) if spec.can_cap(phase)
        else Share(0, int(held[phase].max())) for phase in spec.phases
        for lengths in [layout.item_lengths(phase)]}, layout.num_ranks)
    if caps:
        own = spec.hard_caps
        found = _assigned(layout, spec.capped({
            phase: max(min(cap, own.get(phase, cap)), 1) for phase, cap in caps.items()
            if spec.can_cap(phase)}))
    if not caps or not spec.allows(positions_of(layout, *found, spec)):
        raise CapError("no plan found in which every rank keeps below what its memory holds")
    return found


def positions_of(
    layout: BatchLayout, encode: Mapping[str, np.ndarray], llm: np.ndarray, spec: PlanSpec
) -> dict[str, np.ndarray]:
    """Phase -> (d,) positions that ranks hold, with those that they pad. encode, llm: see
    assign_phases."""
    return {phase: spec.costs[phase].positions.of_ranks(
        layout.item_lengths(phase), llm if phase == "llm" else encode[phase], layout.num_ranks)
        for phase in spec.phases}


def _assigned(layout: BatchLayout, spec: PlanSpec) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """assign_phases by cost and max_rank_tokens alone."""
    sampled = layout.rank_of_example
    owner = {m: layout.item_owner(m) for m in spec.of_media}  # (s_m,) each
    if not spec.balance.enabled:
        return {m: sampled[owner[m]] for m in owner}, sampled
    if 0 < spec.group_size < layout.num_ranks:
        groups = [(first, *assign_phases(part, inside))
                  for first, part, inside in group_layouts(layout, spec)]
        return ({m: np.concatenate([first + e[m] for first, e, _ in groups]) for m in owner},
                np.concatenate([first + llm for first, _, llm in groups]))
    if spec.balance.whole_examples:
        llm = _assign(layout, "llm", sampled, spec,
                      cost=example_costs(layout, spec).sum(axis=1))
        return {m: llm[owner[m]] for m in owner}, llm
    price = example_bytes(layout, spec.feature_bytes)
    if spec.balance.dispatch == "load":
        llm = _assign(layout, "llm", sampled, spec, move_cost=price)
        return {m: _assign(layout, m, llm[owner[m]], spec) for m in owner}, llm
    encode = {m: _assign(layout, m, sampled[owner[m]], spec) for m in owner}
    home = feature_home(layout, encode, spec.feature_bytes)
    return encode, _assign(layout, "llm", home, spec, encode, move_cost=price)


def group_layouts(
    layout: BatchLayout, spec: PlanSpec
) -> Iterator[tuple[int, BatchLayout, PlanSpec]]:
    """(first rank, layout, spec) of each group, as if there were no other."""
    size = spec.group_size
    inside = replace(spec, group_size=0, ranks_per_node=min(spec.ranks_per_node, size))
    for k, part in enumerate(layout.split_ranks(size)):
        yield k * size, part, inside


def segment_bytes(layout: BatchLayout, feature_bytes: int) -> np.ndarray:
    """(s,) bytes of each segment in the LLM's input."""
    return layout.num_tokens * np.where(layout.modality == TEXT, TEXT_BYTES, feature_bytes)


def example_pieces(
    layout: BatchLayout, encode: Mapping[str, np.ndarray] | None, feature_bytes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where each segment of the LLM's input is: (rank, example, bytes), (s,) each. Features are on
    encoder ranks (without `encode`: all on the sampling rank), text is on the sampling rank.
    encode: modality -> (segments,) encoder ranks."""
    rank = layout.rank_of_example[layout.example_of_segment]
    for phase, rank_of in (encode or {}).items():
        rank[layout.segments[OF_MEDIA[phase]]] = rank_of
    return rank, layout.example_of_segment, segment_bytes(layout, feature_bytes)


def example_bytes(layout: BatchLayout, feature_bytes: int) -> np.ndarray:
    """(n,) bytes of an example's LLM input: text-only examples are by far the cheapest to move."""
    return sums_of(segment_bytes(layout, feature_bytes), layout.segments_per_example)


def feature_home(
    layout: BatchLayout, encode: Mapping[str, np.ndarray], feature_bytes: int
) -> np.ndarray:
    """(n,) rank from which each example's LLM input is cheapest: the one that holds most of its
    feature bytes; ties go to the sampling rank, then to the lowest. Text-only: the sampling rank.
    """
    rank, example, num_bytes = example_pieces(layout, encode, feature_bytes)
    num_bytes[layout.segments[TEXT]] = 0
    return core().heaviest_holder(example, rank, num_bytes, layout.rank_of_example,
                                  layout.num_ranks)


def example_costs(layout: BatchLayout, spec: PlanSpec) -> np.ndarray:
    """(n, phases) cost of each example in each of spec.phases."""
    cost = np.zeros((layout.num_examples, len(spec.phases)), np.int64)
    for k, phase in enumerate(spec.phases):
        np.add.at(cost[:, k], layout.item_owner(phase),
                  spec.costs[phase](layout.item_lengths(phase)))
    return cost


def _assign(
    layout: BatchLayout, phase: str, home: np.ndarray, spec: PlanSpec,
    encode: Mapping[str, np.ndarray] | None = None, **given: np.ndarray,
) -> np.ndarray:
    """(n,) rank of each item by the phase's policy. home (n,): where each is. encode: of the LLM
    phase, see example_pieces. given: options of `balance`; the policy's cost by default. Those that
    the policy has no use for stay out."""
    chosen: PhasePolicy = getattr(spec.balance, phase)
    check_policy(chosen.policy)
    policy, model, lengths = POLICIES[chosen.policy], spec.costs[phase], layout.item_lengths(phase)
    options = {"cost": model(lengths), "tolerance": chosen.tolerance} | given
    if "padded_cost" in policy.options:
        options = {"cost": model.linear_part(lengths), "padded_cost": model.quadratic_part(lengths)}
    options = {name: value for name, value in options.items() if name in policy.options}
    if chosen.sets_tolerance:  # refused by balance() where the policy has none
        options["tolerance"] = chosen.tolerance
    try:
        rank_of = np.zeros(0, np.int64) if not len(lengths) else balance(
            lengths, num_ranks=layout.num_ranks, policy=chosen.policy, home=home,
            ranks_per_node=spec.ranks_per_node, max_rank_tokens=chosen.max_rank_tokens or None,
            **options)
    except CapError as e:
        raise CapError(f"balance.{phase}.{e}") from None
    if not chosen.nodewise:
        return rank_of
    if phase == "llm":
        rank, item, num_bytes = example_pieces(layout, encode, spec.feature_bytes)
    else:
        rank, item = home, np.arange(len(home))
        segments = layout.segments[OF_MEDIA[phase]]
        # With `load` features alone move, to the home, and their gradients back.
        num_bytes = (segment_bytes(layout, spec.feature_bytes) if spec.balance.dispatch == "load"
                     else layout.rows * spec.row_bytes[phase])[segments]
    return assign_nodes(rank, rank_of[item], num_bytes, num_ranks=layout.num_ranks,
                        ranks_per_node=spec.ranks_per_node)[rank_of]


def at_least(place_of: np.ndarray, lengths: np.ndarray, num_places: int, least: int,
             others: np.ndarray | int = 0) -> np.ndarray:
    """(n,) places of n items, the shortest moved from places with more than `least` items to those
    with fewer; as they are where there are less than least * num_places. others (num_places,):
    items of each place that stay where they are."""
    counts = np.bincount(place_of, minlength=num_places) + others
    if counts.sum() < least * num_places or counts.min() >= least:
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


def digest_of_arrays(arrays: Iterable[np.ndarray]) -> int:
    """64 bits over the values of int64 arrays of any shape, in their order. Each block of values is
    summed, every value times a number that belongs to its place. A cryptographic hash is taken of
    the sums only: of all values it would take longer than planning."""
    sums = []
    for array in arrays:
        words = np.ascontiguousarray(array).reshape(-1).view(np.uint64)
        for at in range(0, len(words), len(_FACTORS)):
            block = words[at: at + len(_FACTORS)]
            sums.append(np.dot(block, _FACTORS[:len(block)]))
    return digest64(np.array(sums, np.uint64).tobytes())


def digest64(data: bytes) -> int:
    digest = hashlib.blake2b(data, digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
