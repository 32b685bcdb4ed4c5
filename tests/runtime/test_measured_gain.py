"""Every Nth step runs as sampled (balance.measure_every): which steps, that nothing of the result
changes, and what is made of their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchmllm.comm.exchange import RowGather
from orchmllm.config.balance import BalanceConfig, PhaseConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import RecipeError, load_recipe
from orchmllm.loader.indices import batch_layout
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.assign import PHASES, PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.gain import Gain, GainMeter, describe, spread
from orchmllm.plan.room import Limit
from orchmllm.plan.step import plan_step
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.run_memory import RunMemory
from tests.lib.gradients import Case, all_gradients, reference_gradients, worst_difference
from tests.lib.ranks import run_ranks
from tests.lib.recipes import RECIPES
from tests.lib.resume import run_recipe
from tests.lib.rows import row_problems
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.training import listened, train

MEASURED = BalanceConfig(measure_every=3, ranks_per_node=2)
EVERY = replace(MEASURED, measure_every=1)  # a recipe may not say so; the first step is measured
# As sampled the first ranks have no audio; on four the very first has nothing but text.
APART = SyntheticDataset(kinds=("T", "TT", "T", "TVT", "TVVT", "VVT", "TAT", "TVAVT", "AT", "TT",
                                "TVTAT", "AT"))


def test_gain_by_hand():
    meter = GainMeter()
    assert meter.add(4.0, 4.0, 4.0, as_sampled=True) is None  # nothing to compare it with
    assert meter.add(4.0, 3.0, 3.0, as_sampled=False) is None
    assert meter.add(6.0, 5.0, 5.0, as_sampled=False) is None
    # 10 units take 8 s balanced. As sampled 2 units took 3 s, so 10 would have taken 15.
    assert meter.add(2.0, 1.9, 3.0, as_sampled=True) == pytest.approx((1 - 8 / 10, 1 - 8 / 15))
    assert meter.add(2.0, 2.0, 3.0, as_sampled=True) is None  # what was compared does not count on
    assert spread([0.1, 0.2, 0.3, 0.4, 0.5]) == pytest.approx((0.2, 0.3, 0.4))
    assert describe([Gain(0.25, 0.2), Gain(0.35, 0.1)]) == (
        "balancing saved 30.0% (27.5 to 32.5%) as predicted, 15.0% (12.5 to 17.5%) as measured "
        "(medians and quartiles; compared with steps as sampled: 2)")


def test_every_step_as_sampled_is_refused():
    with pytest.raises(RecipeError, match=r"balance.measure_every.*no step would be balanced"):
        load_recipe(RECIPES / "demo.yaml", ["balance.measure_every=1"])


def only_as_sampled(layout, spec):
    assert not spec.balance.enabled, "this step is balanced"
    return plan_step(layout, spec)


CASES = {
    "tensors": Case(recipe(balance=EVERY), APART),
    "load, three microbatches": Case(recipe(balance=replace(EVERY, dispatch="load")), APART,
                                     accumulation_steps=3),
    "shards": Case(recipe(balance=replace(EVERY, group="shard", dispatch="bytes")), APART),
}
CASES["shards"] = replace(CASES["shards"], recipe=replace(
    CASES["shards"].recipe, fsdp=replace(CASES["shards"].recipe.fsdp, shard_size=2)))


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks, names", [
    (2, ["load, three microbatches"]), pytest.param(4, list(CASES), marks=pytest.mark.slow)])
def test_loss_and_gradients_as_sampled_are_those_of_the_plain_loop(num_ranks, names):
    """Which those of balanced steps are, too (tests/e2e/test_invariance.py)."""
    found = run_ranks(all_gradients, num_ranks, {
        name: replace(CASES[name], planner=only_as_sampled) for name in names})
    loss, gradients = reference_gradients(CASES["tensors"])
    for name in names:
        assert [rank[name][0] for rank in found] == pytest.approx([loss] * num_ranks, rel=1e-12)
        error, where = worst_difference(found[0][name][1], gradients)
        assert error <= 1e-9, f"{name}: {where} differs by {error:.1e}"


def trained(world, *runs) -> tuple[list[list[dict]], list[str]]:
    """Rows of one run after the other, and what they said."""
    said = listened()
    return [train(world, run, SyntheticDataset()) for run in runs], said


@pytest.mark.dist
def test_every_third_step_also_after_a_resume(tmp_path):
    """Six steps of two microbatches, cut in two."""
    balanced, measured = (replace(run_recipe(
        tmp_path / name, dtype="float64", every_steps=0,
        train={"num_steps": 6, "accumulation_steps": 2, "global_batch_size": 12}), balance=balance)
        for name, balance in (("balanced", replace(MEASURED, measure_every=0)),
                              ("measured", MEASURED)))
    first = replace(measured, train=replace(measured.train, num_steps=2))
    (plain, start, rest), _ = run_ranks(trained, 2, balanced, first, measured)[0]
    assert not any(row["as_sampled"] or row["measured"]["gain"] for row in plain)
    rows = start + rest
    assert [row["as_sampled"] for row in rows] == [False, False, True] * 2
    assert [row["loss"] for row in rows] == pytest.approx([r["loss"] for r in plain], 1e-12)
    for row in rows:
        moved = sum(p["moved_bytes"] for p in row["phases"].values())
        assert (moved == 0) == row["as_sampled"]
        assert row_problems({"schema": 1, **row}) == []
    assert [bool(row["measured"]["gain"]) for row in rest] == [False, False, False, True]

    def cost(row: dict, when: str) -> float:
        return sum(p[f"imbalance_{when}"] * p["mean_cost_kflop"] for p in row["phases"].values())

    def seconds(row: dict) -> float:
        return sum(row["measured"]["slowest_s"].values())

    *pair, sampled = rows[3:]
    as_sampled = sum(cost(row, "before") for row in pair)
    assert cost(sampled, "before") == cost(sampled, "after")
    assert sampled["measured"]["gain"] == pytest.approx({
        "predicted": 1 - sum(cost(row, "after") for row in pair) / as_sampled,
        "measured": 1 - sum(map(seconds, pair)) / (
            as_sampled * seconds(sampled) / cost(sampled, "before"))})
    # What a step would have cost as sampled does not depend on how it was planned.
    assert [cost(row, "before") for row in plain] == [cost(row, "before") for row in rows]


def limits(world, run) -> list[tuple[float, int]]:
    """Of each step as sampled: predicted memory of a rank in GB, and its most positions."""
    memory, found = MemoryModel.of(resolve(run, 2, 2)), []

    def note(step, row) -> None:
        if row["as_sampled"]:
            plan = step.plans[0]
            found.append((memory.peak(loads_of(plan), dict.fromkeys(PHASES, "none")) / 1e9,
                          int(plan.positions("llm").max())))

    train(world, run, SyntheticDataset(), on_step=note)
    return found


def one_refuses(world, run) -> list[bool]:
    """Whether steps ran as sampled where rank 1 alone has no room for them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunMemory, "refuses", lambda memory, plan: "no room" * (world.rank == 1))
        return [row["as_sampled"] for row in train(world, run, SyntheticDataset())]


def as_sampled(world, spec: PlanSpec, lengths: list[int]) -> tuple[int, str]:
    """Microbatches of texts on two ranks, as few as the caps allow, and why they must not run."""
    layout = batch_layout(range(len(lengths)), lengths, [len(lengths) // 2] * 2)
    micro, why = Orchestrator(spec, RowGather(1)).plan_as_sampled(layout, 0)
    return len(micro), why


ROOM = {"room": (Limit(60, {"llm": 1}),)}
SHARED = {"balance": replace(MEASURED, llm=PhaseConfig(max_rank_tokens=60, max_shares=2))}


@pytest.mark.dist
@pytest.mark.parametrize("lengths, limits, count, why", [
    ([30, 40, 20, 10], ROOM, 2, ""),
    ([50, 70, 20, 10], ROOM, 2, "a rank would hold more than its max_rank_tokens or its memory "),
    ([100, 9, 9, 9], SHARED, 0, "balance.llm.max_rank_tokens = 60 is below the 100 positions of "),
])
def test_as_many_microbatches_as_the_caps_ask_for(lengths, limits, count, why):
    """Where such a step is balanced, both ranks share the example of 100 positions."""
    spec = PlanSpec({"llm": CostModel(1, 0)}, {}, 1, 2, **{"balance": MEASURED, **limits})
    [(found, told)] = run_ranks(as_sampled, 1, spec, lengths)
    assert found == count and bool(told) == bool(why) and told.startswith(why)


@pytest.mark.dist
def test_a_step_that_one_rank_refuses_stays_balanced_on_all(tmp_path):
    run = replace(run_recipe(tmp_path, train={"num_steps": 2}, every_steps=-1),
                  balance=replace(MEASURED, measure_every=2))
    assert run_ranks(one_refuses, 2, run) == [[False, False]] * 2


@pytest.mark.dist
def test_a_step_that_would_not_fit_stays_balanced_and_is_said(tmp_path):
    run = replace(run_recipe(tmp_path, train={"num_steps": 4}, every_steps=-1),
                  balance=replace(MEASURED, measure_every=2))
    (memory, rows) = zip(*run_ranks(limits, 2, run)[0], strict=True)
    assert memory[0] != memory[1] and rows[0] != rows[1]
    small = replace(run, fsdp=replace(run.fsdp, memory_gb=sum(memory) / 2))
    capped = replace(run, balance=replace(
        run.balance, llm=PhaseConfig(max_rank_tokens=sum(rows) // 2)))
    results = run_ranks(trained, 2, small, capped)
    for found, said in results:
        for run_rows, needs in zip(found, (memory, rows), strict=True):
            assert [r["as_sampled"] for r in run_rows] == [
                False, needs[0] < needs[1], False, needs[1] < needs[0]]
        late = 2 * (memory[1] > memory[0]) + 1, 2 * (rows[1] > rows[0]) + 1
        assert [line for line in said if "not measured" in line] == [
            f"step {late[0]} is not measured as sampled: a rank is predicted to need "
            f"{max(memory):.3g} GB of {sum(memory) / 2:.3g}",
            f"step {late[1]} is not measured as sampled: a rank would hold more than its "
            "max_rank_tokens or its memory allows"]
