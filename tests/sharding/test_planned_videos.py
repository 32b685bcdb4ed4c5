"""Videos among images and text on real ranks: the slices of one video are encoded on several ranks,
and every gradient is that of stock transformers in one process, example by example."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm.data.stream import open_dataset
from orchmllm.models.whole_model import WholeModel
from orchmllm.tools.data.build_index import build_index
from tests.lib.ranks import run_ranks
from tests.lib.videos import write_video
from tests.lib.whole_folders import asked, write_model
from tests.sharding.test_planned_phases import compared, recipe

pytestmark = pytest.mark.whole
# Media of each example: frames of a video, or (0) an image. Of the steps of 8 examples the second
# has one video alone.
MEDIA = [[8, 0], [0], [], [3, 1], [], [0, 2, 0], [5], [], [9], *[[]] * 7]


def write_rows(folder: Path) -> None:
    rng = np.random.default_rng(0)
    write_video(folder / "v.mp4", count=28, rate=8, size=(112, 56))
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for i, media in enumerate(MEDIA):
            parts = []
            for k, count in enumerate(media):
                size = (*rng.integers(20, 120, 2).tolist(), 3)
                name = f"{i}_{k}.png"
                Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / name)
                parts += [{"type": "video", "video": "v.mp4", "nframes": count} if count
                          else {"type": "image", "image": name}, {"type": "text", "text": "and"}]
            file.write(asked(parts, rng))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
@pytest.mark.parametrize("ranks, shard_size", [(1, 0), (2, 0), (3, 0), (4, 0), (4, 2)])
def test_gradients_of_videos_are_those_of_stock_transformers(name, ranks, shard_size, tmp_path):
    write_model(name, tmp_path, torch.float64)
    write_rows(tmp_path)
    run = recipe(tmp_path)
    run = replace(run, fsdp=replace(run.fsdp, shard_size=shard_size, vision_checkpointing="full:1"))
    stored, off = (replace(run, balance=replace(run.balance, **keys)) for keys in (
        {"dispatch": "bytes"}, {"dispatch": "load", "enabled": False}))
    first, second = run_ranks(compared, ranks, tmp_path, name, [run, stored, off])[0]
    assert sum(first["encoded"]) == sum((count + 1) // 2 or 1 for row in MEDIA[:8] for count in row)
    assert sum(second["encoded"]) == 5 and sum(n > 0 for n in second["held"]) == 1
    # One video; of its five slices a rank has two, with a fourth rank, too.
    assert sum(n > 0 for n in second["encoded"]) == min(ranks, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_5_vl", "qwen3_vl"])
def test_a_video_that_is_gone_goes_through_the_model_as_it_was_planned(name, tmp_path):
    model = write_model(name, tmp_path, torch.float64)
    write_rows(tmp_path)
    run = recipe(tmp_path)
    rows = open_dataset(run.data, run.model.folder, seed=0)
    build_index(rows.sources[0], rows.reader, tmp_path / "index", num_workers=1)
    rows = open_dataset(run.data, run.model.folder, seed=0)
    (tmp_path / "v.mp4").unlink()
    told, whole = [], WholeModel(model, torch.float64)
    for i in (0, 3, 5):
        example = rows.load(i, on_error=lambda segment, error: told.append(str(error)))
        assert float(whole(whole.join([example])).detach()) == 0.0
    assert len(told) == 3 and all("the file is missing" in reason for reason in told)
