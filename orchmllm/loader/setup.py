"""From a loader's arguments to what the planner takes; what the log says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from orchmllm.batch import Step
from orchmllm.loader.examples import Phase, imbalances
from orchmllm.loader.source import Source
from orchmllm.plan.assign import PHASES, BalancePolicy, PhasePolicy, PlanSpec
from orchmllm.plan.balance import DEFAULT_TOLERANCE, POLICIES, check_policy
from orchmllm.plan.cost import CostModel, in_fine_unit

log = logging.getLogger("orchmllm.loader")
BY_LENGTH = CostModel(linear=1000, quadratic=0)
LITTLE = 0.01  # predicted gain under which the log says so
_NOMINAL_BYTES = 1024  # per row of a user's media and features, where only proportions matter


def check_arguments(
    source: Source, dispatch: str, lengths: Any, length_fn: Any, shard_size: int, num_ranks: int,
    accumulation_steps: int, prefetch: int,
) -> None:
    """What a BalancedDataLoader's arguments have to be for its kind of data. Raises ValueError
    naming the argument and the cure."""
    def need(ok: bool, text: str) -> None:
        if not ok:
            raise ValueError(text)

    kind = source.kind
    need(accumulation_steps >= 1, f"accumulation_steps is {accumulation_steps}: must be >= 1")
    need(prefetch >= 0, f"prefetch is {prefetch}: must be >= 0")
    need(dispatch in ("load", "bytes"),
         f"dispatch is {dispatch!r}: use 'load' or 'bytes' ('tensors' is for datasets that "
         "decode single segments, with the Trainer)")
    need((lengths is None) != (length_fn is None),
         "give either lengths or length_fn (where this call is not yours, a library makes a loader "
         "anew from a BalancedDataLoader's attributes: it has to take that loader as it is)")
    need(dispatch == "bytes" or (lengths is not None and kind != "stream"),
         "dispatch is 'load': it needs a map-style dataset and lengths by index")
    need(lengths is None or kind != "stream",
         "a stream has no indices: give length_fn instead of lengths")
    need(kind == "indices" or not source.shuffle,
         "shuffle=True: the dataset, the sampler or the wrapped loader decides the order")
    need(kind == "stream" or not source.workers["num_workers"] or source.workers["in_order"],
         "in_order is False: a batch that a worker loaded early would be taken for another one; "
         "leave it out")
    if kind == "indices":
        need(not source.shuffle or source.workers["generator"] is None,
             "generator: the loader shuffles by seed=, equal on all ranks; give the generator to a "
             "sampler of your own")
        need(isinstance(source.batch_size, int) and source.batch_size >= 1,
             f"batch_size is {source.batch_size!r}: must be an integer >= 1")
        need(len(source.dataset) > 0, "the dataset is empty")
    if lengths is not None and hasattr(lengths, "__len__"):
        need(len(lengths) == len(source.dataset), f"lengths has {len(lengths)} entries, the "
             f"dataset {len(source.dataset)} examples")
    need(not shard_size or shard_size >= num_ranks or kind == "indices",
         "shard_size: only for a map-style dataset without a sampler, whose shards end on the same "
         "step")
    if num_ranks > 1 and source.is_undistributed():
        log.warning("the sampler, a %s, gives each of the %d ranks all the data: use torch's "
                    "DistributedSampler, or no sampler", type(source.sampler).__name__, num_ranks)


def make_spec(
    phases: CostModel | Mapping[str, CostModel | Phase] | None,
    policy: str | Mapping[str, str] | None,
    tolerance: float | Mapping[str, float] | None, max_rank_tokens: int, ranks_per_node: int,
    dispatch: str, min_gain: float,
) -> tuple[PlanSpec, dict[str, Phase]]:
    """(what the planner knows, the phases whose media the loader hands out). A phase with policy
    `padded` costs its items times the longest. Raises ValueError for an unknown phase, a cost of 0
    for all items, or a policy or tolerance that cannot be honoured."""
    if not isinstance(phases, Mapping):
        phases = {"llm": phases or BY_LENGTH}
    phases = _by_phase("phases", phases, BY_LENGTH)
    policies = _by_phase("policy", policy or "least_move", "least_move")
    tolerances = _by_phase("tolerance", tolerance, None)
    if not 0.0 <= min_gain < 1.0:
        raise ValueError(f"min_gain is {min_gain}: must be in [0, 1) (0.02: 2%)")
    balance = BalancePolicy(dispatch=dispatch, min_gain=min_gain, **{
        p: _policy(policies[p], tolerances[p], max_rank_tokens if p == "llm" else 0)
        for p in PHASES})
    media = {p: v for p, v in phases.items() if isinstance(v, Phase)}
    if media and dispatch == "load":
        raise ValueError("dispatch is 'load' with media phases: a dataset of whole examples can do "
                         "that for one phase only; give length_fn and dispatch='bytes'")
    if "llm" in media:
        raise ValueError("phases['llm'] is a Phase: the LLM's cost is a CostModel; its inputs are "
                         "what collate_fn returns")
    costs = in_fine_unit(phases | {p: v.cost for p, v in media.items()})
    costs = {p: replace(c, padded=c.padded or policies[p] == "padded") for p, c in costs.items()}
    spec = PlanSpec(costs=costs, row_bytes={"vision": _NOMINAL_BYTES, "audio": _NOMINAL_BYTES},
                    feature_bytes=_NOMINAL_BYTES, ranks_per_node=ranks_per_node, balance=balance)
    return spec, media


def _by_phase(what: str, given: Any, default: Any) -> dict[str, Any]:
    """phase -> what is given for it, or for all."""
    if not isinstance(given, Mapping):
        return dict.fromkeys(PHASES, given)
    if unknown := sorted(given.keys() - set(PHASES)):
        raise ValueError(f"{what}: {unknown} are none of {', '.join(PHASES)}")
    return {p: given.get(p, default) for p in PHASES}


def _policy(name: str, tolerance: float | None, max_rank_tokens: int) -> PhasePolicy:
    check_policy(name)
    if tolerance and "tolerance" not in POLICIES[name].options:
        raise ValueError(f"tolerance is {tolerance}, but policy {name!r} has no tolerance")
    if max_rank_tokens and "max_rank_tokens" not in POLICIES[name].options:
        raise ValueError(f"max_rank_tokens: policy {name!r} has no such cap")
    return PhasePolicy(name, DEFAULT_TOLERANCE if tolerance is None else tolerance,
                       max_rank_tokens)


class StepLog:
    """What rank 0 says of the steps that a loader yields. every: steps between two lines (0: none).
    context: of the model; a length above ten times that is asked about, once (0: never)."""

    def __init__(self, rank: int, every: int, context: int) -> None:
        self._rank, self._every, self._context = rank, every, context

    def log_step(self, step: Step, epoch: int) -> None:
        """One line in a while: imbalance by phase as sampled and as planned, wait, and whether it
        pays."""
        if self._rank != 0:
            return
        if self._every and not step.index % self._every:
            phases = ", ".join(f"{p} {a:.2f}->{b:.2f}"
                               for p, (a, b) in imbalances(step.plans[0]).items())
            gain = sum(plan.predicted_gain for plan in step.plans) / len(step.plans)
            note = "" if gain >= LITTLE or not step.plans[0].spec.balance.enabled else (
                f"; balancing gains little here (under {LITTLE:.0%}: few ranks or uniform data), "
                "min_gain skips such steps")
            log.info("epoch %d step %d: imbalance %s; predicted gain %.1f%%; waited %.1f ms%s",
                     epoch, step.index, phases or "none", 100 * gain, 1e3 * step.wait_s, note)
        longest = int(step.layout.tokens_per_example.max(initial=0))
        if 0 < 10 * self._context < longest:
            log.warning("an example has length %d, more than ten times the model's context of %d: "
                        "do `lengths` count tokens? The cost of a phase grows with them",
                        longest, self._context)
            self._context = 0


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    """Raises ValueError if `state` cannot be loaded into a loader whose state is `mine`."""
    fixed = ["version", "kind", "accumulation_steps"]
    fixed += (["seed", "shuffle", "num_examples"] if mine["kind"] == "indices"
              else ["num_ranks", "rank"])
    for name in fixed:
        if state.get(name) != mine[name]:
            why = ("; the state of a sampler or a foreign loader is per rank: use as many ranks as "
                   "before, or a map-style dataset without a sampler"
                   if name in ("num_ranks", "rank") else "")
            raise ValueError(f"loader state: {name} was {state.get(name)!r}, now it is "
                             f"{mine[name]!r}{why}")
    if state["step"] and state.get("inner") is None and mine["kind"] != "indices":
        for name in ("batch_size", "num_examples"):  # states of before do not have them
            if state.get(name, mine[name]) != mine[name]:
                raise ValueError(
                    f"loader state: {name} was {state[name]}, now it is {mine[name]}, so the "
                    f"{state['step']} steps that were done had other examples: go on with "
                    f"{name} {state[name]}, or begin an epoch")
