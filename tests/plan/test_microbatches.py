"""The microbatches of a step: shorter together than alike, below every cap, alike for all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchmllm.config.balance import BalanceConfig
from orchmllm.loader.indices import batch_layout
from orchmllm.loader.positions import FittedCost
from orchmllm.papers.mixes import MODELS
from orchmllm.plan import divisions, microbatches
from orchmllm.plan.assign import PHASES, PhasePolicy, PlanSpec, example_costs
from orchmllm.plan.balance import assign_microbatches as alike
from orchmllm.plan.balance import core
from orchmllm.plan.cost import CostModel
from orchmllm.plan.divisions import MOST_PLANNED
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.plan.layout import VISION, BatchLayout
from orchmllm.plan.microbatches import assert_invariants, plan_microbatches
from orchmllm.plan.room import Limit, Share, caps_below
from orchmllm.plan.step import StepPlan, imbalance, plan_step, sampled_costs
from orchmllm.tools.predict.workload import sample_layout
from tests.lib.recipes import small_spec
from tests.plan.test_balance_properties import thorough
from tests.plan.test_plan_schemes import LAYOUT, every_phase, spec
from tests.twins import core as reference

BALANCED = spec(**every_phase("least_move"))


def planned(layout: BatchLayout, inside: PlanSpec, count: int) -> list[StepPlan]:
    """The microbatches of a step, checked."""
    plans = plan_microbatches(layout, inside, count)
    assert_invariants(layout, plans, inside)
    assert len(plans) == count or not count
    return [plan for _, plan in plans]


def planned_alike(layout: BatchLayout, inside: PlanSpec, count: int) -> list[StepPlan]:
    """Microbatches that are alike, each balanced alone."""
    micro = alike(example_costs(layout, inside), count)
    return [plan_step(layout.select(micro == k), inside) for k in range(count)]


def costs_of(plans: Sequence[StepPlan]) -> np.ndarray:
    """(microbatches * phases, d) costs of the ranks."""
    return np.array([plan.planned_cost(phase) for plan in plans for phase in plan.spec.phases])


def time_of(plans: Sequence[StepPlan]) -> int:
    return int(costs_of(plans).max(axis=1).sum())


def bound_of(plans: Sequence[StepPlan]) -> float:
    """Of each microbatch and phase the mean rank or the longest item."""
    items = [plan.spec.costs[phase](plan.layout.item_lengths(phase)).max(initial=0)
             for plan in plans for phase in plan.spec.phases]
    return float(np.maximum(costs_of(plans).mean(axis=1), items).sum())


def fullest(plans: Sequence[StepPlan], phase: str = "llm") -> int:
    """Most positions of a rank."""
    return max(int(plan.positions(phase).max(initial=0)) for plan in plans)


def with_long_texts(tail: float) -> BatchLayout:
    """Texts, a part of which is lognormal up to 32k positions."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(6.5, 0.6, 128)
    long = rng.random(128) < 0.15
    lengths[long] = np.minimum(rng.lognormal(8.5, tail, long.sum()), 32_000)
    return batch_layout(range(128), lengths.astype(int) + 1, [16] * 8)


def test_a_step_as_sampled_is_cut_in_order():
    """The larger half of each rank's examples comes first."""
    layout = batch_layout(range(6), [10, 20, 30, 40, 50, 60], [3, 3])
    sizes = [[[10, 20], [40, 50]], [[30], [60]]]
    cost = BALANCED.costs["llm"]
    want = [[cost(np.array(rank)).sum() for rank in micro] for micro in sizes]
    assert np.array_equal(sampled_costs(layout, BALANCED, "llm", 2), want)


@pytest.mark.parametrize("cap", [0, 32_001])
@pytest.mark.parametrize("tail", [1.2, 9.0])
def test_long_examples_wait_together(tail: float, cap: int) -> None:
    """Also where most of them were truncated and are equally long."""
    layout = with_long_texts(tail)
    inside = replace(BALANCED, costs={"llm": BALANCED.costs["llm"]}, balance=BalanceConfig(
        llm=PhasePolicy(max_rank_tokens=cap)))
    plans, before = planned(layout, inside, 4), planned_alike(layout, inside, 4)
    waits, waited = imbalance(costs_of(plans)), imbalance(costs_of(before))
    assert waits - 1 <= 0.5 * (waited - 1) and waited > 1.5
    longest, even = layout.tokens_per_example.max(), layout.tokens_per_example.sum() / 32
    assert {plan.spec.balance.llm.max_rank_tokens for plan in plans} == {
        cap or max(longest, int(1.1 * even))}


def test_a_cost_with_its_own_formula_divides_a_step_as_it_balances_it() -> None:
    """Lengths in characters, of which four make a position (orchmllm.loader.positions)."""
    texts = with_long_texts(1.2)
    characters = batch_layout(range(128), 4 * texts.tokens_per_example, [16] * 8)
    cost = CostModel(24_576_000, 1000)
    fitted = FittedCost(**vars(cost), knots=((4, 1), (400_000, 100_000)))
    got, want = ([time_of(planned(layout, replace(BALANCED, costs={"llm": model}), 4))]
                 for layout, model in ((characters, fitted), (texts, cost)))
    assert got == want


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
    assert time == expected / 3 == reference.step_time(cost, longest, got, 3, count) / 3
    if not cut:  # cuts that are equally good are chosen in other orders
        np.testing.assert_array_equal(got, want)
        assert expected <= reference.step_time(cost, longest, micro, 3, count)
    for k in range(count):
        held, had = (size[plan == k].sum(axis=0) for plan in (got, micro))
        assert (held <= np.maximum(room, had)).all()
        assert (got == k).sum() >= min((micro == k).sum(), max(least, 1))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("largest, ranks", [(2**22, 16), (2**57, 16), (2**50, 2**14)])
def test_of_many_examples_the_longest_move(largest: int, ranks: int, cut: bool) -> None:
    """More than the core looks at one by one, and costs whose sums, or what all ranks wait for,
    need more than 64 bits."""
    rng = np.random.default_rng(0)
    cost = rng.integers(1, 1000, (6000, 2)) * (largest >> 22)
    cost[:6, 0] = largest  # each in another microbatch
    micro = np.arange(6000) % 8
    nothing = np.zeros(0, np.int64)
    got, _ = core().shorten_step(cost.ravel(), cost.ravel(), nothing, nothing, micro, ranks, 8, 1,
                                 cut)
    before, after = (reference.step_time(cost >> 10, cost >> 10, plan, ranks, 8)
                     for plan in (micro, got))
    assert after <= 0.3 * before and np.bincount(got, minlength=8).min() > 0


def test_the_times_of_many_microbatches_are_added_up_without_overflow() -> None:
    """The longest item of each takes 2**60 on all ranks together."""
    cost, nothing = np.full(16, 2**50), np.zeros(0, np.int64)
    _, time = core().shorten_step(
        cost, cost, nothing, nothing, np.arange(16), 2**10, 16, 1, False)
    assert time == cost.sum()


@thorough
@given(st.integers(0, 3), st.integers(0, 2**32))
def test_tables_of_examples(phases: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    segments_of = rng.integers(0, 4, rng.integers(0, 8))
    modality, length, tokens = rng.integers(0, [[3], [2000], [2000]], (3, segments_of.sum()))
    columns = rng.integers([0, 0, 0, 0, 1, 0], [3, 50, 10**6, 10**6, 2000, 900], (phases, 6))
    args = modality, length, tokens, segments_of, columns, len(segments_of) + 2
    np.testing.assert_array_equal(np.array(core().example_tables(*args)),
                                  reference.example_tables(*args))


@pytest.mark.parametrize("length, says", [(2**31, "its cost overflows"), (-1, "a length is -1")])
def test_tables_of_lengths_that_cannot_be(length: int, says: str) -> None:
    columns = np.array([[1, 0, 2**31, 2**3, 1000, 0]])
    one = np.ones(1, np.int64)
    core().example_tables(one, one * 2**29, one, one, columns, 1)
    with pytest.raises(ValueError, match=says):
        core().example_tables(one, one * length, one, one, columns, 1)


def test_tables_of_costs_in_any_unit() -> None:
    columns = np.array([[0, 0, 3 * 10**12, 0, 10**10, 0]])
    one = np.ones(1, np.int64)
    assert core().example_tables(one * 0, one, one, one, columns, 1)[0].tolist() == [[300]]


def layouts() -> Iterator[tuple[BatchLayout, int]]:
    rng = np.random.default_rng(7)
    for _ in range(12):
        ranks, count = int(rng.integers(1, 9)), int(rng.integers(2, 6))
        yield sample_layout(
            MODELS["10b"], num_ranks=ranks, batch_size=int(rng.integers(1, 4)) * count,
            seed=int(rng.integers(99)), mix=str(rng.choice(["natural", "omni"]))), count


@pytest.mark.parametrize("fills", [False, True])
@pytest.mark.parametrize("group_size", [0, 2])
def test_a_step_is_never_longer_than_with_microbatches_that_are_alike(
    group_size: int, fills: bool
) -> None:
    inside = replace(BALANCED, fills=fills, group_size=group_size)
    for layout, count in layouts():
        plans = planned(layout, inside, count)
        if fills:
            continue
        parts = layout.split_ranks(group_size or layout.num_ranks)
        micro = np.concatenate([alike(example_costs(part, inside), count) for part in parts])
        assert time_of(plans) <= time_of([
            plan_step(layout.select(micro == k), inside) for k in range(count)])


@pytest.mark.parametrize("fills", [False, True])
def test_a_large_step_is_not_planned_twice(fills: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing waits in microbatches that are alike."""
    monkeypatch.setattr(microbatches, "_time_of_ranks", None)
    layout = sample_layout(MODELS["10b"], num_ranks=256, batch_size=80, seed=0, mix="omni")
    assert layout.num_examples > MOST_PLANNED
    inside = replace(BALANCED, fills=fills)
    plans = planned(layout, inside, 8)
    assert plans[0].spec is inside
    assert time_of(plans) <= 1.001 * time_of(planned_alike(layout, BALANCED, 8))


def test_a_large_step_is_divided_by_what_its_ranks_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few examples a rank and microbatch: no plan comes near the bound of the division that has the
    least."""
    monkeypatch.setattr(microbatches, "MOST_PLANNED", 0)
    layout = sample_layout(MODELS["10b"], num_ranks=64, batch_size=24, seed=0)
    inside = replace(BALANCED, costs=small_spec(MODELS["10b"]).costs)
    plans = planned(layout, inside, 4)
    assert time_of(plans) <= 1.001 * time_of(planned_alike(layout, inside, 4))


def test_caps_without_a_plan_leave_microbatches_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cap that the recipe does not name is never the reason why a step has no plan."""
    monkeypatch.setattr(divisions, "USUAL", 0.0)
    texts = batch_layout(range(12), [100] * 11 + [130], [6, 6])
    for spec_ in (BALANCED, replace(BALANCED, room=(Limit(1, {"llm": 1}),))):
        plans = plan_microbatches(texts, spec_, 2)
        micro = alike(example_costs(texts, BALANCED), 2)
        for k, (at, plan) in enumerate(plans):
            np.testing.assert_array_equal(at, np.flatnonzero(micro == k))
            assert plan.spec is spec_.without_room


def test_microbatches_are_filled_where_no_plan_keeps_the_limits() -> None:
    """Below the longest text, which would be alone in one of those that are alike."""
    texts = batch_layout(range(10), [21, 120, 21, 37, 25, 26, 15, 17, 1, 7], [5, 5])
    inside = replace(BALANCED, fills=True, room=(Limit(1, {"llm": 1}),))
    assert all(plan.llm.target_sizes.all() for plan in planned(texts, inside, 3))


def test_slots_of_a_group_are_those_of_its_ranks() -> None:
    """A cap as wide as an even share, so that examples are packed into slots."""
    layout = batch_layout(range(16), [3, 5, 7, 9] * 4, [4] * 4)
    inside = replace(capped(13), group_size=2)
    known = [division.rank for _, division in divisions.divided(layout, inside, 2, False)
             if division.rank is not None]
    assert known
    for rank in known:
        np.testing.assert_array_equal(rank // 2, layout.rank_of_example // 2)


def test_caps_of_memory_keep_below_every_limit() -> None:
    limits = Limit(90, {"llm": 1}), Limit(100, {"llm": 1, "vision": 1})
    assert caps_below(limits, dict.fromkeys(("llm", "vision"), Share(80, 1)), 2) == {
        "llm": 50, "vision": 50}


def test_without_balancing_every_rank_keeps_its_order() -> None:
    off = replace(BALANCED, balance=BalanceConfig(enabled=False))
    plans = plan_microbatches(LAYOUT, off, 3)
    assert_invariants(LAYOUT, plans, off)
    share = np.arange(LAYOUT.num_examples).reshape(32, 30)
    for k, (at, _) in enumerate(plans):
        np.testing.assert_array_equal(at, share[:, 10 * k: 10 * k + 10].ravel())
    few = batch_layout(range(8), [9] * 8, [1, 1, 1, 5])  # three have nothing in the second one
    off = replace(off, fills=True)
    assert_invariants(few, plan_microbatches(few, off, 2), off)


def capped(cap: int, spec_: PlanSpec = BALANCED, **of_phases: int) -> PlanSpec:
    caps = {"llm": cap, **of_phases}
    return replace(spec_, balance=replace(spec_.balance, **{
        phase: PhasePolicy(max_rank_tokens=most) for phase, most in caps.items()}))


def of_texts(lengths: np.ndarray, num_ranks: int, **cost: int) -> tuple[BatchLayout, PlanSpec]:
    counts = np.bincount(np.arange(len(lengths)) % num_ranks, minlength=num_ranks)
    return batch_layout(range(len(lengths)), lengths, counts), replace(
        BALANCED, costs={"llm": CostModel(**{"linear": 10**6, "quadratic": 0} | cost)})


def test_as_few_microbatches_as_the_cap_allows() -> None:
    """512 lognormal lengths on 16 ranks, in full ranks: what reinforcement learning draws. Under a
    cap of every rank at most 1.05 of the time is waited, where packing by length alone waits
    1.25."""
    rng, few = np.random.default_rng(0), []
    for _ in range(4):
        lengths = np.minimum(rng.lognormal(7.6, 1.0, 512).astype(int) + 16, 16_384)
        layout, spec_ = of_texts(lengths, 16, linear=45 * 10**9, quadratic=885_000)
        plans = planned(layout, capped(16_384, spec_), 0)
        few.append(len(plans) == -(-lengths.sum() // (16 * 16_384)))
        assert imbalance(costs_of(plans)) <= 1.05
    assert sum(few) >= 3


@pytest.mark.parametrize("enabled", [False, True])
def test_auto_follows_the_step(enabled: bool) -> None:
    """More examples take more microbatches, and the memory of a rank is a cap as well."""
    texts = [batch_layout(range(n), [100] * n, [n // 2] * 2) for n in (8, 24)]
    off = replace(BALANCED, balance=replace(BALANCED.balance, enabled=enabled))
    for spec_ in (capped(430, off), replace(off, room=(Limit(430, {"llm": 1}),))):
        assert [len(plan_microbatches(layout, spec_, 0)) for layout in texts] == [1, 3]
        uneven = batch_layout(range(8), [150] * 4 + [50] * 4, [4, 4])
        assert len(plan_microbatches(uneven, spec_, 0)) == 2 - enabled
    parts = [(VISION, SegmentLengths(n, n, 1, (1, 1, n))) for n in (300, 300)]
    images = BatchLayout.concat([BatchLayout.from_segments(i, 1, parts) for i in range(3)], [3])
    assert len(plan_microbatches(images, replace(off, room=(Limit(430, {"vision": 1}),)), 0)) == 3
    if enabled:
        with pytest.raises(ValueError, match="keeps below the caps of a rank: vision 430, llm 430"):
            plan_microbatches(images, capped(430, off, vision=430), 0)
    long = batch_layout(range(2), [100, 700], [1, 1])
    assert len(plan_microbatches(long, replace(off, room=(Limit(430, {"llm": 1}),)), 0)) == 1
    with pytest.raises(ValueError, match="max_rank_tokens = 430 is below the 700"):
        plan_microbatches(long, capped(430, off), 0)
    with pytest.raises(ValueError, match="fsdp.memory_gb"):
        plan_microbatches(long, off, 0)


@thorough
@given(st.integers(1, 6), st.integers(0, 2), st.integers(0, 2**32))
def test_slots(num_slots: int, sizes: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 15))
    cost, size = rng.integers(0, 50, n), rng.integers(0, 30, (n, sizes))
    cap = rng.integers(20, 90, sizes)
    got = core().fill_slots(cost, size.ravel(), cap, num_slots)
    want = reference.fill_slots(cost, size, cap, num_slots)
    assert (got is None) == (want is None)
    if want is not None:
        np.testing.assert_array_equal(got, want)


def drawn(rng: np.random.Generator) -> tuple[BatchLayout, int]:
    """(a step of texts with images and clips or without, its microbatches)."""
    ranks, count, each = (int(rng.integers(low, high)) for low, high in ((1, 9), (2, 6), (1, 6)))
    spread, table, per_example = rng.choice([.3, 1., 1.8]), [], []
    media = int(rng.integers(0, 4))
    for _ in range(ranks * count * each):
        items = np.clip(rng.lognormal(6, spread, rng.integers(0, media + 1)), 4, 16_000).astype(int)
        table += [(int(rng.integers(1, 3)), n, n, -(-n // 4), 1, 1, n) for n in items.tolist()]
        text = int(np.clip(rng.lognormal(5, spread), 1, 32_000))
        table.append((0, 0, 0, text, 0, 0, 0))
        per_example.append(len(items) + 1)
    n = len(per_example)
    return BatchLayout.from_table(np.arange(n), np.ones(n, np.int64), np.array(per_example),
                                  np.array(table, np.int64), [count * each] * ranks), count


@pytest.mark.parametrize("seeds", [  # those at the end had no plan below caps, or a longer one
    (*range(15), 1980, 7572, 7982),
    *(pytest.param(range(first, first + 2000), marks=pytest.mark.slow)
      for first in range(0, 10_000, 2000))])
def test_random_steps(seeds: Iterable[int]) -> None:
    """No longer than microbatches that are alike, each balanced alone; at most 5% above the bound
    in the median. Below caps of which a plan is known, with a fiftieth to spare, there is one, and
    so there is below limits of all phases together."""
    above = []
    for seed in seeds:
        layout, count = drawn(np.random.default_rng(seed))
        plans = planned(layout, BALANCED, count)
        assert time_of(plans) <= time_of(planned_alike(layout, BALANCED, count))
        above.append(time_of(plans) / bound_of(plans))
        caps = {phase: 51 * fullest(plans, phase) // 50 for phase in PHASES}
        below = planned(layout, capped(caps.pop("llm"), **caps), count)
        assert time_of(below) <= 1.01 * time_of(plans)
        room = []
        for each in np.random.default_rng(seed).integers(0, 9, (2, len(PHASES))).tolist():
            limit = Limit(0, dict(zip(PHASES, each, strict=True)))
            most = max(int(limit.taken({phase: plan.positions(phase) for phase in PHASES}).max())
                       for plan in plans)
            room.append(replace(limit, most=51 * most // 50))
        below = planned(layout, replace(BALANCED, room=tuple(room)), count)
        for plan in below:
            assert plan.spec.room == tuple(room)
            assert all(limit.taken({phase: plan.positions(phase) for phase in PHASES}).max()
                       <= limit.most for limit in room)
        assert time_of(below) <= 1.01 * time_of(plans)
    assert np.median(above) <= 1.05


def test_lengths_that_cannot_be_planned_are_refused():
    for lengths in ([8, 3], np.array([8, 3])):
        assert batch_layout([4, 5], lengths, [2], 8).tokens_per_example.tolist() == [8, 3]
        with pytest.raises(ValueError, match="example 4 has 8 tokens, more than max_tokens = 7: "):
            batch_layout([4, 5], lengths, [2], 7)
    for lengths in ([3, -1], np.array([3, -1])):
        with pytest.raises(ValueError, match="example 5 has length -1: must be >= 0"):
            batch_layout([4, 5], lengths, [2])
    with pytest.raises(TypeError, match="example 5: its length is 1.5; give a whole number"):
        batch_layout([4, 5], [3, 1.5], [2])
