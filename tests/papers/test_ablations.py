"""The paper's ablations on the command line."""

from __future__ import annotations

import json

import pytest

from orchmllm.papers.ablations import main
from tests.lib.drawn import with_processor


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
