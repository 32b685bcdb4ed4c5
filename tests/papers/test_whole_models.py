"""The commands of other papers' schemes on a model of transformers."""

from __future__ import annotations

import re

import pytest

from orchmllm.cli import dispatch

pytestmark = pytest.mark.whole
RECIPE = "recipes/qwen3_vl_8b.yaml"


@pytest.mark.slow
def test_the_commands_take_such_a_recipe(capsys):
    def told(*words: str) -> str:
        capsys.readouterr()
        assert dispatch(["papers", *words]) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    drawn = (RECIPE, "--mix", "natural")
    steps = {line.split()[0]: line.split()[4] for line in told(
        "simulate", "all", *drawn, "--ranks", "8", "--steps", "2", "train.batch_size=4"
    ).splitlines() if re.match(r"[a-z+-]+ +[\d.]+ ", line)}
    assert float(steps["per-phase"]) < float(steps["pre-balance"]) < float(steps["random"])
    table = told("ablations", *drawn, "--ranks", "8", "train.batch_size=4")
    mfu = {line[2:17].strip(): float(line[17:23]) for line in table.splitlines()
           if line.startswith("  ") and "%" in line}
    assert mfu["none"] < mfu["LLM only"] < mfu["paper"]
