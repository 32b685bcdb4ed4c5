"""From a loader's arguments to what the planner takes; what the log says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from orchmllm.batch import PACKED, PADDED, Step
from orchmllm.loader.loop_gain import LoopGain, costs_of
from orchmllm.loader.loss import StepInfo
from orchmllm.loader.positions import Fit, FittedCost
from orchmllm.loader.source import Source
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import BalancePolicy, PhasePolicy, PlanSpec
from orchmllm.plan.balance import DEFAULT_TOLERANCE, POLICIES, CapError, at_least_1, check_policy
from orchmllm.plan.cost import CostModel, in_fine_unit
from orchmllm.plan.gain import describe
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan, plan_step

log = logging.getLogger("orchmllm.loader")
BY_LENGTH = CostModel(linear=1000, quadratic=0)
NO_LOSS = 1e-6  # gain below which a step stays as sampled: there is none
LITTLE = 0.01  # predicted gain under which the log says so


def check_arguments(
    source: Source, lengths: Any, length_fn: Any, shard_size: int, num_ranks: int,
    accumulation_steps: int | str, max_tokens: int, prefetch: int, seed: int,
) -> None:
    """What a BalancedDataLoader's arguments have to be for its kind of data. Raises ValueError
    naming the argument and the cure."""
    def need(ok: bool, text: str) -> None:
        if not ok:
            raise ValueError(text)

    kind = source.kind
    if accumulation_steps != "auto":
        at_least_1("accumulation_steps", accumulation_steps)
    need(accumulation_steps != "auto" or max_tokens,
         'accumulation_steps is "auto", as few batches as max_tokens allows: give max_tokens')
    need(accumulation_steps != "auto" or not shard_size or shard_size >= num_ranks,
         f'accumulation_steps is "auto" and shard_size {shard_size}: each shard would have another '
         "number of batches, and ranks would wait for each other: give a number of batches, or "
         "leave shard_size out")
    need(prefetch >= 0, f"prefetch is {prefetch}: must be >= 0")
    need(isinstance(seed, int | np.integer) and seed >= 0,
         f"seed is {seed!r}: must be an integer >= 0")
    need((lengths is None) != (length_fn is None),
         "give either lengths or length_fn (where this call is not yours, a library makes a loader "
         "anew from a BalancedDataLoader's attributes: it has to take that loader as it is)")
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
        need(len(source.dataset) > 0, "the dataset is empty")
    need(lengths is None or callable(lengths) or hasattr(lengths, "__getitem__"),
         f"lengths is a {type(lengths).__name__}: give a sequence, or a function of the index")
    if lengths is not None and hasattr(lengths, "__len__"):
        need(len(lengths) == len(source.dataset), f"lengths has {len(lengths)} entries, the "
             f"dataset {len(source.dataset)} examples")
    need(not shard_size or shard_size >= num_ranks or kind == "indices",
         "shard_size: only for a map-style dataset without a sampler, whose shards end on the same "
         "step")
    if num_ranks > 1 and source.is_undistributed():
        log.warning("the sampler, a %s, gives each of the %d ranks all the data: use torch's "
                    "DistributedSampler, or no sampler", type(source.sampler).__name__, num_ranks)


class Planning:
    """By which policy a loader's steps are planned: the one that was given, or with `auto` what
    fits the batches that all ranks saw. Until they saw one, steps stay as sampled: a plan by
    another cost than that of the batches can be slower, and need more memory.

    policy, tolerance, max_tokens: as of the loader. says: whether this rank writes to the log.
    known: the other arguments of make_spec, which raises. enabled: as of the loader, in this pass.
    geometry: PADDED once a batch of any rank was, PACKED where no batch of a whole step showed
    padding, 0 before the first step. fit: the positions of an example by its length, of which costs
    are made with `auto`. loop: what balancing gained so far, with measure_every."""

    def __init__(self, policy: str, tolerance: float | None, max_tokens: int, *, says: bool,
                 **known: Any) -> None:
        self._chooses = policy == "auto" and tolerance is None and not max_tokens
        self._says, self.enabled, self.geometry = says, True, 0
        self.fit, self.loop = Fit(), LoopGain()
        otherwise = "least_move" if policy == "auto" else policy
        first = "padded" if self._chooses else otherwise
        self._specs = {geometry: make_spec(name, tolerance, max_tokens, **known)
                       for geometry, name in ((0, first), (PACKED, otherwise), (PADDED, first))}

    @property
    def known(self) -> dict[str, Any]:
        """What was seen, for a state (JSON-able)."""
        return {"geometry": self.geometry, "positions": self.fit.knots}

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes on with what a state has of `known`."""
        self.geometry, self.fit = state["geometry"], Fit(state["positions"])

    @property
    def knows(self) -> bool:
        """Whether steps can be planned: a batch was seen, or need not be."""
        return self.geometry > 0 or not self._chooses

    @property
    def spec(self) -> PlanSpec:
        """Of the steps that are planned next."""
        spec = replace(self._specs[self.geometry], fills=True)
        if self._chooses:  # a plan that gains nothing moves nothing
            spec = replace(spec, balance=replace(
                spec.balance, min_gain=max(spec.balance.min_gain, NO_LOSS)))
        if self._chooses and not self.fit.is_length:
            cost = FittedCost(**vars(spec.costs["llm"]), knots=tuple(self.fit.knots))
            spec = replace(spec, costs={"llm": cost})
        return spec if self.enabled and self.knows else spec.as_sampled

    def look(self, orchestrator: Orchestrator, step: Step) -> None:
        """After COMMIT of a step, on all ranks alike: measures the gain, and chooses for the steps
        that follow. A policy that was given and does not fit is said once."""
        if orchestrator.spec.balance.measure_every:
            self.loop.committed(step)
        if step.kept_balanced and self._says:
            log.info("step %d is not measured as sampled: %s", step.index, step.kept_balanced)
        before, self.geometry = self.geometry, max(self.geometry, step.geometry, PACKED)
        self.fit.add(step.seen)
        step.known, orchestrator.spec = self.known, self.spec
        policy, pads = orchestrator.spec.balance.llm.policy, self.geometry == PADDED
        if self.geometry == before or not self._says or policy == "none" or not self.enabled:
            return
        if self._chooses:
            log.info("%s: steps are planned by the policy %s",
                     "collate_fn pads" if pads else "batches show no padding", policy)
        elif pads and policy != "padded":
            log.warning("collate_fn pads, so a batch costs its number of examples times the "
                        "longest, and the policy %s evens out sums of lengths: steps can take "
                        "longer than without it. Leave out policy, tolerance and max_tokens, "
                        "unless the model computes no padding", policy)
        elif step.geometry == PACKED and policy == "padded":
            log.warning("collate_fn joins examples without padding, and the policy padded plans "
                        "batches that are padded to the longest: leave out policy")


def make_spec(
    policy: str, tolerance: float | None, max_tokens: int, *, cost: CostModel | None,
    ranks_per_node: int, dispatch: str, min_gain: float, measure_every: int = 0,
) -> PlanSpec:
    """What the planner knows. With policy `padded` a rank costs its examples times the longest.
    Raises ValueError for a cost of 0 for all examples, or a policy or tolerance that cannot be
    honoured, TypeError for what is no CostModel."""
    if not isinstance(cost, CostModel | None):
        raise TypeError(f"phases is a {type(cost).__name__}: give one CostModel, the cost of an "
                        "example by its length; encoders are balanced by "
                        "orchmllm.balance_encoders(model) (docs/encoders.md)")
    check_policy(policy)
    if tolerance and "tolerance" not in POLICIES[policy].options:
        raise ValueError(f"tolerance is {tolerance}, but policy {policy!r} has no tolerance")
    if max_tokens:
        at_least_1("max_tokens", max_tokens)
    if max_tokens and "max_rank_tokens" not in POLICIES[policy].options:
        raise ValueError(f"max_tokens: policy {policy!r} has no such cap")
    if not 0.0 <= min_gain < 1.0:
        raise ValueError(f"min_gain is {min_gain}: must be in [0, 1) (0.02: 2%)")
    if measure_every < 0 or measure_every == 1:
        raise ValueError(f"measure_every is {measure_every}: must be 0 (never) or at least 2, so "
                         "that there are balanced steps to compare with")
    cost = cost or BY_LENGTH
    costs = in_fine_unit({"llm": replace(cost, padded=cost.padded or policy == "padded")})
    llm = PhasePolicy(policy, DEFAULT_TOLERANCE if tolerance is None else tolerance,
                      max_tokens)
    return PlanSpec(costs=costs, row_bytes={}, feature_bytes=0, ranks_per_node=ranks_per_node,
                    balance=BalancePolicy(dispatch=dispatch, min_gain=min_gain,
                                          measure_every=measure_every, llm=llm))


def plan_batch(layout: BatchLayout, spec: PlanSpec) -> StepPlan:
    """plan_step for a loader's batches. Raises CapError in the loader's terms."""
    try:
        return plan_step(layout, spec)
    except CapError as error:
        raise CapError(
            f"max_tokens = {spec.balance.llm.max_rank_tokens}: no plan was found for "
            f"{layout.tokens_per_example.sum()} tokens in a batch of {layout.num_ranks} ranks: "
            'raise max_tokens, or accumulation_steps ("auto": as many as needed)') from error


def log_step(step: Step, info: StepInfo, loop: LoopGain) -> None:
    """One line: imbalance as sampled and as planned, wait, and whether it pays. info: of the step's
    first batch. loop: what was measured so far."""
    before, after = costs_of(step)
    gain = 1 - after / before if before else 0.0
    note = "" if gain >= LITTLE or not step.plans[0].spec.balance.enabled else (
        f"; this step gains little (under {LITTLE:.0%}: few ranks or uniform data), min_gain "
        "leaves such steps as sampled")
    if loop.gains:
        note += f"; {describe(loop.gains)}"
    log.info("epoch %d step %d: imbalance %.2f->%.2f; predicted gain %.1f%%; waited %.1f ms%s",
             info.epoch, info.step, *info.imbalance, 100 * gain, 1e3 * info.wait_s, note)


def warn_of_copies(step: Step) -> None:
    """Where each rank drew examples of the same lengths, of a stream: as a rule the same ones."""
    layout = step.layout
    first, *others = np.split(layout.tokens_per_example, np.cumsum(layout.examples_per_rank)[:-1])
    if others and len(np.unique(first)) > 1 and all(np.array_equal(first, d) for d in others):
        log.warning("all %d ranks drew examples of the same lengths from their streams: a stream "
                    "has to yield each rank's own part, as by datasets' split_dataset_by_node "
                    "(accelerate's prepare does not split it)", layout.num_ranks)


def check_state(state: Mapping[str, Any], mine: Mapping[str, Any], own_key: str) -> None:
    """Raises ValueError if `state` cannot be loaded into a loader whose state is `mine`. own_key:
    under which a state per rank has this rank's part."""
    indices = mine["kind"] == "indices"
    fixed = ["version", "kind", "accumulation_steps"]
    fixed += ["seed", "shuffle", "num_examples"] if indices else ["num_ranks"]
    why = ("; with a sampler or a stream use as many ranks as before, and the state of the same "
           "rank, or use a map-style dataset without a sampler")
    for name in fixed:
        if state.get(name) != mine[name]:
            raise ValueError(f"loader state: {name} was {state.get(name)!r}, now it is "
                             f"{mine[name]!r}{why if name == 'num_ranks' else ''}")
    if own_key in mine and own_key not in state:
        raise ValueError(f"loader state: it has no {own_key!r}, so it is of another rank{why}")
    if missing := sorted(mine.keys() - state.keys() - {"num_workers"}):
        raise ValueError(f"loader state: it has no {', '.join(missing)}, so it is not whole, or "
                         "older than 0.1.0: begin without a state")
    if not state["step"] or (state["global_batch_size"] == mine["global_batch_size"] if indices
                             else state.get(own_key, (None,))[0] is not None):
        return
    for name in ("batch_size", "num_examples", "num_workers"):
        if name in state and name in mine and state[name] != mine[name]:
            raise ValueError(
                f"loader state: {name} was {state[name]}, now it is {mine[name]}, so the "
                f"{state['step']} steps that were done had other examples: go on with "
                f"{name} {state[name]}, or begin an epoch")
