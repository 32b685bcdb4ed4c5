"""A model of transformers through the commands: from a folder and a recipe of three lines to a
folder that transformers generates with."""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchmllm.cli import dispatch
from orchmllm.config.recipe import DataConfig
from orchmllm.data.stream import open_dataset
from orchmllm.models import families
from orchmllm.models.whole_model import meta_model
from tests.lib.commands import ROOT, make_demo_data, python
from tests.lib.whole_folders import write_model, write_rows

RECIPE = """\
model: {pretrained: whole}
data: {path: images.jsonl}
train: {num_steps: 20}
"""


def command(folder: Path, *args: str) -> tuple[int, str, str]:
    out = python("-m", "orchmllm", *args, cwd=folder)
    return out.returncode, out.stdout, out.stderr


def losses(run: Path) -> dict[int, float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def killed(folder: Path, *args: str) -> None:
    """The command, which is killed with its ranks once it has saved step 5."""
    process = subprocess.Popen(
        [sys.executable, "-m", "orchmllm", *args], cwd=folder, start_new_session=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    while not (folder / "balanced/checkpoints/step_00000005/manifest.json").exists():
        assert process.poll() is None
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.whole
def test_the_way_of_a_newcomer(tmp_path):
    """Train with balancing off and on, kill, resume on another number of ranks, export, generate.
    """
    write_model("qwen3_vl", tmp_path / "whole")
    demo = make_demo_data(tmp_path, 80)
    rows = [json.loads(line) for line in (demo / "data.jsonl").read_text().splitlines()]
    (tmp_path / "images.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows if not row["audios"]))
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    code, _, err = command(tmp_path, "train", "recipe.yaml", "run.dir=sampled",
                           "balance.enabled=false", "launch.nproc_per_node=2")
    assert code == 0, err
    on = ("train", "recipe.yaml", "run.dir=balanced", "checkpoint.every_steps=5")
    killed(tmp_path, *on, "launch.nproc_per_node=2")
    code, out, err = command(tmp_path, *on, "launch.nproc_per_node=3")
    assert code == 0, err
    assert "saved on 2 ranks, now 3" in out
    assert losses(tmp_path / "balanced") == pytest.approx(losses(tmp_path / "sampled"), abs=1e-6)
    assert len(losses(tmp_path / "balanced")) == 20
    code, _, err = command(tmp_path, "export", "balanced/checkpoints/step_00000020",
                           "--out", "exported")
    assert code == 0, err
    generate(tmp_path)
    answers = [command(tmp_path, "generate", folder, "What is this?", "--max-tokens", "7")
               for folder in ("balanced", "exported")]
    (code, of_run, _), (other, of_export, _) = answers
    assert code == other == 0 and len(of_run) > 2  # the run knows what ended answers in training
    assert of_export.startswith(of_run.rstrip("\n")), answers


def generate(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder / "exported")
    example = open_dataset(
        DataConfig(path=str(folder / "images.jsonl"), index_dir=str(folder / "index")),
        str(folder / "exported"), seed=0).load(0)
    out = model.generate(input_ids=example.input_ids[None], **example.media, max_new_tokens=4)
    assert out.shape == (1, len(example.input_ids) + 4)


@pytest.mark.whole
def test_what_cannot_be_trained_is_one_line_before_any_rank_starts(tmp_path, capsys):
    """A model whose encoders are not understood, a small vocabulary, and weights that are gone."""
    import transformers

    from orchmllm.train import main

    made = write_model("internvl", tmp_path / "model")
    write_rows(tmp_path, 1)
    (tmp_path / "recipe.yaml").write_text(f"model: {{pretrained: {tmp_path}/model}}\n"
                                          f"data: {{path: {tmp_path}/data.jsonl}}\n")

    def told() -> str:
        code = main([str(tmp_path / "recipe.yaml"), "--validate", f"run.dir={tmp_path}/run"])
        out, err = capsys.readouterr()
        assert code == (2 if err else 0) and err.count("\n") <= 1, err
        return out + err

    capsys.readouterr()
    assert "no problems" in told()
    meta_model.cache_clear()
    transformers.MllamaConfig().save_pretrained(tmp_path / "model")
    assert "MllamaForConditionalGeneration: its forward takes no media" in told()
    meta_model.cache_clear()  # else it is that of the folder as it was
    config = copy.deepcopy(made.config)
    config.get_text_config().vocab_size = 64
    config.save_pretrained(tmp_path / "model")
    assert "vocab_size is 64, but the tokenizer has" in told()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "model.pretrained: neither model.safetensors nor" in told()


def test_another_version_of_transformers_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    """Whatever needs the model says so before anything of transformers is imported that other
    versions do not have."""
    monkeypatch.setattr(families, "BEFORE", families.FIRST)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "recipe.yaml").write_text(f"model: {{pretrained: {tmp_path}}}\n"
                                          f"data: {{path: {tmp_path}/data.jsonl}}\n")
    for command in ("train", "dry-run", "data index", "data preview"):
        words = [*command.split(), str(tmp_path / "recipe.yaml"), f"run.dir={tmp_path}/run"]
        assert dispatch(words) == 2, command
        told = capsys.readouterr().err
        assert "is installed, but whole models were tried with >=5.22,<5.22: pip install" in told
        assert told.count("\n") == 1, command
