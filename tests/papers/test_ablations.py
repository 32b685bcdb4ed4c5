"""The paper's ablations on the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from orchmllm.papers.ablations import main, padded
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout
from orchmllm.plan.step import build_plan
from tests.lib.drawn import with_processor
from tests.plan.test_plan_schemes import spec


def test_ablations_are_of_the_lengths_and_the_world_that_are_asked_for(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"model: {{config: {with_processor()}}}\ndata: {{path: nowhere}}\n"
                      "train: {batch_size: 2}\n", encoding="utf-8")
    lines = tmp_path / "lengths.jsonl"
    lines.write_text('{"images": [[640, 480]], "text_tokens": 50}\n' * 30, encoding="utf-8")
    found = {}
    for name, args in (("drawn", ()), ("omni", ("--mix", "omni")),
                       ("file", ("--lengths", str(lines))),
                       ("twice", ("train.accumulation_steps=2",))):
        path = tmp_path / f"{name}.json"
        assert main([str(recipe), "--ranks", "2", "--json", str(path), *args]) == 0
        assert capsys.readouterr().out.startswith("Lengths: ")
        table = json.loads(path.read_text())["tables"][0]
        found[name] = [row["tokens_per_gpu"] for row in table["rows"].values()]
    assert len({tuple(f) for f in found.values()}) == 4
    assert found["file"][0] == pytest.approx(found["file"][-1])  # all alike: nothing to balance
    assert main([str(recipe), "--ranks", "9", "fsdp.shard_size=2"]) == 2
    assert "which does not divide the 9 ranks" in capsys.readouterr().err


def test_a_rank_pads_its_clips_to_its_longest_one():
    """Each clip is sampled on a rank of its own; the first and the last are encoded on rank 0."""
    clips = [SegmentLengths(rows, -(-rows // 2), 9, (1, 1, rows)) for rows in (100, 40, 31)]
    image = SegmentLengths(16, 16, 4, (1, 4, 4))
    layout = BatchLayout.concat([BatchLayout.from_segments(i, 1, [
        (TEXT, text_lengths(3)), (AUDIO, clip), (VISION, image)]) for i, clip in enumerate(clips)])
    plan = build_plan(layout, {"vision": np.arange(3), "audio": np.array([0, 1, 0])},
                      np.arange(3), spec())
    made, here = padded(plan).layout, layout.segments[AUDIO]
    assert made.rows[here].tolist() == [100, 40, 100]
    assert made.attn_len[here].tolist() == [50, 20, 50]
    assert layout.rows[here].tolist() == [100, 40, 31]  # the plan that moves them has their own
    others = layout.modality != AUDIO
    assert (made.rows == layout.rows)[others].all() and (made.num_tokens == layout.num_tokens).all()
