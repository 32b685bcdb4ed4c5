"""The microbatches of a step: shorter together than alike, below every cap, alike for all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchmllm.config.balance import BalanceConfig
from orchmllm.loader.indices import batch_layout
from orchmllm.plan import microbatches
from orchmllm.plan.assign import PhasePolicy, PlanSpec, example_costs
from orchmllm.plan.balance import assign_microbatches as alike
from orchmllm.plan.balance import core
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.microbatches import MOST_PLANNED, assign_microbatches
from orchmllm.plan.step import imbalance, plan_step
from orchmllm.tools.predict.workload import sample_layout
from tests.plan.test_balance_properties import thorough
from tests.plan.test_plan_schemes import LAYOUT, every_phase, spec
from tests.twins import core as reference

BALANCED = spec(**every_phase("least_move"))


def planned(
    layout: BatchLayout, micro: np.ndarray, inside: PlanSpec, count: int
) -> tuple[np.ndarray, int]:
    """((count * phases, d) costs of the ranks, most LLM positions of a rank) as planned."""
    plans = [plan_step(layout.select(micro == k), inside) for k in range(count)]
    costs = [plan.planned_cost(phase) for plan in plans for phase in inside.phases]
    return np.array(costs), max(int(plan.positions("llm").max()) for plan in plans)


def with_long_texts(tail: float) -> BatchLayout:
    """Texts, a part of which is lognormal up to 32k positions."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.5, 0.6, 128)
    long = rng.random(128) < 0.15
    lengths[long] = np.minimum(rng.lognormal(8.5, tail, long.sum()), 32_000)
    return batch_layout(range(128), lengths.astype(int) + 1, [16] * 8)


@pytest.mark.parametrize("cap", [0, 32_001])
@pytest.mark.parametrize("tail", [1.2, 9.0])
def test_long_examples_wait_together(tail: float, cap: int) -> None:
    """Also where most of them were truncated and are equally long."""
    layout = with_long_texts(tail)
    inside = replace(BALANCED, costs={"llm": BALANCED.costs["llm"]}, balance=BalanceConfig(
        llm=PhasePolicy(max_rank_tokens=cap)))
    micro, capped = assign_microbatches(layout, inside, 4)
    costs, held = planned(layout, micro, capped, 4)
    before, held_before = planned(layout, alike(example_costs(layout, inside), 4), inside, 4)
    assert imbalance(costs) - 1 <= 0.5 * (imbalance(before) - 1) and imbalance(before) > 1.5
    longest, even = layout.tokens_per_example.max(), layout.tokens_per_example.sum() / 32
    assert capped.balance.llm.max_rank_tokens == (cap or max(longest, int(1.1 * even)))
    assert held <= max(held_before, capped.balance.llm.max_rank_tokens)


@thorough
@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 2), st.booleans(),
       st.integers(0, 2**32))
def test_shortening_a_step(count: int, phases: int, least: int, cut: bool, seed: int) -> None:
    """The core does what its twin does, and it never overfills a microbatch nor empties one."""
    rng = np.random.default_rng(seed)
    n, sizes = int(rng.integers(0, 12)), int(rng.integers(0, 3))
    cost = rng.integers(0, 100, (n, phases)) ** rng.integers(1, 3, (n, phases))
    longest = cost // rng.integers(1, 3, (n, phases))
    size, room = rng.integers(0, 50, (n, sizes)), rng.integers(0, 300, sizes)
    micro = rng.integers(0, count, n)
    rest = {"num_ranks": 3, "num_microbatches": count, "least": least, "cut": cut}
    got, time = core().shorten_step(cost.ravel(), longest.ravel(), size.ravel(), room, micro,
                                    **rest)
    want, expected = reference.shorten_step(cost, longest, size, room, micro, **rest)
    assert time == expected == reference.step_time(cost, longest, got, 3, count)
    if not cut:  # cuts that are equally good are chosen in other orders
        np.testing.assert_array_equal(got, want)
        assert time <= reference.step_time(cost, longest, micro, 3, count)
    for k in range(count):
        held, had = (size[plan == k].sum(axis=0) for plan in (got, micro))
        assert (held <= np.maximum(room, had)).all()
        assert (got == k).sum() >= min((micro == k).sum(), max(least, 1))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("largest", [2**22, 2**57])
def test_of_many_examples_the_longest_move(largest: int, cut: bool) -> None:
    """More than the core looks at one by one, and costs whose sums need more than 64 bits."""
    rng = np.random.default_rng(0)
    cost = rng.integers(1, 1000, (6000, 2)) * (largest >> 22)
    cost[:6, 0] = largest  # each in another microbatch
    micro = np.arange(6000) % 8
    nothing = np.zeros(0, np.int64)
    got, _ = core().shorten_step(cost.ravel(), cost.ravel(), nothing, nothing, micro, 16, 8, 1, cut)
    before, after = (reference.step_time(cost >> 10, cost >> 10, plan, 16, 8)
                     for plan in (micro, got))
    assert after <= 0.3 * before and np.bincount(got, minlength=8).min() > 0


def layouts() -> Iterator[tuple[BatchLayout, int]]:
    rng = np.random.default_rng(7)
    for _ in range(12):
        ranks, count = int(rng.integers(1, 9)), int(rng.integers(2, 6))
        yield sample_layout("10b", num_ranks=ranks, batch_size=int(rng.integers(1, 4)) * count,
                            seed=int(rng.integers(99)), mix=str(rng.choice(["natural", "omni"]))
                            ), count


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("group_size", [0, 2])
def test_a_step_is_never_longer_than_with_microbatches_that_are_alike(
    group_size: int, fills: bool
) -> None:
    inside = replace(BALANCED, fills=fills, group_size=group_size)
    for layout, count in layouts():
        micro, capped = assign_microbatches(layout, inside, count)
        assert len(micro) == layout.num_examples and 0 <= micro.min() <= micro.max() < count
        if fills:
            if layout.num_examples >= count * layout.num_ranks:
                assert np.bincount(micro, minlength=count).min() >= layout.num_ranks
            continue
        costs, _ = planned(layout, micro, capped, count)
        parts = layout.split_ranks(group_size or layout.num_ranks)
        before, _ = planned(layout, np.concatenate([
            alike(example_costs(part, inside), count) for part in parts]), inside, count)
        assert costs.max(axis=1).sum() <= before.max(axis=1).sum()


def test_a_large_step_is_not_planned_twice() -> None:
    layout = sample_layout("10b", num_ranks=256, batch_size=80, seed=0, mix="omni")
    assert layout.num_examples > MOST_PLANNED
    micro, inside = assign_microbatches(layout, BALANCED, 8)
    costs, _ = planned(layout, micro, inside, 8)
    before, _ = planned(layout, alike(example_costs(layout, BALANCED), 8), BALANCED, 8)
    assert inside is BALANCED and imbalance(costs) <= imbalance(before)


def test_caps_without_a_plan_leave_microbatches_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap that the recipe does not name is never the reason why a step has no plan."""
    monkeypatch.setattr(microbatches, "USUAL", 0.0)
    texts = batch_layout(range(12), [100] * 11 + [130], [6, 6])
    micro, inside = assign_microbatches(texts, BALANCED, 2)
    assert inside is BALANCED
    np.testing.assert_array_equal(micro, alike(example_costs(texts, BALANCED), 2))


def test_without_balancing_every_rank_keeps_its_order() -> None:
    off = replace(BALANCED, balance=BalanceConfig(enabled=False))
    micro, _ = assign_microbatches(LAYOUT, off, 3)
    assert np.bincount(micro).tolist() == [320, 320, 320]
    assert (np.diff(micro.reshape(32, 30)) >= 0).all()
