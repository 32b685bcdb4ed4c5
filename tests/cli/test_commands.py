"""`orchmllm COMMAND`: the console script, `python -m orchmllm`, and each command's help."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest

from orchmllm.cli import COMMANDS, dispatch
from orchmllm.cli.options import in_one_line
from orchmllm.data.storage.clients import StorageError


def orchmllm(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "orchmllm", *argv], capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as stop:
        dispatch([command, "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and said.startswith("usage: ")
    assert command in said.splitlines()[0]


def test_without_a_command_or_with_a_wrong_one_the_commands_are_listed():
    asked, none, wrong = orchmllm("--help"), orchmllm(), orchmllm("trian")
    assert (asked.returncode, none.returncode, wrong.returncode) == (0, 2, 2)
    assert wrong.stderr.startswith("error: 'trian' is no command of orchmllm\n")
    for text in (asked.stdout, none.stdout, wrong.stderr):
        assert all(f"  {name} " in text for name in COMMANDS)


def test_the_console_script_is_this_command():
    [script] = [e for e in entry_points(group="console_scripts") if e.name == "orchmllm"]
    assert script.value == "orchmllm.cli:main"


def test_a_dry_run_of_a_wrong_recipe_is_refused(tmp_path):
    wrong = tmp_path / "r.yaml"
    wrong.write_text("train: {lr: -1}\n", encoding="utf-8")
    done = orchmllm("dry-run", str(wrong), "--world-size", "4")
    assert done.returncode == 2 and "train.lr = -1: must be greater than 0" in done.stderr


@pytest.mark.parametrize("error", [ValueError("a value"), FileNotFoundError("a file"),
                                   StorageError("a server")])
def test_what_cannot_be_done_is_one_line(error, capsys):
    @in_one_line
    def command(argv: list[str]) -> int:
        raise error

    assert command([]) == 2 and capsys.readouterr().err == f"error: {error}\n"
