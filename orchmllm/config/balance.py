"""Section of a recipe on which rank processes what."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from orchmllm.config.schema import Conflict, key, section
from orchmllm.plan.assign import DISPATCHES, BalancePolicy, PhasePolicy
from orchmllm.plan.balance import DEFAULT_TOLERANCE, POLICIES
from orchmllm.plan.layout import OF_MEDIA


@dataclass(frozen=True)
class PhaseConfig(PhasePolicy):
    """How one phase is balanced."""

    policy: str = key("least_move", "The algorithm that chooses the ranks (docs/balancing.md).",
                      choices=tuple(POLICIES))
    tolerance: float = key(DEFAULT_TOLERANCE, "By how much the largest load may exceed its lower "
                           "bound, for policies that trade balance for movement (0.001: 0.1%). A "
                           "value between 0.001, 0.002, 0.005, 0.01, ... counts as the lower.",
                           at_least=0, at_most=1)
    max_rank_tokens: int = key(
        0, "Most positions of a rank, to bound its activation memory; 0: no limit.", at_least=0)
    nodewise: bool = key(False, "Permute the finished batches over the ranks to spare the network "
                         "between nodes (OrchMLLM Algorithm 3).")
    max_shares: int = key(
        1, "Of balance.llm alone: 2, 4, 8, ... ranks of a node may share an example that is too "
        "heavy or too long for one of them (docs/long_examples.md); 1: none does.", at_least=1)

    def conflicts(self) -> Iterator[Conflict]:
        """A key that the policy would ignore is refused."""
        chosen = POLICIES[self.policy]
        if self.sets_tolerance and "tolerance" not in chosen.options:
            yield Conflict(("tolerance", "policy"),
                           f"policy {self.policy!r} has no tolerance: leave it out")
        if self.max_rank_tokens and "max_rank_tokens" not in chosen.options:
            yield Conflict(("max_rank_tokens", "policy"),
                           f"policy {self.policy!r} has no token cap: set it to 0")
        if self.nodewise and not chosen.node_blind:
            yield Conflict(("nodewise", "policy"),
                           f"policy {self.policy!r} knows nodes already: set it to false")
        if self.max_shares & (self.max_shares - 1):
            yield Conflict(("max_shares",), "examples are halved, and halved again: use a power "
                           "of two")
        if self.max_shares > 1 and "held" not in chosen.options:
            yield Conflict(("max_shares", "policy"),
                           f"policy {self.policy!r} cannot balance around pieces of examples: "
                           "set it to 1, or the policy to least_move")


@dataclass(frozen=True)
class BalanceConfig(BalancePolicy):
    """Which rank processes what, phase by phase."""

    enabled: bool = key(True, "false: every step runs as sampled (policy `none` everywhere).")
    dispatch: str = key("tensors", "How inputs reach the rank that processes them: `tensors` moves "
                        "decoded rows by all-to-all; `bytes` moves encoded media, which that rank "
                        "decodes; `load` lets each rank read what it processes.",
                        choices=DISPATCHES)
    group: str = key("world", "Ranks that balance with each other: all, or those of a shard "
                     "(fsdp.shard_size).", choices=("world", "shard"))
    min_gain: float = key(
        0.0, "Steps that balancing is predicted to shorten by less run as sampled (0.02: 2%).",
        at_least=0, below=1)
    measure_every: int = key(0, "Every Nth step runs as sampled, so that the gain of balancing is "
                             "measured (docs/report.md); 0: none does.", at_least=0)
    ranks_per_node: int = key(0, "Ranks that share a node; 0 takes the launcher's "
                              "LOCAL_WORLD_SIZE.", at_least=0)
    whole_examples: bool = key(False, "A baseline: whole examples move, by the total cost of their "
                               "phases and the LLM's policy, as with balancing before sampling.")
    vision: PhaseConfig = section(PhaseConfig)
    audio: PhaseConfig = section(PhaseConfig)
    llm: PhaseConfig = section(PhaseConfig)
    generator: PhaseConfig = section(PhaseConfig)

    def conflicts(self) -> Iterator[Conflict]:
        """balance.measure_every leaves balanced steps; the LLM's examples alone are shared;
        balance.llm.nodewise is not for `load`."""
        if self.measure_every == 1:
            yield Conflict(("measure_every",), "no step would be balanced: set it to 2 or more, or "
                           "set balance.enabled to false")
        for phase in OF_MEDIA:
            if getattr(self, phase).max_shares > 1:
                yield Conflict((f"{phase}.max_shares",), "ranks share examples of the LLM alone: "
                               "set balance.llm.max_shares")
        if self.llm.max_shares > 1 and self.whole_examples:
            yield Conflict(("llm.max_shares", "whole_examples"),
                           "whole examples are not shared: set one of them to its default")
        if self.dispatch == "load" and self.llm.nodewise:
            yield Conflict(
                ("llm.nodewise", "dispatch"), "every rank reads the texts that it takes, so "
                "nothing moves that it could spare: set it to false")
