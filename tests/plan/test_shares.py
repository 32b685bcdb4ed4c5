"""Examples that ranks share: pieces, their ranks, and the exchanges that follow from them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from orchmllm.plan import step
from orchmllm.plan.assign import BalancePolicy, PhasePolicy, PlanSpec
from orchmllm.plan.balance import CapError
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout, SegmentLengths
from orchmllm.plan.microbatches import assert_invariants, plan_microbatches
from orchmllm.plan.room import Limit
from orchmllm.plan.step import RankPlan, StepPlan, plan_step

COSTS = {"vision": CostModel(10, 1, unit=1), "audio": CostModel(3, 0, unit=1),
         "llm": CostModel(100, 1, 7, unit=1)}


def spec(max_shares: int = 8, ranks_per_node: int = 8, **keys) -> PlanSpec:
    balance = BalancePolicy(dispatch=keys.pop("dispatch", "tensors"), llm=PhasePolicy(
        max_shares=max_shares, max_rank_tokens=keys.pop("cap", 0)))
    return PlanSpec(costs=COSTS, row_bytes={"vision": 1, "audio": 1}, feature_bytes=8,
                    ranks_per_node=ranks_per_node, balance=balance, **keys)


def example(rng: np.random.Generator, index: int, n: int) -> BatchLayout:
    """Of n positions: text and media in turn, also a text of none."""
    segments = []
    while n > 0:
        for modality in (TEXT, VISION, TEXT, AUDIO):
            size = min(n, int(rng.integers(0 if modality == TEXT else 1, 40)))
            lengths = text_lengths(size) if modality == TEXT else SegmentLengths(
                4 * size, 4 * size, size, (1, 2, 2 * size))
            segments += [(modality, lengths)] * (n > 0)
            n -= size
    return BatchLayout.from_segments(index, int(rng.integers(1, 9)), segments)


def batch(rng: np.random.Generator, num_ranks: int, lengths: np.ndarray) -> BatchLayout:
    sizes = np.bincount(rng.integers(0, num_ranks, len(lengths)), minlength=num_ranks)
    return BatchLayout.concat([example(rng, i, int(n)) for i, n in enumerate(lengths)], sizes)


def texts_of(rows: np.ndarray) -> np.ndarray:
    """(example, position) of each row of pieces [example, start, number]."""
    return np.concatenate([np.zeros((0, 2), int), *(
        np.stack([np.full(n, e), np.arange(start, start + n)], 1) for e, start, n in rows)])


def check_features(plan: StepPlan, mine: RankPlan) -> None:
    """The features of a rank's row are those of its pieces of media, in its order."""
    parts = plan.parts
    for phase, modality in plan.spec.of_media.items():
        assert len(mine.feature[phase].lengths) == len(mine.taken[phase])
        segments = plan.layout.segment_start[mine.taken[phase][:, 0]] + mine.taken[phase][:, 1]
        assert (plan.layout.modality[segments] == modality).all()
        rows = mine.feature[phase].lengths.sum()
        at = plan.llm.items_on(mine.rank)
        wanted = sum(int(parts.num_tokens[s:e][parts.modality[s:e] == modality].sum())
                     for s, e in zip(parts.segment_start[at], parts.segment_start[at + 1],
                                     strict=True))
        assert rows == wanted


def check_attention(plan: StepPlan, plans: list[RankPlan], rank: int) -> None:
    """Every rank gets the whole of each example that it shares, in its order."""
    node, mine = plan.spec.node_of(rank, len(plans)), plans[rank].shared
    here = rank - node.start
    sent = []
    for other in node:
        exchange = plans[other].shared.exchange
        assert exchange.input_splits[here] == mine.exchange.output_splits[other - node.start]
        rows = texts_of(plans[other].row)[exchange.send_index]
        ends = np.cumsum(exchange.input_splits)
        sent.append(rows[ends[here] - exchange.input_splits[here]: ends[here]])
    sizes = plan.layout.tokens_per_example
    wanted = texts_of(np.array([[e, 0, sizes[e]] for e in mine.texts]))
    assert np.array_equal(np.concatenate(sent)[mine.exchange.recv_index], wanted)
    for (e, start, _), place in zip(plans[rank].row.tolist(), mine.places, strict=True):
        if place is not None:
            assert place[1:] == (start, sizes[e]) and tuple(wanted[place[0]]) == (e, 0)


@pytest.mark.parametrize("seed", range(40))
def test_pieces_cover_examples_and_their_exchanges_agree(seed):
    rng = np.random.default_rng(seed)
    d = int(rng.integers(1, 10))
    lengths = rng.integers(1, 100, int(rng.integers(1, 20)))
    lengths[rng.random(len(lengths)) < .2] *= 20
    layout = batch(rng, d, lengths)
    given = spec(int(rng.integers(2, 10)), int(rng.integers(1, d + 1)), fills=seed % 3 > 0,
                 dispatch=("load", "tensors")[seed % 2], group_size=[0, 0, min(4, d)][seed % 3],
                 cut_media=[(), ("audio",), ("vision", "audio")][seed // 3 % 3])
    plan = plan_step(layout, given)
    assert_invariants(layout, [(np.arange(layout.num_examples), plan)], given)
    off = plan_step(layout, replace(given, balance=replace(given.balance, llm=PhasePolicy())))
    costs, without = plan.planned_cost("llm"), off.planned_cost("llm")
    assert costs.sum() == without.sum()  # pieces add up to their examples
    plans = [plan.for_rank(r) for r in range(d)]
    if plan.pieces is None:
        assert (costs == without).all() and not any(p.shared for p in plans)
        assert plan.llm.order.tolist() == off.llm.order.tolist()
    for rank, mine in enumerate(plans):
        assert mine.row[:, 2].sum() == plan.positions("llm")[rank]
        assert {*mine.row[:, 0].tolist()} == {*mine.examples.tolist()}
        check_features(plan, mine)
        if mine.shared is not None:
            check_attention(plan, plans, rank)


def test_media_that_cannot_be_cut_stay_whole():
    rng = np.random.default_rng(0)
    layout = batch(rng, 4, np.array([900, 30, 30, 30]))
    for cut in ((), ("audio",), ("vision", "audio")):
        pieces = plan_step(layout, spec(cut_media=cut)).pieces
        parts, code = pieces.cuts > 1, {"vision": VISION, "audio": AUDIO}
        allowed = [TEXT, *(code[phase] for phase in cut)]
        assert parts.any() and np.isin(layout.modality[parts], allowed).all()
    assert (plan_step(layout, spec(cut_media=("vision", "audio"))).planned_cost("llm").max()
            <= plan_step(layout, spec()).planned_cost("llm").max())


def test_a_step_without_long_examples_is_planned_as_without_the_option():
    rng = np.random.default_rng(0)
    layout = batch(rng, 8, rng.integers(50, 90, 64))
    plan, off = (plan_step(layout, spec(n)) for n in (8, 1))
    assert plan.pieces is None and plan.llm.order.tolist() == off.llm.order.tolist()


@pytest.mark.parametrize("heaviest, most", [(2, 1.12), (4, 1.12), (6, 1.35), (8, 1.35),
                                            (10, 1.5)])
def test_the_slowest_rank(heaviest, most):
    """By the heaviest example over the mean rank."""
    found = []
    for seed in range(4):
        rng = np.random.default_rng(seed)
        d = 32
        lengths = rng.integers(40, 120, 8 * d)
        mean = COSTS["llm"](lengths).sum() / d
        n = np.arange(1, 20_000)
        cost = COSTS["llm"](n)
        lengths[:3] = n[np.searchsorted(cost, heaviest * mean * (d - 3) / (d - 3 * heaviest))]
        plan = plan_step(batch(rng, d, lengths), spec(cut_media=("vision", "audio")))
        costs = plan.planned_cost("llm")
        found.append(costs.max() / costs.mean())
    assert max(found) <= most and np.median(found) <= (1.02 if heaviest <= 4 else most)


def test_what_is_longer_than_a_rank_may_hold_is_shared():
    rng = np.random.default_rng(0)
    lengths = np.array([400, *[100] * 40])  # no heavier than a rank of 4
    layout = batch(rng, 4, lengths)
    assert plan_step(layout, spec()).pieces is None
    for given in (spec(cap=1200), spec(cap=1200, cut_media=("vision",))):
        assert plan_step(layout, given).pieces is None
    layout = batch(rng, 4, np.array([1000, *[100] * 24]))
    with pytest.raises(CapError, match="^balance.llm.max_rank_tokens = 960 is below"):
        plan_step(layout, spec(1, cap=960))
    plan = plan_step(layout, spec(cap=960))
    assert plan.positions("llm").max() <= 960 and plan.pieces.is_shared.any()
    limited = spec(room=(Limit(960, {"llm": 1}),))
    [(_, plan)] = plan_microbatches(layout, limited, 1)
    assert plan.positions("llm").max() <= 960 and plan.pieces.is_shared.any()
    assert plan.spec.room == limited.room
    with pytest.raises(CapError, match="no plan found in which every rank keeps below what its"):
        plan_step(layout, spec(room=(Limit(60, {"llm": 100}),)))  # none for a single position


def texts(lengths: list[int], sizes: list[int]) -> BatchLayout:
    return BatchLayout.concat([BatchLayout.from_segments(i, 1, [(TEXT, text_lengths(n))])
                               for i, n in enumerate(lengths)], sizes)


def test_an_example_whose_cost_times_the_ranks_passes_63_bits_is_shared():
    given = replace(spec(), costs={"llm": CostModel(0, 2**12, unit=1)})
    layout = texts([2**20, *[64] * 4096], [4097, *[0] * 4095])
    assert plan_step(layout, given).pieces.is_shared.sum() > 1


def test_shared_examples_may_leave_a_rank_without_an_example():
    """Three on each of two nodes and one on a third leave one whole example to the fourth."""
    layout = texts([51, 51, 51, 51, 51, 51, 44, 450], [3, 0, 3, 0, 1, 0, 1, 0])
    given = replace(spec(2, 2, fills=True), costs={"llm": CostModel(1, 0, unit=1)})
    plans = plan_microbatches(layout, given, 1)
    assert_invariants(layout, plans, given)
    assert plans[0][1].llm.target_sizes.tolist() == [6, 3, 6, 3, 1, 0, 2, 1]


def test_as_few_microbatches_as_the_caps_allow_where_an_example_is_shared():
    rng = np.random.default_rng(0)
    layout = batch(rng, 4, np.array([1000, *[100] * 60]))
    for most, told in ((1, "below the 1000 positions of one item"), (2, "")):
        given = spec(most, cap=600)
        if told:
            with pytest.raises(CapError, match=told):
                plan_microbatches(layout, given, 0)
            continue
        plans = plan_microbatches(layout, given, 0)
        assert len(plans) == 4 and any(plan.pieces is not None for _, plan in plans)
        assert max(plan.positions("llm").max() for _, plan in plans) <= 600


def test_a_plan_without_shares_stays_where_shares_break_a_cap(monkeypatch):
    layout = batch(np.random.default_rng(0), 4, np.array([900, 30, 30, 30]))
    given = spec(cap=950)
    off = plan_step(layout, spec(1, cap=950))
    assert plan_step(layout, given).pieces is not None

    def breaks(*args):
        raise CapError("max_rank_tokens")

    for broken in (breaks, lambda layout, encode, llm, spec: ({}, np.zeros_like(llm))):
        monkeypatch.setattr(step, "share", broken)
        assert plan_step(layout, given).llm.order.tolist() == off.llm.order.tolist()


def test_the_digest_tells_where_examples_are_cut():
    layout = batch(np.random.default_rng(0), 4, np.array([900, 30, 30, 30]))
    plan = plan_step(layout, spec())
    moved = replace(plan.pieces, start=plan.pieces.start + (plan.pieces.start > 0))
    assert replace(plan, pieces=moved).digest != plan.digest
