"""What TensorBoard and W&B get of a run, and trackers that fail or do not end."""

from __future__ import annotations

import json
import struct
import sys
import threading
import time
import types
from pathlib import Path
from unittest.mock import Mock

import pytest

from orchmllm import launch, train
from orchmllm.config.recipe import RunConfig
from orchmllm.runtime import trackers
from orchmllm.runtime.display import RunDisplay
from tests.lib.rows import a_row, scalars


def show_steps(folder: Path, *trackers: str, steps: tuple[int, ...] = (0, 1, 1, 2)) -> None:
    """Of a run, which went back after its second step."""
    (folder / "recipe.yaml").write_text(
        "train: {lr: 0.5}\ndata: {path: 'https://a.org/b.jsonl?signature=1'}\n")
    display = RunDisplay(RunConfig(dir=str(folder), trackers=trackers))
    display.start(3, first_step=steps[0])
    for step in steps:
        display.step(a_row(step, loss=3.0 - step))
    display.validation({"step": steps[-1] + 1, "validation_loss": 1.0})
    display.close()


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard")
    show_steps(tmp_path, "tensorboard")
    assert [(e.step, e.value) for e in scalars(tmp_path, "loss")] == [
        (0, 3.0), (1, 2.0), (1, 2.0), (2, 1.0)]
    for name in ("llm/imbalance_after", "vision/moved_bytes", "validation_loss", "data_wait_s"):
        assert scalars(tmp_path, name)


def test_tensorboard_shows_no_step_again_after_it_went_back(tmp_path):
    """By a rollback, and to the checkpoint of a step whose validation is there already."""
    pytest.importorskip("tensorboard")
    for steps in ((0, 1, 2, 3, 1, 2), (3, 4), (3, 4)):
        show_steps(tmp_path, "tensorboard", steps=steps)
        for file in (tmp_path / "tensorboard").iterdir():  # as if earlier: names tell the time
            file.rename(file.with_name(file.name.replace("tfevents.", "tfevents.0")))
    assert [e.step for e in scalars(tmp_path, "loss")] == [0, 1, 1, 2, 3, 3, 4]
    assert [e.step for e in scalars(tmp_path, "validation_loss")] == [3, 5]


def wandb_rows(file: Path) -> list[dict]:
    """What a run's file of W&B holds so far: after a checksum the size of a record, whether it is
    whole (1), and the record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, rows = file.read_bytes(), 7, []
    while at < len(data):
        size, whole = struct.unpack("<HB", data[at + 4: at + 7])
        assert whole == 1
        items = Record.FromString(data[at + 7: at + 7 + size]).history.item
        rows.append({i.nested_key[0]: json.loads(i.value_json) for i in items})
        at += 7 + size
    return [row for row in rows if row]


def test_wandb_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    show_steps(tmp_path, "wandb")
    (file,) = tmp_path.glob("wandb/offline-run-*/run-*.wandb")
    while len(rows := wandb_rows(file)) < 5:  # its own process writes it
        time.sleep(0.05)
    assert [(x["step"], x["loss"]) for x in rows[:4]] == [(0, 3.0), (1, 2.0), (1, 2.0), (2, 1.0)]
    assert rows[4]["step"] == 3 and rows[4]["validation_loss"] == 1.0


@pytest.mark.parametrize("error, told", [
    (RuntimeError("no API key"), "(RuntimeError: no API key)"),
    (SystemExit(1), "(RuntimeError: SystemExit(1))")])
def test_a_tracker_that_fails_is_named_once_and_dropped(
        error, told, tmp_path, monkeypatch, capsys):
    """Here one that cannot begin, and one that breaks in its second step."""
    module = types.ModuleType("wandb")  # as where nobody has logged in
    module.Settings = dict
    module.init = raises = Mock(side_effect=error)
    monkeypatch.setitem(sys.modules, "wandb", module)
    writer = Mock()
    writer.add_scalar.side_effect = lambda name, value, step: 1 / (1 - step)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", Mock(
        SummaryWriter=lambda folder, purge_step: writer))
    show_steps(tmp_path, "wandb", "tensorboard")
    out = capsys.readouterr().out
    assert raises.call_args.kwargs["config"] == {
        "train.lr": 0.5, "data.path": "https://a.org/b.jsonl"}
    assert raises.call_count == 1 and writer.add_scalar.call_args.args[2] == 1
    assert not writer.close.called
    warnings = [line for line in out.splitlines() if line.startswith("warning")]
    assert sorted(w.partition(" failed")[0].rpartition(" ")[2] for w in warnings) == [
        "tensorboard", "wandb"]
    assert any(told in w for w in warnings) and "step 3/3" in out


@pytest.mark.parametrize("waits", ["init", "init.return_value.log", "init.return_value.finish"])
def test_a_tracker_that_waits_is_not_waited_for(waits, tmp_path, monkeypatch, capsys):
    """As W&B where its server is gone, or where it asks who is there."""
    monkeypatch.setattr(trackers, "CLOSE_S", 0.05)
    server = threading.Event()
    monkeypatch.setitem(sys.modules, "wandb", Mock(**{waits: lambda *_, **__: server.wait()}))
    show_steps(tmp_path, "wandb")
    assert "warning: run.trackers: wandb has not ended after 0.05 s" in capsys.readouterr().out
    if not waits.endswith("finish"):
        monkeypatch.setattr(trackers, "MOST_ROWS", 2)
        show_steps(tmp_path, "wandb", steps=(0, 1, 2, 3, 4, 5))
        assert "(TimeoutError: 2 rows wait for it)" in capsys.readouterr().out
    server.set()


def test_what_a_package_asks_in_a_rank_nobody_is_waited_for(monkeypatch):
    """As W&B does where nobody has logged in."""
    monkeypatch.setattr(sys, "stdin", Mock())
    monkeypatch.setattr(train.signal, "signal", Mock())
    monkeypatch.setattr(launch, "process_group", Mock(side_effect=TimeoutError))
    with pytest.raises(TimeoutError):
        train.run_rank(Mock(), Mock(), Mock())
    assert not sys.stdin.isatty() and sys.stdin.read() == ""
    sys.stdin.close()
