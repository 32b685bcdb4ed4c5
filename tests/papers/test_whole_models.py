"""The commands of other papers' schemes on a model of transformers: its own FLOP, depth, widths and
parameters."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.cli import dispatch
from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.models.flops import Lengths, phase_lengths
from orchmllm.models.whole_flops import phase_work
from orchmllm.models.whole_model import meta_model, num_parameters
from orchmllm.papers.advice import recipe_profiles
from orchmllm.papers.simulate import lengths
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.predict.hardware import cluster

pytestmark = pytest.mark.whole
RECIPE = "recipes/qwen3_vl_8b.yaml"


def test_profiles_are_those_of_the_model():
    recipe = load_recipe(RECIPE)
    memory = MemoryModel.of(resolve(replace(recipe, fsdp=replace(
        recipe.fsdp, compute_dtype="bfloat16")), 1, 1))
    drawn = lengths(recipe, 50, "natural")
    once, twice = (recipe_profiles(memory, drawn, cluster("h100-sxm"), scale) for scale in (1, 2))
    whole = meta_model(recipe.model.folder)
    assert {n: p.layers for n, p in once.items()} == {
        "vision": len(whole.blocks()["vision"]), "llm": len(whole.blocks()["llm"])}
    assert sum(p.weight_bytes for p in once.values()) == 2 * num_parameters(whole.hf)
    config = whole.hf.config
    assert {n: p.boundary_bytes_per_row for n, p in once.items()} == {
        "vision": 2 * config.vision_config.hidden_size, "llm": 2 * config.text_config.hidden_size}
    for phase, p in once.items():
        found = phase_lengths(drawn, phase)
        mean = Lengths(*(np.array([x.mean()]) for x in (
            found.rows, found.positions, found.tokens)))
        flops = phase_work(phase, recipe.model, mean, "none").forward.sum()
        count = len(found.positions) / drawn.num_examples
        assert p.forward_flops == pytest.approx(flops * count, rel=1e-12)
        assert twice[phase].forward_flops == pytest.approx(
            p.forward_flops * (2 if phase == "vision" else 1), rel=1e-12)
        assert p.activation_bytes_per_row > p.layers * p.boundary_bytes_per_row


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
    assert "advice: " in told("plan", "units", *drawn, "--ranks", "64", "train.batch_size=4")
    assert "search " in told("plan", "split", *drawn)
    assert re.search(r"llm +\d+ of 36 layers", told("plan", "recompute", *drawn))
    table = told("ablations", *drawn, "--ranks", "8", "train.batch_size=4")
    mfu = {line[2:17].strip(): float(line[17:23]) for line in table.splitlines()
           if line.startswith("  ") and "%" in line}
    assert mfu["none"] < mfu["LLM only"] < mfu["paper"]
    assert dispatch(["papers", "plan", "units", *drawn, "model.config=",
                     f"model.pretrained={load_recipe(RECIPE).model.config}",
                     "model.lora.rank=8"]) == 2
    assert "units with adapters are not modelled: set it to 0" in capsys.readouterr().err
