"""`orchmllm data stats` without a recipe: on a data file, and on drawn lengths."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from orchmllm import launch
from orchmllm.launch import exit_with
from orchmllm.tools.data.command import main
from tests.lib.drawn import with_processor
from tests.lib.formats import QUESTIONS, llava_row, write_jsonl, write_media

GAIN = re.compile(r"Without balancing, a step takes (\d\.\d\d)x as long")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with data.jsonl and its media; the index cache is below it too."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    write_media(tmp_path)
    write_jsonl(tmp_path / "data.jsonl", [llava_row(*q) for q in QUESTIONS])
    return tmp_path


def test_a_data_file_for_a_model(folder, capsys):
    stats = ["stats", "data.jsonl", "--model", str(with_processor())]
    assert main([*stats, "--ranks", "2", "--batch-size", "3"]) == 0
    said = capsys.readouterr().out
    assert "2 ranks x 3 examples" in said and float(GAIN.search(said)[1]) >= 1
    assert re.search(r"^data.jsonl\n  text +12 +\d+", said, re.M) and "h100" not in said
    table = said[said.index("\nLLM tokens per example"):]
    assert max(map(len, table.splitlines())) <= 80
    phases = re.compile(r"^(\w+) +\d\.\d\d +\d\.\d\d$", re.M)
    assert phases.findall(said) == ["vision", "audio", "llm"]
    write_jsonl(folder / "data.jsonl", [
        row for row in (llava_row(*q) for q in QUESTIONS) if not row["audios"]])
    assert main([*stats, "--ranks", "2", "--batch-size", "3"]) == 0
    assert phases.findall(capsys.readouterr().out) == ["vision", "llm"]


def test_lengths_are_drawn_without_torch_for_a_model_that_is_known():
    code = ("import sys; from orchmllm.cli import dispatch; "
            "assert not dispatch(['data', 'stats', '--ranks', '16', '--model', sys.argv[1]]); "
            "sys.exit('torch' in sys.modules)")
    assert main(["stats", "--ranks", "16", "--model", str(with_processor())]) == 0  # counts it
    done = subprocess.run([sys.executable, "-c", code, str(with_processor())],
                          capture_output=True, text=True)
    assert float(GAIN.search(done.stdout)[1]) > 1.1, done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("argv, said", [
    (["stats", "nowhere.jsonl", "--model", str(with_processor())], "nowhere.jsonl: no such file"),
    (["stats", "data.jsonl"], "--model is missing: name the folder of a model"),
    (["stats", "data.jsonl", "--model", "nowhere"], "nowhere"),
    (["lint", "data.jsonl"], "data.jsonl is no recipe"),
    (["stats", "data.jsonl", "train.batch_size=2"], "overrides need a YAML file"),
])
def test_mistakes(folder, argv, said, capsys):
    try:
        code = main(argv)
    except SystemExit as e:
        code = e.code
    assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("argv, text", [
    (["index", "r.yaml", "--decode"], "--decode is an option of lint"),
    (["lint", "r.yaml", "--ranks", "4"], "--ranks is an option of stats"),
    (["stats", "r.yaml", "--row", "2"], "--row is an option of preview"),
    (["stats", "r.yaml", "--batch-size", "4"], "--batch-size is an option of stats without a rec")])
def test_an_option_that_has_no_effect_is_an_error(argv, text, capsys):
    with pytest.raises(SystemExit):
        main(argv)
    assert text in capsys.readouterr().err


def test_a_reader_that_has_left_is_no_error(folder, monkeypatch, capsys):
    """As `orchmllm data stats data.jsonl | head -0`."""
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(launch, "_exit_code", None)  # afterwards, too: pytest is no such command
    monkeypatch.setattr(sys, "argv", ["orchmllm", "stats", "data.jsonl", "--model",
                                      str(with_processor())])
    with open(write, "w") as left, pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "stdout", left)
        exit_with(main)
    assert ended.value.code == 141 and "error" not in capsys.readouterr().err
