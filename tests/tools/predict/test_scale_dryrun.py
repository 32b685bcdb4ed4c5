"""The dry run and the ablations: their claims at 84B, and what is said when a recipe cannot run."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.job import check_world, resolve
from orchmllm.config.model import ModelConfig
from orchmllm.models.whole_flops import plan_spec
from orchmllm.models.whole_model import meta_model
from orchmllm.papers.ablations import ablate, ablation_text, padded
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES, PhasePolicy
from orchmllm.plan.layout import ENCODERS
from orchmllm.plan.step import imbalance, plan_step
from orchmllm.sharding.load_whole import freeze
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.units import units
from orchmllm.tools.predict.collectives import gather_bandwidth, unit_traffic
from orchmllm.tools.predict.dry_run import NONE, dry_run
from orchmllm.tools.predict.dry_run_command import main as command
from orchmllm.tools.predict.examples import of_mix
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.step_time import (
    rank_seconds,
    timed,
    work_of,
)
from orchmllm.tools.predict.text import dry_run_text
from orchmllm.tools.predict.workload import sample_layout
from orchmllm.train import main as train
from tests.lib import drawn
from tests.lib.commands import python
from tests.lib.recipes import RECIPES, read, small_spec
from tests.lib.synthetic import recipe as tiny
from tests.lib.tokenizers import write_tokenizer

RECIPE = str(RECIPES / "mllm84b.yaml")


def built(recipe, num_ranks: int) -> tuple[int, dict[str, int]]:
    """(parameters, bytes of the fullest rank) of the real model, built without memory, of which
    FSDP2 cuts each parameter along its first dimension."""
    whole, shards = meta_model(recipe.model.folder), recipe.fsdp.shard_size or num_ranks
    freeze(whole, recipe.model)
    held = [(-(-len(p) // shards) * p[0].numel(), p.requires_grad) for p in whole.parameters()]
    size = DTYPE_BYTES[recipe.fsdp.param_dtype]
    sizes = {"parameters": size * sum(n for n, _ in held),
             "gradients": size * sum(n for n, learns in held if learns)}
    return sum(p.numel() for p in whole.parameters()), sizes | {
        "optimizer": 2 * sizes["gradients"]}


@pytest.mark.slow
def test_dry_run_of_84b_on_2560_ranks(tmp_path):
    """The figures of issue and documentation, in under 60 s (of CPU: the machine may be busy) and
    4 GB."""
    out = tmp_path / "r.json"
    run = python("-m", "orchmllm", "dry-run", RECIPE, "--ranks", "2560", "--json", out)
    assert run.returncode == 0, run.stderr
    r = json.loads(out.read_text())
    assert r["peak_rss_bytes"] < 4e9 and r["steps"] == 20
    assert 83e9 < sum(r["parameters"].values()) < 85e9
    assert r["state_bytes"] == built(read("mllm84b"), 2560)[1]
    for phase, most in (("vision", 1.06), ("audio", 1.03), ("llm", 1.03)):  # FLOP are balanced
        assert r["phases"][phase]["balanced"] < most
    assert r["memory"]["balanced"]["peak_bytes"] < r["memory_budget_bytes"]
    assert r["memory"]["balanced"]["peak_bytes"] < r["memory"]["none"]["peak_bytes"]
    assert "84.177 B" in run.stdout and "Between nodes" in run.stdout


@pytest.mark.slow
def test_ratios_of_84b_are_those_of_an_independent_simulation():
    """Computing alone on the same mix, with audio padded where it is not balanced."""
    recipe = read("mllm84b")
    job = resolve(recipe, 2560, 8)
    spec, memory = plan_spec(job), MemoryModel.of(job)
    towers = dict.fromkeys(ENCODERS, PhasePolicy("none"))
    schemes = {"balanced": spec.balance, "none": NONE,
               "LLM only": replace(spec.balance, **towers)}
    seconds = dict.fromkeys(schemes, 0.0)
    for step in range(3):
        layout = of_mix(recipe).draw(2560, 30, step)
        for name, balance in schemes.items():
            plan = plan_step(replace(layout), replace(spec, balance=balance))
            if name == "balanced":  # in what plans balance, which is FLOP
                assert all(imbalance(plan.planned_cost(p)) < 1.03 for p in PHASES)
            work = work_of(plan if name == "balanced" else padded(plan), recipe.model)
            seconds[name] += sum(float(rank_seconds(work, p, memory, Hardware()).sum(0).max())
                                 for p in PHASES)
    for name, reference in (("none", 1.58), ("LLM only", 1.17)):
        assert seconds[name] / seconds["balanced"] == pytest.approx(reference, rel=0.05), seconds


def test_small_dry_run_is_consistent(tmp_path):
    """With limits of memory, which plans that are only compared cannot keep below."""
    folder = drawn.write_model(tmp_path / "model", write_tokenizer(tmp_path))
    small = tiny(model=ModelConfig(config=str(folder)), fsdp=replace(
        tiny().fsdp, shard_size=2, compute_dtype="bfloat16", memory_gb=1.0,
        activation_checkpointing="auto"))
    report = dry_run(small, 16, Hardware(), steps=2)
    assert (sum(report["parameters"].values()), report["state_bytes"]) == built(small, 16)
    assert report["phases"]["llm"]["balanced"] <= report["phases"]["llm"]["none"]
    assert report["caps"] and report["exchange"]["imbalance_shard_groups"]["llm"] > 1.5
    assert dry_run_text(report)
    json.dumps(report)


@pytest.mark.parametrize("changes, says", [
    (("--ranks", "2000"), "start 1792 or 2048 ranks, or set it to 0 (all ranks) or a number "
                               "that divides them"),
    (("--ranks", "2564", "fsdp.shard_size=4"), "start 2560 or 2568"),
    (("--ranks", "2560", "fsdp.memory_gb=40"), "train.batch_size=20 would fit"),
    (("--ranks", "2560", "fsdp.memory_gb=40", "train.global_batch_size=76800"),
     "train.global_batch_size=51200 would fit"),
    (("--ranks", "2560", "fsdp.memory_gb=4"), "fsdp.shard_size above 256"),
    (("--ranks", "256", "train.global_batch_size=100"),
     "raise it to 256, or lower train.accumulation_steps"),
])
def test_one_message_for_what_cannot_run(changes, says, capsys):
    assert command([RECIPE, *changes]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("error: ") and says in said.err


def test_a_run_on_the_wrong_world_ends_before_it_starts(capsys, monkeypatch):
    assert train([RECIPE, "--validate", "--ranks", "100"]) == 2
    assert "start 256 ranks" in capsys.readouterr().err
    for name, value in {"RANK": "0", "WORLD_SIZE": "512", "LOCAL_WORLD_SIZE": "8",
                        "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert train([RECIPE, "--ranks", "2560"]) == 2
    assert ("--ranks 2560, but the launcher has started 512 ranks, and no flag changes that: make "
            "it start 2560" in capsys.readouterr().err)


def test_check_world_takes_what_divides():
    recipe = read("mllm84b")
    for ranks in (256, 512, 2560):
        check_world(resolve(recipe, ranks, 8))
    with pytest.raises(ValueError, match="at least one rank"):
        check_world(resolve(recipe, 0, 8))
    with pytest.raises(ValueError, match="world size 1000000000: ask for 1,000,000 ranks at most"):
        check_world(resolve(recipe, 10**9, 8))


@pytest.mark.parametrize("name, batch", [
    pytest.param("mllm10b", 75, marks=pytest.mark.slow),
    pytest.param("mllm18b", 50, marks=pytest.mark.slow), ("mllm84b", 25)])
def test_ablations_have_the_papers_order_at_128(name, batch):
    table = ablate(read(name), 128, batch, Hardware(), 3, of_mix(read(name)))
    claims = [("paper", low, "mfu") for low in ("none", "LLM only", "all packed", "all padded",
                                                "all-gather")]
    claims += [("LLM only", "none", "mfu"), ("LLM only", "paper", "peak_bytes"),
               ("all-gather", "paper", "peak_bytes"),
               ("no node-wise", "paper", "internode_mb_per_rank")]
    gaps = {claim: np.subtract(*(table["rows"][name]["seeds"][claim[2]] for name in claim[:2]))
            for claim in claims}  # in the paper "all padded" is far below; here it is not
    clear = {claim: np.sign(gap.mean()) for claim, gap in gaps.items()
             if abs(gap.mean()) > gap.std(ddof=1)}
    assert set(clear.values()) == {1} and len(clear) >= 7, gaps
    assert table["rows"]["paper"]["fits"] and table["rows"]["least_move"]["fits"]
    if name == "mllm84b":  # the paper's out-of-memory cases
        assert not table["rows"]["LLM only"]["fits"] and not table["rows"]["all-gather"]["fits"]
    local, paper = table["rows"]["least_move"], table["rows"]["paper"]
    assert local["internode_mb_per_rank"] < 0.1 * paper["internode_mb_per_rank"]
    assert ablation_text({"tables": [table], "lengths": ""})


def test_predicted_time_adds_up_by_hand():
    """One rank, no traffic: FLOPs over peak times efficiency."""
    layout = sample_layout(MODELS["10b"], num_ranks=1, batch_size=4, seed=0)
    work = work_of(plan_step(layout, small_spec(MODELS["10b"])), MODELS["10b"])
    hardware = Hardware(product_efficiency=0.5, attention_efficiency=0.5, attention_half=0,
                        memory_efficiency=1e20)
    memory = MemoryModel(MODELS["10b"], replace(tiny().fsdp, compute_dtype="bfloat16"), 1)
    step = timed(work, memory, dict.fromkeys(PHASES, "none"), hardware)
    assert step.mfu == pytest.approx(0.5)
    full = timed(work, memory, dict.fromkeys(PHASES, "full"), hardware)
    assert 0.40 < full.mfu < 0.42  # three quarters, but for the last product of a block and head
    cut = timed(work, replace(memory, shards=16), dict.fromkeys(PHASES, "none"), hardware)
    assert step.traffic == pytest.approx(0) and cut.traffic > 0


def test_every_microbatch_computes_gathers_and_exchanges_and_the_optimizer_runs_once():
    layout = sample_layout(MODELS["10b"], num_ranks=16, batch_size=4, seed=0)
    work = work_of(plan_step(layout, small_spec(MODELS["10b"])), MODELS["10b"])
    memory = MemoryModel(MODELS["10b"], replace(tiny().fsdp, compute_dtype="bfloat16"), 16)
    slow = Hardware(network_bandwidth=1e8)  # gathers that no computing hides
    one, three = (timed(work, replace(memory, microbatches=n), dict.fromkeys(PHASES, "none"), slow)
                  for n in (1, 3))
    assert one.traffic > one.exchange > 0 and three.update == one.update > 0
    for name in ("traffic", "exchange", "useful", "tokens"):
        assert getattr(three, name) == pytest.approx(3 * getattr(one, name)), name
    for phase in PHASES:
        assert three.phases[phase] == pytest.approx([3 * x for x in one.phases[phase]])
        assert three.waiting[phase] == pytest.approx(3 * one.waiting[phase])


def test_a_gradient_is_reduced_between_replicas_by_a_ring():
    """By hand: of 4 replicas every rank sends and receives 2 x 3/4 of its shard, in float64, over
    50 GB/s of which 70% are reached; and two hops for each doubling."""
    block = next(u for u in units(MODELS["10b"]) if u.role == "block")
    memory = MemoryModel(MODELS["10b"], tiny().fsdp, 8)
    alone, shared = (unit_traffic(block, memory, Hardware(), n).reduce for n in (8, 32))
    size = sum(np.prod(shape) for shape in block.trained) * 8 / 8
    assert shared - alone == pytest.approx(2 * 3 / 4 * size / (50e9 * 0.7) + 2 * 2 * 5e-6)


def test_a_shard_group_that_lies_on_two_nodes_has_the_links_of_the_smaller_part():
    """Of groups of 3 GPUs on nodes of 8 the third has two on one node and one on the next."""
    inside, two, whole = (gather_bandwidth(n, Hardware(), 24) for n in (4, 3, 24))
    assert inside == gather_bandwidth(3, Hardware(), 6) > whole == 8 * two
