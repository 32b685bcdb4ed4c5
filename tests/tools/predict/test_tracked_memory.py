"""The memory model against tracked peaks of the real model under FSDP2, at full width with three
layers a phase, on worlds of 1 to 2,560 ranks. (A frozen LLM is measured in test_scale_memory:
torch's tracker does not see that gathered units without a gradient are freed.)"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.models.flops import Lengths
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES, BalancePolicy, PhasePolicy
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.step import plan_step
from orchmllm.sharding.caps import with_count
from orchmllm.sharding.fits import MISSED, decide, joined, scaled
from orchmllm.sharding.loads import Loads, loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.examples import of_mix
from tests.lib import whole_models as models
from tests.lib.drawn import shortened
from tests.lib.recipes import frozen as froze
from tests.lib.recipes import read
from tests.lib.tracked import planned, tracked, tracked_peak, tracked_text

ENCODERS = ("vision", "audio")


def thin(name: str = "mllm84b", frozen: tuple[str, ...] = (), batch_size: int = 2,
         microbatches: int = 1, **fsdp):
    recipe = read(name)
    model = froze(*frozen, model=shortened(recipe.model, 3))
    options = {"shard_size": 0, "loss_chunk_rows": 1024, "activation_checkpointing": "full",
               "prefetch": 0} | fsdp
    return replace(recipe, model=model, fsdp=replace(recipe.fsdp, **options),
                   train=replace(recipe.train, batch_size=batch_size,
                                 accumulation_steps=microbatches))


CASES = {  # (ranks, recipe)
    "kept, selective": (64, thin(reshard_after_forward=False,
                                 activation_checkpointing="selective")),
    "1 rank": (1, thin("mllm_1gpu", batch_size=8)),
    "full": (64, thin()),
    "none": (64, thin(batch_size=6, activation_checkpointing="none")),
    "selective": (64, thin(activation_checkpointing="selective")),
    "kept": (64, thin(reshard_after_forward=False)),
    "kept, none": (64, thin(reshard_after_forward=False, activation_checkpointing="none")),
    "kept, frozen audio": (64, thin(frozen=("audio",), reshard_after_forward=False)),
    "LLM kept": (64, thin(llm_reshard="none")),
    "vision kept": (64, thin(vision_reshard="none")),
    "kept in the node": (64, thin(**{f"{p}_reshard": "node" for p in PHASES})),
    "hybrid, 2,560 ranks": (2560, thin(shard_size=256, prefetch=1)),
    "float32": (64, thin(compute_dtype="")),
    "float32, none": (64, thin(compute_dtype="", activation_checkpointing="none")),
    "bfloat16": (64, thin(param_dtype="bfloat16", compute_dtype="")),
    "frozen encoders": (64, thin(frozen=ENCODERS)),
    "frozen encoders and connectors": (64, thin(frozen=(*ENCODERS, "connector"))),
    "frozen connectors, kept": (64, thin(frozen=("audio", "connector"),
                                         reshard_after_forward=False)),
    "whole loss": (64, thin(loss_chunk_rows=0)),
    "large loss": (8, thin("mllm10b", batch_size=20)),
    "accumulated": (8, thin("mllm10b", batch_size=4, microbatches=2)),
    "accumulated, none": (64, thin(batch_size=1, microbatches=2,
                                   activation_checkpointing="none")),
    "shards of 8": (8, thin(batch_size=1)),
    "three ahead": (64, thin(prefetch=3)),
    "10B, kept": (16, thin("mllm10b", batch_size=10, reshard_after_forward=False,
                           activation_checkpointing="selective")),
    "18B, hybrid": (128, thin("mllm18b", shard_size=8, batch_size=8)),
    "18B, mixed": (256, thin("mllm18b", shard_size=64, batch_size=10, llm_checkpointing="selective",
                             audio_checkpointing="none")),
    "generator, full": (64, thin("disttrain_72b", batch_size=8)),
    "generator, selective": (64, thin("disttrain_72b", batch_size=8,
                                      activation_checkpointing="selective")),
    "generator, none": (64, thin("disttrain_72b", batch_size=8, activation_checkpointing="none")),
    "generator kept, LLM full": (64, thin("disttrain_72b", batch_size=4, generator_reshard="none",
                                          generator_checkpointing="none")),
    "1 rank, none": (1, thin("mllm_1gpu", batch_size=8, activation_checkpointing="none")),
}
FAST = ("kept, selective",)


@pytest.mark.parametrize("name", [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES])
def test_predicted_peak_is_the_tracked_one(name):
    ranks, recipe = CASES[name]
    peak, moments = tracked(recipe, ranks)
    assert max(moments.values()) == pytest.approx(peak, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["none", "selective", "full"])
def test_predicted_peak_where_the_generator_is_larger_than_the_llm(choice, tmp_path):
    recipe = thin("disttrain_72b", batch_size=24, generator_checkpointing=choice)
    config = Path(recipe.model.config, "config.json")
    parts = json.loads(config.read_text())
    narrow = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
              "vocab_size": 4000}
    parts["text_config"] |= narrow
    parts["image_token_id"], parts["generator_config"]["token_id"] = 4000, 3999
    parts["generator_config"]["transformer"]["caption_channels"] = narrow["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(parts))
    shutil.copy(config.parent / "preprocessor_config.json", tmp_path)
    peak, moments = tracked(replace(recipe, model=ModelConfig(config=str(tmp_path))), 64)
    assert max(moments, key=moments.get) == "generator backward"
    assert moments["generator backward"] == pytest.approx(peak, rel=0.08)


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["none", "selective", "full"])
@pytest.mark.parametrize("shares", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["mllm10b", "mllm18b", "mllm84b"])
def test_predicted_peak_where_ranks_share_an_example(name, shares, choice):
    """One of 40,000 tokens."""
    recipe = thin(name, activation_checkpointing=choice)
    job = resolve(recipe, 8, 8)
    layout = of_mix(recipe).draw(8, 2, 0)
    tokens = layout.num_tokens.copy()
    tokens[layout.segments_per_example[0] - 1] = 40_000
    plan = plan_step(replace(layout, num_tokens=tokens), replace(
        plan_spec(job), balance=BalancePolicy(dispatch="load", llm=PhasePolicy(max_shares=shares))))
    assert (plan.pieces is not None) == (shares > 1)
    memory = MemoryModel.of(job)
    moments = memory.peaks(loads_of(plan), {p: recipe.fsdp.checkpointing(p) for p in PHASES})
    moments.pop("optimizer")
    predicted = max(float(v[0]) for v in moments.values()) - memory.state_bytes()["optimizer"]
    assert predicted == pytest.approx(tracked_peak(recipe, plan), rel=0.05)


@pytest.mark.slow
@pytest.mark.whole
@pytest.mark.parametrize("choice", ["none", "full:1", "full:3"])
def test_layers_that_are_not_alike_count_each_for_themselves(choice, tmp_path):
    """The first two layers, of linear attention, keep almost five times as much as the last two."""
    config = models.build("qwen3_5").config
    text = config.get_text_config()
    text.num_hidden_layers = 4
    text.layer_types = ["linear_attention"] * 2 + ["full_attention"] * 2
    config.save_pretrained(tmp_path)
    peak, predicted = tracked_text(tmp_path, {**dict.fromkeys(PHASES, "none"), "llm": choice}, 256)
    assert peak <= MISSED * predicted and predicted <= 1.15 * peak


@pytest.mark.whole
def test_the_loss_of_a_whole_model_by_chunks_takes_a_tenth_of_the_memory(tmp_path):
    """8,192 targets of a vocabulary of 152,064."""
    config = models.build("qwen2_5_vl").config
    config.get_text_config().vocab_size = 152_064
    config.save_pretrained(tmp_path)
    plain, chunked = (tracked_text(tmp_path, dict.fromkeys(PHASES, "none"), 8192,
                                   loss_chunk_rows=rows) for rows in (0, 256))
    assert 14.9e9 < plain[0] and chunked[0] < 0.1 * plain[0]
    for peak, predicted in (plain, chunked):
        assert predicted == pytest.approx(peak, rel=0.07)


AUTO = ("none", "kept", "LLM kept", "hybrid, 2,560 ranks", "float32", "large loss", "accumulated",
        "three ahead")


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.35, 0.75])
@pytest.mark.parametrize("name", AUTO)
def test_what_auto_chooses_is_never_over_the_budget(name, share):
    """Of a budget between what full recomputation and none need, for the load of the rank that is
    tracked alone."""
    ranks, recipe = CASES[name]
    memory, plan = planned(recipe, ranks)
    loads = joined([loads_of(plan)])
    loads = Loads({p: Lengths(x.rows[:1], x.positions[:1], x.tokens[:1])
                   for p, x in loads.phases.items()},
                  {p: x[:1] for p, x in loads.received.items()},
                  {p: x[:1] for p, x in loads.pairs.items()})
    least, most = (MISSED * memory.peak(loads, dict.fromkeys(PHASES, c)) for c in ("full", "none"))
    budget = least + share * (most - least)
    asked = replace(recipe, fsdp=replace(recipe.fsdp, activation_checkpointing="auto"))
    choice = decide(asked, memory, loads, budget)
    assert len(set(choice.values()) - {"full", "none"}) > 0  # layers of a phase are not alike
    peak, _ = tracked(replace(asked, fsdp=replace(asked.fsdp, **{
        f"{p}_checkpointing": c for p, c in choice.items()})), ranks)
    assert 0.85 * budget < peak + memory.state_bytes()["optimizer"] <= budget


@pytest.mark.slow
@pytest.mark.parametrize("name", AUTO)
def test_microbatches_that_memory_asks_for_fit_it(name):
    """A step of 24 examples a rank, for 0.4 of which there is memory: no rank of any microbatch is
    predicted to need more, and the fullest one of rank 0 takes what is predicted."""
    ranks, recipe = CASES[name]
    recipe = replace(recipe, train=replace(recipe.train, batch_size=24, accumulation_steps=0))
    job = resolve(recipe, ranks, 8)
    choice = {p: recipe.fsdp.checkpointing(p) for p in PHASES}
    memory, spec = MemoryModel.of(job), plan_spec(job)
    step = of_mix(recipe).draw(ranks, recipe.train.batch_size, 0)
    loads = loads_of(plan_step(step, spec))
    budget = MISSED * memory.peak(scaled(loads, 0.4), choice)
    counted, spec, _ = with_count(recipe, [step], spec, memory, budget)
    count = counted.train.accumulation_steps
    assert 1 < count < 8
    plans = [plan for _, plan in plan_microbatches(step, spec, count)]
    peaks = [memory.peaks(loads_of(plan), choice) for plan in plans]
    assert max(float(np.max(v)) for peak in peaks for v in peak.values()) <= budget
    moves = memory.state_bytes()["optimizer"]
    of_rank = [max(float(v[0]) for moment, v in peak.items() if moment != "optimizer") - moves
               for peak in peaks]
    at = int(np.argmax(of_rank))
    peak = tracked_peak(counted, plans[at])
    assert of_rank[at] == pytest.approx(peak, rel=0.1) and peak + moves <= budget
