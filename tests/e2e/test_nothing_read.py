"""Training on nothing is told: the first medium that fails, steps without a target, and a modality
of which nothing can be read."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import CheckpointConfig, DataConfig, RunConfig
from orchmllm.data.media.medium import MediaError
from orchmllm.runtime.run_state import MIN_UNREADABLE
from tests.lib.drawn import write_model
from tests.lib.formats import write_jsonl
from tests.lib.ranks import run_ranks
from tests.lib.rows import row_problems
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.tokenizers import write_tokenizer
from tests.lib.training import train

pytestmark = pytest.mark.dist


def row(mark: str = "", name: str = "") -> dict:
    media = {"<image>": {"images": [name]}, "<audio>": {"audios": [name]}, "": {}}[mark]
    return {**media, "conversations": [{"from": "human", "value": f"{mark}What?"},
                                       {"from": "gpt", "value": "low"}]}


def corpus(folder: Path, rows: list) -> Path:
    write_model(folder / "model", write_tokenizer(folder), num_layers=1)
    Image.new("RGB", (56, 56), "red").save(folder / "good.png")
    noise = np.random.default_rng(0).integers(0, 255, (112, 112, 3), dtype=np.uint8)
    Image.fromarray(noise).save(folder / "whole.png")
    (folder / "cut.png").write_bytes((folder / "whole.png").read_bytes()[:-9000])
    soundfile.write(folder / "good.wav", np.zeros(4000), 16000)
    write_jsonl(folder / "data.jsonl", rows)
    return folder


def run_of(folder: Path, num_steps: int, dispatch: str = "load", **data):
    base = recipe(
        model=ModelConfig(config=str(folder / "model")),
        balance=BalanceConfig(enabled=False, ranks_per_node=2, dispatch=dispatch),
        data=DataConfig(path=str(folder), index_dir=str(folder / "index"), prefetch=1,
                        **{"max_failed_in_a_row": 0, "max_failed_percent": 100.0,
                           "max_lost_percent": 100.0, **data}),
        run=RunConfig(dir=str(folder / "run")), checkpoint=CheckpointConfig(asynchronous=False))
    return replace(base, train=replace(base.train, num_steps=num_steps, batch_size=2))


class FailsOnRank1(SyntheticDataset):
    """One medium cannot be read on rank 1, which is not the rank that has the terminal."""

    rank = 0

    def load(self, i, *, on_error=None, **how):
        out = super().load(i, **how)
        if self.rank == 1 and out.parts and not hasattr(self, "failed"):
            self.failed = True
            on_error(next(iter(out.parts)), MediaError("b.jpg", "the disk of rank 1 is broken"))
        return out


def output_of(world, run, on_rank_1: bool = False) -> tuple[str, str, str]:
    """(stdout, class of the error, its text) of this rank."""
    dataset = FailsOnRank1() if on_rank_1 else None
    if dataset is not None:
        dataset.rank = world.rank
    out, error = io.StringIO(), None
    with contextlib.redirect_stdout(out):
        try:
            train(world, run, dataset)
        except Exception as e:
            error = e
    return out.getvalue(), type(error).__name__ if error else "", str(error or "")


def metrics(folder: Path) -> list[dict]:
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").open()]
    assert not [p for r in rows for p in row_problems(r)]
    return [r for r in rows if "loss" in r]


@pytest.mark.parametrize("name, reason, dispatch, num_workers", [
    pytest.param("missing.png", "the file is missing", "load", 0, marks=pytest.mark.slow),
    ("cut.png", "truncated", "bytes", 0),
    pytest.param("/elsewhere/a.png", "is absolute and no media_root is declared", "tensors", 0,
                 marks=pytest.mark.slow),
    pytest.param("cut.png", "truncated", "load", 2, marks=pytest.mark.slow)])
def test_a_modality_that_cannot_be_read_stops_the_run(tmp_path, name, reason, dispatch,
                                                      num_workers):
    folder = corpus(tmp_path, [row("<image>", name), row("<audio>", "good.wav")] * 20)
    run = run_of(folder, 20, dispatch, num_workers=num_workers)
    (first, kind, text), (second, *other) = run_ranks(output_of, 2, run)
    assert [kind, text] == other and kind == "MediaLimitError"
    count = int(text.split("none of the ")[1].split()[0])
    assert text.startswith("vision: ") and MIN_UNREADABLE <= count < MIN_UNREADABLE + 4
    assert name in text and reason in text and "media_root" in text
    [warning] = [s for s in first.splitlines() if s.startswith("warning: ")]
    assert name in warning and reason in warning and "data.jsonl, row" in warning
    assert str(folder / "run" / "quarantine.jsonl") in first and not second
    assert (folder / "run" / "quarantine.jsonl").is_file()


@pytest.mark.parametrize("good, bad, limits", [
    pytest.param(row("<image>", "good.png"), row("<image>", "missing.png"), {},
                 marks=pytest.mark.slow),
    (row(), {"conversations": []}, {"max_failed_in_a_row": 20, "max_failed_percent": 60.0})])
def test_a_healthy_corpus_with_broken_rows_goes_on(tmp_path, good, bad, limits):
    folder = corpus(tmp_path, [bad if k % 2 else good for k in range(4 * MIN_UNREADABLE)])
    (first, kind, text), _ = run_ranks(output_of, 2, run_of(folder, MIN_UNREADABLE, **limits))
    assert not kind, text
    assert first.count("warning: not usable") == 1 and f"finished: {MIN_UNREADABLE} steps" in first
    failed = [json.loads(line) for line in (folder / "run" / "quarantine.jsonl").open()]
    assert len(failed) == 2 * MIN_UNREADABLE


def test_few_media_are_judged_at_the_end(tmp_path):
    folder = corpus(tmp_path, [row()] * 9 + [row("<image>", f"{k}.png") for k in range(3)])
    (first, kind, text), (_, *other) = run_ranks(output_of, 2, run_of(folder, 3))
    assert [kind, text] == other and kind == "MediaLimitError"
    assert "vision: none of the 3 media" in text and "finished: 3 steps" in first
    assert (folder / "run" / "checkpoints").is_dir() and len(metrics(folder)) == 3
    (again, *told), _ = run_ranks(output_of, 2, run_of(folder, 3))  # as a launcher may try
    assert told == [kind, text] and "no step was left to do" in again


def test_the_failure_of_another_rank_reaches_the_terminal(tmp_path):
    run = run_of(tmp_path, 3)
    run = replace(run, model=SHALLOW)
    (first, kind, text), (second, *_) = run_ranks(output_of, 2, run, True)
    assert not kind and not second, text
    [warning] = [s for s in first.splitlines() if s.startswith("warning: ")]
    assert "the disk of rank 1 is broken" in warning and "quarantine.jsonl" in first


def test_a_step_without_targets_has_no_loss(tmp_path):
    folder = corpus(tmp_path, [row()] * 4)
    (folder / "data.jsonl").write_text(json.dumps(row()) + "\n" + "no JSON\n" * 3)
    (first, kind, text), _ = run_ranks(output_of, 2, run_of(folder, 1))
    assert not kind and metrics(folder)[0]["loss"] > 0, text
    assert "step 1/1 loss " in first
    bad = tmp_path / "bad"
    bad.mkdir()
    corpus(bad, [row()])
    with (bad / "data.jsonl").open("w") as f:
        f.write(json.dumps(row()) + "\n" + '{"conversations": []}\n' * 60)
    (first, kind, text), _ = run_ranks(output_of, 2, run_of(bad, 3))
    assert not kind, text
    empty = [r for r in metrics(bad) if not r["num_global_targets"]]
    assert len(empty) >= 2 and all(r["loss"] is None and not r["nonfinite"] for r in empty)
    steps = [s for s in first.splitlines() if s.startswith("step ")]
    assert sum("no targets | " in s for s in steps) == len(empty)
    assert "0.0000" not in first and "nan" not in first
