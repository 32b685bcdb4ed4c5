"""Planned phases of models that take clips, from files to gradients on real ranks: see
test_planned_phases."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm.config.balance import PhaseConfig
from tests.lib.processors import CLIPS
from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import asked, write_clip, write_model
from tests.sharding.test_planned_phases import compared, frozen_compared, recipe

pytestmark = [pytest.mark.dist, pytest.mark.whole]
# Clips of each example. Of the steps of 8 examples the second has one clip (of three windows, where
# a clip may have several), so that ranks encode nothing and have no clip, the third has none; the
# last has 2 examples for up to 4 ranks.
COUNTS = [3, 1, 0, 2, 0, 1, 2, 0, *[0, 1, *[0] * 6], *[0] * 8, 1, 2]


def write_rows(folder: Path, name: str) -> None:
    """Omni: with an image after every other clip, and one in an example without clips.
    audioflamingo3: one clip of up to three windows."""
    rng = np.random.default_rng(0)
    most, longest = (1, 3.0) if name == "audioflamingo3" else (3, 1.0)
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for i, count in enumerate(COUNTS):
            parts = []
            for k in range(min(count, most)):
                seconds = rng.uniform(0.1, longest) if i != 9 else 0.83 * longest
                write_clip(folder / f"{i}_{k}.wav", seconds, rng)
                parts.append({"type": "audio", "audio": f"{i}_{k}.wav"})
            if "omni" in name and i % 2 == 0:
                size = (*rng.integers(20, 120, 2).tolist(), 3)
                Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / f"{i}.png")
                parts.insert(1, {"type": "image", "image": f"{i}.png"})
            file.write(asked(parts, rng))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIPS)
@pytest.mark.parametrize("ranks, shard_size", [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2)])
def test_gradients_are_those_of_stock_transformers(name, ranks, shard_size, tmp_path):
    """Balanced where one layer of a phase is recomputed, or a part of it."""
    write_model(name, tmp_path, torch.float64)
    write_rows(tmp_path, name)
    run = recipe(tmp_path)
    run = replace(run, fsdp=replace(run.fsdp, shard_size=shard_size), balance=replace(
        run.balance, audio=PhaseConfig(policy="greedy"), vision=PhaseConfig(policy="greedy")))
    off = replace(run, balance=replace(run.balance, enabled=False, dispatch="load"),
                  train=replace(run.train, accumulation_steps=2))
    stored = replace(run, balance=replace(run.balance, dispatch="bytes"))
    run = replace(run, fsdp=replace(
        run.fsdp, audio_checkpointing="full:1", llm_checkpointing="selective:1"))
    first, second, third, last = run_ranks(compared, ranks, tmp_path, name,
                                           [run, stored, off], "audio")[0]
    assert sum(first["encoded"]) == (5 if name == "audioflamingo3" else 9)
    assert sum(second["encoded"]) == 1 and not any(third["encoded"])
    assert sum(last["examples"]) == 2
    if ranks > 1:
        assert first["moved"] > 0  # some clips are encoded on other ranks than their example's
        assert 0 in second["encoded"] and 0 in second["held"]
        assert (0 in last["examples"]) == (ranks > 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shard_size", [(2, 0), (3, 0), (4, 0), (4, 2)])
@pytest.mark.parametrize("name, settings, learns", [
    ("qwen2_audio", [("audio", "connector")], False),
    ("qwen2_audio", [("audio",), ("connector", "llm"), ("audio", "llm")], True),
    ("qwen2_5_omni", [("vision", "audio", "connector")], False),
    ("qwen2_5_omni", [("vision", "connector"), ("audio", "connector")], True)])
def test_what_is_frozen_sends_nothing_back_and_changes_no_other_gradient(
        name, settings, learns, ranks, shard_size, tmp_path):
    """Ranks without clips, a step with one clip and one without any are among the steps."""
    write_model(name, tmp_path, torch.float64)
    write_rows(tmp_path, name)
    for found in run_ranks(frozen_compared, ranks, tmp_path, name, settings, shard_size):
        assert all(exchanges and any(exchanges) is learns for exchanges in found.values())
