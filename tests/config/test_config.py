"""Recipes: what is read, merged and kept; what is refused is in test_recipes.py."""

from __future__ import annotations

import os
import signal
import socket
import sys
from pathlib import Path

import pytest

from orchmllm import launch
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import (
    DataConfig,
    Recipe,
    RecipeError,
    RunConfig,
    TrainConfig,
    explain,
    load_recipe,
    read_recipe,
    to_yaml,
)
from orchmllm.config.schema import leaves, sections
from orchmllm.launch import World, world_from
from orchmllm.plan.balance import balance
from orchmllm.train import run_rank
from scripts.make_recipe_reference import main as make_reference
from tests.lib.commands import ROOT

MODEL = ModelConfig(config="m")
GOOD = "data: {path: x}\nmodel: {config: m}\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "r.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_numbers_and_overrides(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD + "train: {lr: 1e-4}\n"),
                         ["train.lr=3E-5", "balance.vision.policy=none", "train.num_steps=7"])
    assert (recipe.train.lr, recipe.balance.vision.policy, recipe.train.num_steps) == (
        3e-5, "none", 7)
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe


def test_a_number_on_the_command_line_is_text_where_a_key_takes_text(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD), ["profile.steps=10", "run.dir=007"])
    assert list(recipe.profile.window) == [10] and recipe.run.dir == "007"
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe


@pytest.mark.parametrize("text, value", [
    ("1e-4", 1e-4), ("1E+2", 100.0), ("-.5", None), (".5", 0.5), ("1_000.5", 1000.5), ("3", 3.0),
    ("0x10", 16.0), ("+2.", 2.0),
])
def test_numbers(tmp_path, text, value):
    recipe = write(tmp_path, GOOD + f"train: {{lr: {text}}}\n")
    if value is None:  # negative: a number, but not a learning rate
        with pytest.raises(RecipeError, match="must be greater than 0"):
            load_recipe(recipe)
    else:
        assert load_recipe(recipe).train.lr == value


@pytest.mark.parametrize("text", [
    "plain", "1e5", "1e-4", "010", "yes", "null", "2024-01-01", "a: b", "# c", "'", '"', "1:30",
    ".inf", "-", "~", "<<", "=", "ä/ü", "x" * 300, "a ", "{b}", "%", "*a", "&a", "!a", "0x1F", ".5",
])
def test_text_survives_the_round_trip(tmp_path, text):
    recipe = Recipe(run=RunConfig(dir=text), data=DataConfig(path="x"), model=MODEL)
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe


@pytest.mark.parametrize("number", [0.1, 1e-300, 1e16, 123456789.123, 1 / 3, 5e-324, 1.0])
def test_numbers_survive_the_round_trip(tmp_path, number):
    recipe = Recipe(data=DataConfig(path="x"), model=MODEL, train=TrainConfig(lr=number))
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe


def test_aliases_and_merge_keys(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD + """
balance:
  vision: &p {policy: none, tolerance: 0}
  audio: *p
  llm: {<<: *p, policy: greedy}
"""))
    b = recipe.balance
    assert (b.vision.policy, b.audio.policy, b.llm.policy) == ("none", "none", "greedy")


def test_what_the_command_line_replaces_is_not_judged(tmp_path):
    path = write(tmp_path, "data: {path: 5}\nmodel: {config: m}\ntrain: {lr: 0}\n")
    assert load_recipe(path, ["data.path=x", "train.lr=1", "train={batch_size: 2}",
                              "train.lr=2"]).train == TrainConfig(lr=2.0, batch_size=2)


def test_a_trial_run_keeps_the_default_warm_up(tmp_path):
    recipe = load_recipe(write(tmp_path, GOOD), ["train.num_steps=5"])
    assert load_recipe(write(tmp_path, to_yaml(recipe))).train.warmup_steps == 10


def test_values_say_where_they_come_from(tmp_path):
    path = write(tmp_path, "# a recipe\ndata:\n  path: x\ntrain: {lr: 1e-4}\nmodel: {config: m}\n")
    loaded = read_recipe(path, ["train.num_steps=7"])
    text = explain(loaded)
    said = {(x.split(":")[0].strip(), x.partition("  # ")[2]) for x in text.splitlines()}
    assert {("path", "recipe line 3"), ("lr", "recipe line 4"), ("num_steps", "command line"),
            ("batch_size", "default")} <= said
    assert load_recipe(write(tmp_path, text)) == loaded.recipe
    lists = ("data.sources.", "data.remote.roots.")  # which are empty here
    keys = sum(not leaf.path.startswith(lists) for leaf in leaves(Recipe))
    assert sum("  # " in x for x in text.splitlines()) == keys


def test_missing_recipe(tmp_path):
    with pytest.raises(RecipeError, match=f"recipe {tmp_path}: Is a directory$"):
        load_recipe(tmp_path)
    with pytest.raises(RecipeError, match="no/such/recipe.yaml: No such file or directory$"):
        load_recipe("no/such/recipe.yaml")


def test_every_key_is_documented_and_its_default_allowed(tmp_path):
    for leaf in leaves(Recipe):
        assert leaf.key.doc, leaf.path
        assert type(leaf.default) is leaf.kind or leaf.path in (
            "data.sources.path", "data.remote.roots.url"), leaf.path
    recipe = Recipe(data=DataConfig(path="x"), model=MODEL)
    assert load_recipe(write(tmp_path, to_yaml(recipe))) == recipe
    for path, cls in sections(Recipe):
        assert cls.__doc__ and not cls.__doc__.startswith(cls.__name__ + "("), path


def test_reference_pages_are_up_to_date(capsys):
    """`python scripts/make_recipe_reference.py` writes them."""
    assert make_reference(["--check"]) == 0, capsys.readouterr().err


def test_recipes_of_the_repository():
    """Those of a corpus leave open which model is trained on it."""
    for path in (ROOT / "recipes").glob("*.yaml"):
        is_complete = "\nmodel:" in path.read_text(encoding="utf-8")
        load_recipe(path, [] if is_complete else ["model.config=x"])


@pytest.mark.parametrize("overrides, said", [
    (["train.validate_every_steps=2", "data.num_validation=0"],
     "train.validate_every_steps = 2: validates on the rows that data.num_validation holds out"),
    (["profile.steps=9-10", "train.num_steps=9"],
     "profile.steps = '9-10': begins after the last step of the run (8)"),
])
def test_options_that_would_do_nothing_are_refused(overrides, said):
    with pytest.raises(RecipeError) as error:
        load_recipe(ROOT / "recipes" / "demo.yaml", overrides)
    assert said in str(error.value)


def test_ranks_from_torchrun():
    torchrun = dict(RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4",
                    MASTER_ADDR="a", MASTER_PORT="1", TORCHELASTIC_RESTART_COUNT="2")
    assert world_from(torchrun) == World(5, 8, 1, 4, "a", 1, 2)
    assert world_from({}) is None
    def srun(tasks: str, per_node: str) -> dict[str, str]:
        return {"SLURM_NTASKS": tasks, "SLURM_STEP_TASKS_PER_NODE": per_node}

    of_a_program = {k: v for k, v in torchrun.items() if k != "LOCAL_WORLD_SIZE"}
    for more, local_size in (
            ({}, 8), (srun("8", "2(x4)"), 2), (srun("8", "8"), 8), (srun("8", "5,3"), 8),
            (srun("2", "1(x2)"), 8)):  # one task a node, each of which started ranks
        assert world_from(of_a_program | more) == World(5, 8, 1, local_size, "a", 1, 2)
    with pytest.raises(ValueError, match="variable RANK is 'x', expected a number"):
        world_from(torchrun | {"RANK": "x"})
    for wrong in ({"RANK": "8"}, {"LOCAL_RANK": "4"}, {"RANK": "-1"}, {"LOCAL_WORLD_SIZE": "16"}):
        with pytest.raises(ValueError, match="the launcher says RANK=.* below these sizes"):
            world_from(torchrun | wrong)


def test_ranks_from_srun():
    srun = dict(SLURM_STEP_ID="0", SLURM_JOB_ID="7", SLURM_NTASKS="4", SLURM_NNODES="2",
                SLURM_PROCID="3", SLURM_LOCALID="1", MASTER_ADDR="a")
    assert world_from(srun) == World(3, 4, 1, 2, "a", 20007)
    for wrong in ({"SLURM_PROCID": "4"}, {"SLURM_LOCALID": "4"}):
        with pytest.raises(ValueError, match="srun says SLURM_PROCID=.* of SLURM_NTASKS=4"):
            world_from(srun | wrong)


def test_a_port_that_is_taken_is_named(monkeypatch, capsys):
    for owner, name, value in (  # which a rank changes
            (os, "environ", dict(os.environ)), (launch, "_had_group", False),
            (signal, "signal", print), (sys, "stdin", sys.stdin)):
        monkeypatch.setattr(owner, name, value)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        recipe = load_recipe(ROOT / "recipes" / "demo.yaml")
        assert run_rank(recipe, World(0, 2, 0, 2, "127.0.0.1", port), work=print) == 2
    assert f"error: MASTER_PORT={port} is in use on this node" in capsys.readouterr().err


SOURCES = """data:
  sources:
    - {path: a.json, weight: 2}
    - path: b
      row_format: asr
      weight: 1.5
  prefetch: 1
model: {config: m}
"""


def test_a_list_of_sources(tmp_path):
    loaded = read_recipe(write(tmp_path, SOURCES))
    first, second = loaded.recipe.data.sources
    assert (first.path, first.weight, first.row_format) == ("a.json", 2.0, "auto")
    assert (second.path, second.weight, second.row_format) == ("b", 1.5, "asr")
    text = explain(loaded)
    assert "prefetch: 1" in text and text.split("prefetch: 1")[1].split("\n")[0].endswith("line 7")
    assert load_recipe(write(tmp_path, text)) == loaded.recipe
    one = load_recipe(write(tmp_path, SOURCES), ["data.sources=[{path: c}]"])
    assert [s.path for s in one.data.sources] == ["c"]


@pytest.mark.parametrize("data, said", [
    ("sources: x", "line 2: data.sources is the value 'x', expected a list of sections with keys"),
    ("sources: [x]", "line 2: data.sources[0] is the value 'x', expected a section with keys"),
    ("sources: [{path: a, wieght: 1}]", "line 2: data.sources[0].wieght: unknown key; did you mean "
     "'data.sources.weight'?"),
    ("sources: [{path: a}, {weight: 1}]", "data.sources[1].path is missing: A JSON"),
    ("sources: [{path: a, weight: 1}, {path: b}]", "data.sources[1].weight = 0.0 (default): b "
     "has 0 of all weights: give every source 1/1000 of them or more, or none a weight"),
    ("sources: [{path: a, weight: 0.7}, {path: b, weight: 1.0e-9}]", "line 2: data.sources[1]."
     "weight = 1e-09: b has 1.4e-09 of all weights: give"),
    ("{path: a, sources: [{path: b}]}", "give data.path or data.sources, not both"),
    ("{streaming: true, sources: [{path: a}, {path: b}]}", "needs a weight for every source"),
    ("{streaming: true, path: a, num_validation: 2}", "a stream holds nothing out: set it to 0"),
    ("sources: []", "give a JSONL file or a folder"),
])
def test_broken_sources(tmp_path, data, said):
    with pytest.raises(RecipeError) as error:
        load_recipe(write(tmp_path, f"data:\n  {data}\nmodel: {{config: m}}\n"))
    assert said in str(error.value) and ": 1 problem\n" in str(error.value), str(error.value)


def test_names_of_other_programs_are_known(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'data.sources.row_format'?"):
        load_recipe(write(tmp_path, GOOD), ["data.sources=[{path: a, format: llava}]"])


def test_unknown_policies_are_refused_by_the_planner_too():
    with pytest.raises(ValueError, match="unknown policy 'local'; choose one of none, "):
        balance([1, 2], num_ranks=1, policy="local")


def test_a_resumed_run_keeps_its_examples_a_step_on_other_ranks():
    def examples(kept: int, **train) -> int:
        recipe = Recipe(data=DataConfig(path="x"), model=MODEL, train=TrainConfig(**train))
        return resolve(recipe, 3, 1, kept=kept).global_batch_size

    assert examples(0, batch_size=2, accumulation_steps=2) == 12
    assert examples(8, batch_size=2, accumulation_steps=2) == 8
    assert examples(8, global_batch_size=9) == 9  # which check_resumable compares
