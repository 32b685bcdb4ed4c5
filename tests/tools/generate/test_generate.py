"""`orchmllm generate`: the export of a run answers what the run has learnt, as its samples did."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from orchmllm.cli import dispatch
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.runtime.metrics import read_rows
from orchmllm.tools.generate.whole import sampling
from tests.lib.commands import TINY
from tests.lib.ranks import run_ranks
from tests.lib.training import train

pytestmark = pytest.mark.dist
TEXT = "Say red."


def learnt(world, recipe: Recipe) -> None:
    train(world, recipe)


class Trained:
    """A run that has learnt its examples by heart. rows: of the data; run, exported: folders."""

    def __init__(self, root: Path, demo: Path) -> None:
        rows = [json.loads(line) for line in (demo / "data.jsonl").read_text().splitlines()]
        picked = [next(r for r in rows if len(r["images"]) == i and len(r["audios"]) == a)
                  for i, a in ((1, 0), (0, 1), (1, 1))]
        for row in picked:
            row["conversations"] = row["conversations"][:2]
        both = picked[2]
        both["conversations"][0]["value"] = "<image>\n<audio>\nWhat is this?"
        said = [{"from": "human", "value": TEXT}, {"from": "gpt", "value": "red red."}]
        self.rows = [{"images": [], "audios": [], "conversations": said}, *picked, both]
        data = root / "data.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in self.rows))
        self.run, self.exported, self.demo = root / "run", root / "exported", demo
        recipe = load_recipe("recipes/demo.yaml", [
            *TINY, f"run.dir={self.run}", "train.num_steps=36", "train.batch_size=4",
            "train.lr=1e-2", "data.num_validation=1", "train.sample_every=36",
            f"model.config={demo}/model", "launch.nproc_per_node=1",
            f"data.sources=[{{path: {data}, media_root: {demo}}}]", "data.path="])
        run_ranks(learnt, 1, recipe)
        assert dispatch(["export", str(self.run), "--out", str(self.exported)]) == 0

    def asked(self, row: dict) -> list[str]:
        """The arguments that ask what a row asks."""
        media = [(f"--{kind}", str(self.demo / name)) for kind in ("image", "audio")
                 for name in row[f"{kind}s"]]
        question = row["conversations"][0]["value"].rpartition(">\n")[2]
        return [*(word for pair in media for word in pair), question]


@pytest.fixture(scope="module")
def trained(tmp_path_factory, demo_corpus) -> Trained:
    return Trained(tmp_path_factory.mktemp("generate"), demo_corpus)


def answered(capsys, folder: Path, *argv: str) -> tuple[str, str]:
    """(answer, what is said beside it) of `orchmllm generate`."""
    capsys.readouterr()
    assert dispatch(["generate", str(folder), *argv]) == 0
    said = capsys.readouterr()
    return said.out.removesuffix("\n"), said.err


def test_an_export_answers_what_the_run_has_learnt_and_stops(trained, capsys):
    for row in trained.rows:
        answer, said = answered(capsys, trained.exported, *trained.asked(row))
        assert answer == row["conversations"][1]["value"] and "cut off" not in said
    answer, said = answered(capsys, trained.exported, TEXT, "--max-tokens", "1")
    assert answer == "red" and "1 in it: cut off at --max-tokens 1" in said
    [line] = read_rows(trained.run / "samples.jsonl")  # without a cache, in training
    row = trained.rows[-1]["conversations"]
    assert (line["answer"], line["expected"], line["ended"]) == (
        row[1]["value"], row[1]["value"], True)


def test_tokens_are_drawn_from_all_of_those_that_top_p_leaves():
    """transformers keeps the 50 best ones where nothing else is said."""
    args = Namespace(seed=0, max_tokens=3, temperature=2.0, top_p=0.9)
    assert sampling(args) == {"max_new_tokens": 3, "do_sample": True, "temperature": 2.0,
                              "top_p": 0.9, "top_k": 0}
    args.temperature = 0.0
    assert sampling(args) == {"max_new_tokens": 3, "do_sample": False}


@pytest.mark.slow
def test_drawn_tokens_depend_on_the_seed_alone(trained, capsys):
    drawn = [answered(capsys, trained.exported, "Repeat: blue.", "--temperature", "5", "--seed",
                      seed, "--max-tokens", "12")[0] for seed in ("1", "1", "2")]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy, certain = (answered(capsys, trained.exported, "Repeat: blue.", "--max-tokens", "12",
                                *more) for more in ((), ("--temperature", "5", "--top-p", "1e-6")))
    assert greedy == certain


@pytest.mark.parametrize("flag, name, text", [
    ("--image", "none.jpg", "the file is missing"), ("--audio", "none.wav", "the file is missing"),
    ("--image", __file__, "UnidentifiedImageError: no decoder knows its format")])
def test_a_medium_that_cannot_be_read_is_told_before_a_model_is_loaded(flag, name, text, capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch(["generate", "no/model", flag, name, "What?"])
    said = capsys.readouterr()
    assert stop.value.code == 2 and said.out == ""
    assert f"error: argument {flag}: {name}: {text}" in said.err.splitlines()[-1]


def test_a_folder_without_a_model_names_what_can_be_given(tmp_path, capsys):
    assert dispatch(["generate", str(tmp_path), "What?"]) == 2
    assert f"error: {tmp_path} is no run.dir with checkpoints, no" in capsys.readouterr().err
