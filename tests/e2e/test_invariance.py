"""Consequence invariance (OrchMLLM section 5.1): whatever rank an item is processed on, loss and
gradients are those of the plain loop over examples. float64, so that nothing hides in rounding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PhasePolicy
from orchmllm.plan.balance import POLICIES
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.rearrange import Rearrangement
from orchmllm.plan.step import plan_step
from tests.lib.drawn import model_of
from tests.lib.gradients import (
    BATCH,
    FEW_MEDIA,
    Case,
    RandomPlanner,
    all_gradients,
    reference_gradients,
    worst_difference,
)
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen
from tests.lib.synthetic import SyntheticDataset, recipe

pytestmark = pytest.mark.dist
OFF = BalanceConfig(enabled=False)


def balanced(policy: str = "greedy", dispatch: str = "tensors") -> BalanceConfig:
    phase = PhasePolicy(policy)
    return BalanceConfig(dispatch=dispatch, ranks_per_node=2, vision=phase, audio=phase, llm=phase)


CAPPED = replace(balanced("least_move"), llm=PhasePolicy(max_rank_tokens=80))
PLAIN = {
    "off": Case(recipe(balance=OFF)),
    **{f"{policy}/{dispatch}": Case(recipe(balance=balanced(policy, dispatch)))
       for policy in POLICIES for dispatch in ("tensors", "load")},
    "random": Case(recipe(balance=balanced()), planner=RandomPlanner(1)),
    "random/accumulate3": Case(recipe(balance=balanced()), planner=RandomPlanner(2),
                               accumulation_steps=3),
    "accumulate3": Case(recipe(balance=balanced()), accumulation_steps=3),
    "off/accumulate3": Case(recipe(balance=OFF), accumulation_steps=3),
    # Several microbatches on any number of ranks, of unequal numbers of examples.
    "auto": Case(recipe(balance=CAPPED), accumulation_steps=0),
    "off/auto": Case(recipe(balance=replace(CAPPED, enabled=False)), accumulation_steps=0),
    "checkpointed": Case(recipe(balance=balanced(), fsdp=FsdpConfig(
        param_dtype="float64", activation_checkpointing="full"))),
}
ROUTED = {  # four ranks, two nodes
    "bytes": Case(recipe(balance=replace(balanced(), dispatch="bytes"))),
    "within shards": Case(recipe(balance=replace(balanced(), group="shard"))),
    "within shards, accumulated, load": Case(recipe(balance=replace(
        balanced("least_move", "load"), group="shard")), accumulation_steps=3),
    "gains too little": Case(recipe(balance=replace(balanced(), min_gain=0.9))),
}
# Examples 0-3 are the first rank's with three ranks, 0-2 with four.
UNSUPERVISED = SyntheticDataset(unlabelled=frozenset(range(6)))
NO_TARGETS = SyntheticDataset(unlabelled=frozenset(range(24)))
SPECIAL = {
    "a rank without targets": Case(recipe(balance=OFF), dataset=UNSUPERVISED),
    "a rank without targets, balanced": Case(recipe(balance=balanced()), dataset=UNSUPERVISED),
    "no targets at all": Case(recipe(balance=balanced()), dataset=NO_TARGETS),
    "frozen encoders": Case(recipe(balance=balanced(), model=frozen("vision", "audio"))),
    "frozen LLM": Case(recipe(balance=balanced(), model=frozen("llm"))),
    "connectors alone": Case(recipe(balance=balanced(), model=frozen("vision", "audio", "llm"))),
    "vision alone": Case(recipe(balance=balanced(), model=frozen("audio", "connector", "llm"))),
    "LLM alone": Case(recipe(balance=balanced(), model=frozen("vision", "audio", "connector"))),
    "LLM alone, off": Case(recipe(balance=OFF, model=frozen("vision", "audio", "connector"))),
    **{f"{name}, ranks without media": Case(recipe(balance=OFF, model=frozen(*parts)),
                                            dataset=FEW_MEDIA)
       for name, parts in (("connectors alone", ("vision", "audio", "llm")),
                           ("vision alone", ("audio", "connector", "llm")),
                           ("frozen encoders", ("vision", "audio")))},
}


@pytest.fixture(scope="module")
def references():
    cache = {}

    def reference(case: Case):
        key = (case.recipe.model, case.dataset.unlabelled, *case.dataset.kinds)
        if key not in cache:
            cache[key] = reference_gradients(case)
        return cache[key]

    return reference


def check(cases: dict[str, Case], num_ranks: int, references, bar: float = 1e-9) -> None:
    results = run_ranks(all_gradients, num_ranks, cases)
    for name, case in cases.items():
        loss, grads = references(case)
        for rank in range(num_ranks):
            assert results[rank][name][0] == pytest.approx(loss, rel=1e-12), (name, rank)
        error, where = worst_difference(results[0][name][1], grads)
        assert error <= bar, f"{name} on {num_ranks} ranks: {where} differs by {error:.1e}"


def of_layers(num_layers: int, case: Case) -> Case:
    """The case with a model of so many layers in each part."""
    model = replace(case.recipe.model, config=model_of(num_layers=num_layers).config)
    return replace(case, recipe=replace(case.recipe, model=model))


ALL = {**PLAIN, **SPECIAL}
# Nothing moves on one rank, so that policies are the same there.
ON_ONE = {"greedy/load", "auto", "LLM alone"}
ON_TWO = {"off", "greedy/tensors", "padded/load", "conv_transformer/tensors", "random",
          "accumulate3", "auto", "off/auto", "checkpointed", "a rank without targets, balanced",
          "no targets at all", "frozen encoders", "frozen LLM", "LLM alone"}
ON_FOUR = {"none/load", "quadratic/tensors", "least_move/load", "random/accumulate3", "auto",
           "a rank without targets"}


# Each policy once, fast; layers after layers there in a few cases.
@pytest.mark.parametrize("num_ranks, deep, names", [
    (1, set(), ON_ONE), (2, {"checkpointed", "greedy/tensors", "off"}, ON_TWO), (4, set(), ON_FOUR),
    *(pytest.param(n, ALL.keys(), ALL.keys(), marks=pytest.mark.slow) for n in (1, 2, 3, 4))],
    ids=["1", "2", "4", "1, all", "2, all", "3, all", "4, all"])
def test_gradients_equal_the_plain_loop(num_ranks, deep, names, references):
    check({name: of_layers(1 + (name in deep), ALL[name]) for name in sorted(names)}, num_ranks,
          references)


@pytest.mark.slow
def test_gradients_under_hybrid_sharding(references):
    hsdp = {name: replace(case, recipe=replace(case.recipe, fsdp=replace(
        case.recipe.fsdp, shard_size=2))) for name, case in {**ALL, **ROUTED}.items()
        if "/" not in name or name.split("/")[0] not in POLICIES or name == "least_move/load"}
    check(hsdp, 4, references)


# One example is longer than four others together, so that microbatches have very unequal numbers.
ONE_LONG = SyntheticDataset(kinds=[*["T"] * 9, "TVVVVVTAT", "TAT", "VAT"], size=BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, shard_size", [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2)])
def test_unequal_microbatches_under_a_cap_with_frozen_parts(num_ranks, shard_size, references):
    """Some of more than two ranks have no example in some microbatch."""
    microbatches = 3 if num_ranks < 3 else 5
    llm = PhasePolicy("least_move", max_rank_tokens=145)
    cases = {}
    for group in ("world", "shard") if shard_size else ("world",):
        capped = recipe(balance=replace(balanced(), llm=llm, group=group))
        for parts in ((), ("vision", "audio"), ("llm",)):
            cases[f"{group}, {parts} frozen"] = Case(replace(
                capped, model=frozen(*parts), fsdp=replace(capped.fsdp, shard_size=shard_size)),
                dataset=ONE_LONG, accumulation_steps=microbatches)
    layout = BatchLayout.concat([ONE_LONG.layout(i) for i in range(BATCH)],
                                [BATCH // num_ranks] * num_ranks)
    spec = plan_spec(resolve(capped, num_ranks, 2))
    sizes = [plan.llm.target_sizes for _, plan in plan_microbatches(
        layout, spec, microbatches)]
    assert len({*map(sum, sizes)}) > 1 and (0 in np.concatenate(sizes)) == (num_ranks > 2)
    check(cases, num_ranks, references, bar=1e-12)


# The same test has to fail when something is wrong.


def mean_per_rank(trainer) -> None:
    forward = trainer.model.forward

    def mean(batch):
        counts = trainer._gather([len(batch.targets)])
        return forward(batch) / max(len(batch.targets), 1) * counts.sum() / len(counts)

    trainer.model.forward = mean


def lose_a_feature_row(trainer) -> None:
    def lose(module, args, out):
        keep = out.new_ones(len(out), 1)
        keep[:1] = 0.0
        return out * keep

    trainer.model.hf.model.vision_projector.register_forward_hook(lose)


def swapping_planner(layout, spec):
    """plan_step with two images of equal size swapped on the way to the LLM."""
    plan = plan_step(layout, spec)
    move = plan.feature["vision"]
    tokens = layout.num_tokens[layout.segments[1]][plan.encode["vision"].order][move.order]
    for i in range(len(tokens)):
        for j in range(i + 1, len(tokens)):
            if tokens[i] == tokens[j]:
                order = move.order.copy()
                order[[i, j]] = order[[j, i]]
                swapped = Rearrangement(order, move.source_sizes, move.target_sizes)
                return replace(plan, feature={**plan.feature, "vision": swapped})
    raise AssertionError("no two images of equal size in the batch")


def test_the_comparison_notices(references):
    run = recipe(balance=balanced())
    broken = {"mean per rank": Case(run, mutate=mean_per_rank),
              "lost feature row": Case(run, mutate=lose_a_feature_row),
              "swapped segment": Case(run, planner=swapping_planner)}
    found = run_ranks(all_gradients, 2, broken)[0]
    for name, case in broken.items():
        error, _ = worst_difference(found[name][1], references(case)[1])
        assert error > 1e-4, name
