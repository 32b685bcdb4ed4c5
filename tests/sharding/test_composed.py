"""Models that are composed of towers and an LLM, from files to gradients on real ranks: see
test_planned_phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from orchmllm.config.balance import PhaseConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.sharding.load_whole import load_whole
from tests.lib import composed
from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import write_counted
from tests.lib.whole_models import named_parts
from tests.sharding.test_planned_phases import compared, frozen_compared, recipe

pytestmark = [pytest.mark.dist, pytest.mark.whole]
# Media of each example. Of the steps of 8 examples the second has two, so that ranks encode
# nothing, the third has none; the last has 2 examples for up to 4 ranks.
COUNTS = [3, 1, 0, 2, 0, 4, 2, 0, *[0, 2, *[0] * 6], *[0] * 8, 2, 3]


def write_rows(folder: Path, name: str) -> None:
    """Images and clips in turn, of those that a composition takes."""
    tower, hears, *_ = composed.COMPOSED[name]
    kinds = ["image"] * bool(tower) + ["audio"] * bool(hears)
    write_counted(folder, COUNTS, kinds, named=False)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shard_size", [(1, 0), (2, 0), (3, 0), (4, 2)])
@pytest.mark.parametrize("name", composed.COMPOSED)
def test_gradients_are_those_of_the_plain_model(name, ranks, shard_size, tmp_path):
    """One example after another through the class alone. Balanced by every dispatch, where a layer
    of a phase is recomputed, or a part of it, and the loss is made by chunks; and not balanced, in
    two microbatches."""
    folder = tmp_path / "model"
    composed.write_composed(name, folder)
    write_rows(folder, name)
    phase = "vision" if composed.COMPOSED[name][0] else "audio"
    run = recipe(folder)
    greedy = PhaseConfig(policy="greedy")
    run = replace(run, fsdp=replace(run.fsdp, shard_size=shard_size),
                  balance=replace(run.balance, vision=greedy, audio=greedy))
    off = replace(run, balance=replace(run.balance, enabled=False),
                  train=replace(run.train, accumulation_steps=2))
    others = [replace(run, balance=replace(run.balance, dispatch=dispatch))
              for dispatch in ("load", "bytes")]
    run = replace(run, fsdp=replace(
        run.fsdp, **{f"{phase}_checkpointing": "full:1"}, llm_checkpointing="selective:1",
        loss_chunk_rows=16))
    first, second, third, last = run_ranks(compared, ranks, folder, name, [run, *others, off],
                                           phase)[0]
    assert sum(first["encoded"]) > 5 and not any(third["encoded"])
    assert sum(last["examples"]) == 2
    if ranks > 1:
        assert first["moved"] > 0  # some media are encoded on other ranks than their example's
        assert 0 in second["encoded"] and 0 in second["held"] or ranks == 2


@pytest.mark.slow
@pytest.mark.parametrize("name, settings", [
    ("siglip_whisper_qwen2", [("vision", "audio", "connector"), ("vision", "audio")]),
    ("qwen2_vl_whisper_llama", [("vision", "llm"), ("connector", "llm")])])
@pytest.mark.parametrize("ranks, shard_size", [(2, 0), (4, 2)])
def test_what_is_frozen_changes_no_other_gradient(name, settings, ranks, shard_size, tmp_path):
    folder = tmp_path / "model"
    composed.write_composed(name, folder)
    write_rows(folder, name)
    run_ranks(frozen_compared, ranks, folder, name, settings, shard_size, exact=1e-10)


def loaded(world, model: ModelConfig) -> dict[str, np.ndarray]:
    whole = load_whole(
        Path(model.folder), model, FsdpConfig(param_dtype="float64"), torch.device("cpu"),
        dict.fromkeys(EVERY_PHASE, "none"), seed=5)
    return {n: p.full_tensor().detach().numpy() for n, p in whole.hf.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip_tiled_qwen3_moe", "siglip_whisper_qwen2"])
def test_shards_are_read_from_the_folders_of_the_parts(name, tmp_path):
    """And connectors are drawn, the same on any number of ranks."""
    composed.write_composed(name, tmp_path / "model", linked=True)
    plain = transformers.AutoModelForMultimodalLM.from_pretrained(
        tmp_path / "model", dtype=torch.float64)
    model = ModelConfig(pretrained=str(tmp_path / "model"))
    one, three = (run_ranks(loaded, ranks, model)[0] for ranks in (1, 3))
    parameters = dict(plain.named_parameters())
    for (n, p), part in zip(parameters.items(), named_parts(plain, parameters), strict=True):
        assert np.array_equal(one[n], three[n]), n
        is_drawn = part == "connector" and n.endswith("weight") and "norm" not in n
        assert np.array_equal(one[n], p.detach().numpy()) is not is_drawn, n
        assert not is_drawn or one[n].std() == pytest.approx(0.02, rel=0.2)
