"""plan_step with every policy and scheme: permutations, balance, bytes, honest errors."""

import runpy
import sys
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.loader.indices import batch_layout
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import (
    PHASES,
    PhasePolicy,
    PlanSpec,
    assign_phases,
    digest_of_arrays,
    example_bytes,
    feature_home,
)
from orchmllm.plan.balance import POLICIES, core, load_cap
from orchmllm.plan.cost import CostModel
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, ENCODERS, TEXT, VISION, BatchLayout
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.room import Limit
from orchmllm.plan.step import StepPlan, build_plan, plan_step
from orchmllm.tools.predict.workload import sample_layout
from tests.lib.commands import ROOT
from tests.lib.corpora import write_llava
from tests.lib.drawn import write_recipe
from tests.lib.recipes import small_spec

LAYOUT = sample_layout(MODELS["84b"], num_ranks=32, batch_size=30, seed=0)


def spec(**balance) -> PlanSpec:
    return PlanSpec(
        costs=small_spec(MODELS["84b"]).costs,
        row_bytes={"vision": 588, "audio": 320}, feature_bytes=16384, ranks_per_node=8,
        balance=BalanceConfig(**balance))


def every_phase(policy: str, **options) -> dict[str, PhasePolicy]:
    return {phase: PhasePolicy(policy, **options) for phase in PHASES}


def excess(plan: StepPlan, phase: str) -> float:
    """Largest load over its lower bound."""
    cost = plan.spec.costs[phase](plan.layout.item_lengths(phase))
    return plan.phase_cost(phase)[1].max() / core().lower_bound(cost, plan.layout.num_ranks)


def internode_bytes(plan: StepPlan) -> int:
    return sum(phase["internode_bytes"] for phase in plan.stats.values())


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dispatch", ["tensors", "load"])
def test_every_policy_plans_every_phase(policy: str, dispatch: str) -> None:
    plan = plan_step(LAYOUT, spec(dispatch=dispatch, **every_phase(policy)))
    for move in (plan.llm, *plan.encode.values(), *plan.feature.values()):
        assert sorted(move.order.tolist()) == list(range(len(move.order)))
    if policy in ("greedy", "quadratic", "least_move"):
        assert all(excess(plan, phase) < 1.02 for phase in PHASES)


@pytest.mark.parametrize("dispatch", ["tensors", "load"])
@pytest.mark.parametrize("size, per_node", [(8, 8), (16, 8), (4, 8)])
def test_nothing_leaves_its_group(dispatch: str, size: int, per_node: int) -> None:
    """And each group is planned as if it were alone."""
    inside = replace(spec(dispatch=dispatch, **every_phase("least_move")), ranks_per_node=per_node)
    whole = plan_step(LAYOUT, replace(inside, group_size=size))
    alone = replace(inside, ranks_per_node=min(size, per_node))
    for phase in PHASES:
        move = whole.llm if phase == "llm" else whole.encode[phase]
        assert (move.source_rank[move.order] // size == move.target_rank // size).all()
        costs = [plan_step(part, alone).phase_cost(phase)[1] for part in LAYOUT.split_ranks(size)]
        np.testing.assert_array_equal(whole.phase_cost(phase)[1], np.concatenate(costs))
    assert whole.digest != plan_step(LAYOUT, inside).digest


def test_a_rank_without_an_example_is_given_one_of_its_group() -> None:
    """The shortest ones are in the other group."""
    texts = batch_layout(range(8), [1, 2, 3, 4, 50, 60, 70, 80], [2] * 4)
    llm = np.array([0, 0, 0, 0, 2, 2, 2, 2])
    nothing = {m: np.zeros(0, np.int64) for m in ENCODERS}
    for size, filled in ((2, [1, 0, 0, 0, 3, 2, 2, 2]), (0, [1, 3, 0, 0, 2, 2, 2, 2])):
        plan = build_plan(texts, nothing, llm, replace(spec(), fills=True, group_size=size))
        assert plan.llm.target_rank[np.argsort(plan.llm.order)].tolist() == filled


def test_nodewise_spares_features_where_media_are_read() -> None:
    """With `load` nothing else moves between ranks."""
    sent = []
    for nodewise in (True, False):
        phases = every_phase("greedy") | {
            m: PhasePolicy("greedy", nodewise=nodewise) for m in ENCODERS}
        planned = replace(spec(dispatch="load", **phases), row_bytes=dict.fromkeys(ENCODERS, 0))
        plan = plan_step(LAYOUT, planned)
        sent.append([plan.stats[m]["internode_bytes"] for m in ENCODERS])
        assert all(excess(plan, phase) < 1.02 for phase in PHASES)
    assert (np.array(sent[0]) < 0.9 * np.array(sent[1])).all()


def test_min_gain_leaves_a_step_as_sampled() -> None:
    gain = plan_step(LAYOUT, spec(**every_phase("least_move"))).predicted_gain
    for least, rearranges in ((gain - 1e-6, True), (gain + 1e-6, False)):
        plan = plan_step(LAYOUT, spec(min_gain=least, **every_phase("least_move")))
        moved = any(stats["moved_bytes"] for stats in plan.stats.values())
        assert moved == plan.spec.balance.enabled == rearranges


@pytest.mark.parametrize("limited", ["by max_rank_tokens", "by memory"])
@pytest.mark.parametrize("room, rearranges", [(1.01, True), (2.0, False)])
def test_a_step_as_sampled_keeps_the_cap(room: float, rearranges: bool, limited: str) -> None:
    """A step that would gain too little stays as sampled only where every rank has room for it."""
    tokens = LAYOUT.tokens_per_example
    sampled = np.bincount(LAYOUT.rank_of_example, weights=tokens)
    cap = int(room * sampled.mean())
    memory = limited == "by memory"
    planned = spec(min_gain=0.99, **every_phase("none") | {
        "llm": PhasePolicy("least_move", max_rank_tokens=0 if memory else cap)})
    plan = plan_step(LAYOUT, replace(
        planned, room=(Limit(cap, {"llm": 1}),) if memory else ()))
    held = np.bincount(plan.llm.target_rank, weights=tokens[plan.llm.order])
    assert (sampled.max() > cap) == plan.spec.balance.enabled == rearranges and held.max() <= cap


def test_a_phase_without_a_cost_is_not_planned() -> None:
    """A loader of whole examples has the LLM phase alone, and its plan is the same."""
    texts = batch_layout(range(192), range(5, 197), [6] * 32)
    every = spec(dispatch="load", **every_phase("least_move"))
    alone = replace(every, costs={"llm": every.costs["llm"]})
    plan, among_all = plan_step(texts, alone), plan_step(texts, every)
    assert plan.encode == plan.feature == plan.for_rank(3).encode == {}
    assert list(plan.stats) == ["llm"] and plan.predicted_gain == among_all.predicted_gain > 0
    np.testing.assert_array_equal(plan.llm.order, among_all.llm.order)
    for (at, _), (same, _) in zip(*(plan_microbatches(texts, one, 3) for one in (alone, every)),
                                  strict=True):
        np.testing.assert_array_equal(at, same)


def test_local_moves_far_less_than_the_papers_scheme() -> None:
    paper = plan_step(LAYOUT, spec(**every_phase("greedy", nodewise=True)))
    local = plan_step(LAYOUT, spec(**every_phase("least_move", tolerance=.005)))
    assert all(excess(local, phase) <= 1.005 + 1e-9 for phase in PHASES)
    assert internode_bytes(local) < internode_bytes(paper) / 10
    blind = plan_step(LAYOUT, spec(**every_phase("greedy")))
    assert internode_bytes(paper) < internode_bytes(blind)


@pytest.mark.parametrize("tolerance", [.001, 0])
def test_what_a_run_of_2560_ranks_plans_with(tolerance: float) -> None:
    """FLOP costs, homes that follow the features, costs of moving: all phases are within 0.1%, and
    little more of the LLM's work changes its node than has to."""
    layout = sample_layout(MODELS["84b"], num_ranks=2560, batch_size=30, seed=0)
    planned = spec(**every_phase("least_move", tolerance=tolerance))
    encode, llm = assign_phases(layout, planned)
    home = feature_home(layout, encode, planned.feature_bytes)
    for phase, rank_of in (*encode.items(), ("llm", llm)):
        lengths = (layout.tokens_per_example if phase == "llm"
                   else layout.attn_len[layout.segments[ENCODERS[phase]]])
        cost = planned.costs[phase](lengths)
        cap = load_cap(cost, 2560, .001)
        load = np.zeros(2560, np.int64)
        np.add.at(load, rank_of, cost)
        assert load.max() <= cap
    node_load = np.zeros(320, np.int64)
    np.add.at(node_load, home // 8, cost)
    least = np.maximum(0, node_load - 8 * cap).sum()
    assert cost[rank_of // 8 != home // 8].sum() <= 1.3 * least


def test_a_token_of_text_weighs_its_id_and_label_and_one_of_an_image_its_features() -> None:
    image = SegmentLengths(16, 16, 4, (1, 4, 4))  # patches, positions, tokens
    layout = BatchLayout.concat([
        BatchLayout.from_segments(0, 1, [(TEXT, text_lengths(3)), (VISION, image)]),
        BatchLayout.from_segments(1, 1, [(TEXT, text_lengths(7))])])
    assert example_bytes(layout, 16384).tolist() == [3 * 8 + 4 * 16384, 7 * 8]


def test_bytes_between_nodes_are_those_that_change_node() -> None:
    """Four texts on ranks of two nodes: one moves inside its node, two to the other, one stays."""
    texts = [BatchLayout.from_segments(k, n, [(TEXT, text_lengths(n))])
             for k, n in enumerate((10, 20, 30, 40))]
    plan = build_plan(BatchLayout.concat(texts),
                      {m: np.zeros(0, np.int64) for m in ENCODERS}, np.array([1, 3, 2, 0]),
                      replace(spec(**every_phase("none")), ranks_per_node=2))
    assert plan.stats["llm"] == {"moved_bytes": 8 * 70, "internode_bytes": 8 * 60}


def test_text_only_examples_move_first() -> None:
    plan = plan_step(LAYOUT, spec(**every_phase("least_move", tolerance=.005)))
    nodes = plan.llm.source_rank[plan.llm.order] // 8 != plan.llm.target_rank // 8
    moved = plan.llm.order[nodes]
    per_token = example_bytes(LAYOUT, 16384) / LAYOUT.tokens_per_example
    assert np.median(per_token[moved]) <= np.median(per_token)


def test_whole_examples_keep_media_with_their_example() -> None:
    plan = plan_step(LAYOUT, spec(whole_examples=True, **every_phase("greedy")))
    assert all(move.source_rank[move.order].tolist() == move.target_rank.tolist()
               for move in plan.feature.values())


def test_a_whole_example_costs_all_its_phases() -> None:
    """The first of three is the smallest in each phase, and the largest in both."""
    image = (VISION, SegmentLengths(5, 5, 1, (1, 1, 5)))
    layout = BatchLayout.concat([
        BatchLayout.from_segments(0, 1, [(TEXT, text_lengths(4)), image]),
        *(BatchLayout.from_segments(k, 1, [(TEXT, text_lengths(8))]) for k in (1, 2))], [2, 1])
    even = replace(spec(whole_examples=True, **every_phase("greedy")),
                   costs=dict.fromkeys(PHASES, CostModel(1, 0, unit=1)))
    alone, *others = assign_phases(layout, even)[1].tolist()
    assert alone not in others


def test_token_cap_holds_where_a_plan_without_it_is_above_it() -> None:
    def most_tokens(cap: int) -> int:
        llm = PhasePolicy("least_move", max_rank_tokens=cap)
        plan = plan_step(LAYOUT, spec(**every_phase("least_move") | {"llm": llm}))
        return np.bincount(plan.llm.target_rank, LAYOUT.tokens_per_example[plan.llm.order]).max()

    cap = int(LAYOUT.tokens_per_example.sum() / 32 * 1.002)
    assert most_tokens(cap) <= cap < most_tokens(0)


def test_the_digest_changes_with_the_rank_of_any_item_of_any_phase() -> None:
    """All 64 plans of two examples with an image and a clip each, on two ranks."""
    media = [(VISION, SegmentLengths(16, 16, 4, (1, 4, 4))),
             (AUDIO, SegmentLengths(100, 50, 13, (1, 1, 100)))]
    layout = BatchLayout.concat(
        [BatchLayout.from_segments(i, 1, [(TEXT, text_lengths(3)), *media]) for i in (0, 1)])
    ranks = [np.array(pair) for pair in product((0, 1), repeat=2)]
    digests = [build_plan(layout, {"vision": vision, "audio": audio}, llm, spec()).digest
               for vision, audio, llm in product(ranks, repeat=3)]
    assert len(set(digests)) == len(digests) == 64


def test_the_digest_changes_with_any_value_and_any_order() -> None:
    values = np.arange(200_000)
    digests = {digest_of_arrays([values])}
    for a, b in ((0, 1), (0, 65_536), (65_535, 131_071), (199_998, 199_999)):
        swapped, other = values.copy(), values.copy()
        swapped[[a, b]] = swapped[[b, a]]
        other[b] ^= 1 << 62
        digests |= {digest_of_arrays([swapped]), digest_of_arrays([other])}
    assert len(digests) == 9 and digest_of_arrays([values]) in digests


def test_a_layout_arrives_as_it_was_sent() -> None:
    """Also of ranks that have no examples, an odd number of values, or lengths above 32 bits."""
    tokens = LAYOUT.num_tokens.copy()
    tokens[[40, -1]] = 2**31, 2**62
    whole = replace(LAYOUT, example_id=LAYOUT.example_id + 2**40, num_tokens=tokens)
    sizes = np.array([0, 1, 0, 29, *LAYOUT.examples_per_rank[1:], 0])
    parts = list(replace(whole, examples_per_rank=sizes).split_ranks(1))
    sent = [part.to_payload() for part in parts]
    rows = np.full((len(sent), max(map(len, sent))), -1, np.int64)
    for row, payload in zip(rows, sent, strict=True):
        row[: len(payload)] = payload
    got = BatchLayout.from_payloads(rows, np.array(list(map(len, sent))),
                                    np.array([part.num_examples for part in parts]),
                                    np.array([len(part.modality) for part in parts]))
    for field in fields(BatchLayout):
        expected = sizes if field.name == "examples_per_rank" else getattr(whole, field.name)
        assert np.array_equal(getattr(got, field.name), expected), field.name


@pytest.mark.parametrize(("options", "message"), [
    ({"policy": "greedy", "tolerance": .1}, "'greedy' does not honour tolerance"),
    ({"policy": "padded", "max_rank_tokens": 10**6}, "'padded' does not honour max_rank_tokens"),
])
def test_what_cannot_be_honoured_raises(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_step(LAYOUT, spec(vision=PhasePolicy(**options)))


@pytest.fixture
def overhead(monkeypatch, capsys):
    """What the benchmark prints."""
    def run(*arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", ["", "--ranks", "8", "--batch-size", "2", "--repeats", "1",
                                          *map(str, arguments)])
        monkeypatch.syspath_prepend(ROOT / "scripts")
        runpy.run_path(str(ROOT / "scripts" / "bench_overhead.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.slow
def test_the_benchmark_knows_its_default_schemes(overhead, tmp_path):
    out = overhead("--plot", tmp_path / "overhead.png")
    assert "| 8 | least_move |" in out and (tmp_path / "overhead.png").stat().st_size > 1000


def test_the_benchmark_takes_a_recipe_and_its_lengths(overhead, tmp_path):
    write_llava(tmp_path)
    recipe = write_recipe(tmp_path, f"path: {tmp_path}/llava_v1_5_mix665k.json",
                          "balance: {vision: {policy: none}}\n")
    out = overhead("--recipe", recipe, "--own-lengths", "--policies", "recipe,greedy")
    unbalanced, greedy = (float(line.split("vision ")[1].split()[0]) for line in out.splitlines()
                          if line.startswith("| 8 |"))
    assert unbalanced > greedy >= 1 and "own lengths" in out
