"""`orchmllm COMMAND`: the console script, `python -m orchmllm`, and each command's help."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import entry_points, version

import pytest

from orchmllm.cli import COMMANDS, dispatch
from orchmllm.cli.options import in_one_line
from orchmllm.data.storage.clients import StorageError
from orchmllm.tools.doctor.synthetic import MODEL


def orchmllm(*argv: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "orchmllm", *argv], capture_output=True, text=True)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        dispatch([*command.split(), "--help"])
    said = capsys.readouterr().out
    assert stop.value.code == 0 and said.startswith(f"usage: orchmllm {command} ")
    assert len(said.splitlines()) <= 40 and max(map(len, said.splitlines())) <= 80
    assert re.search(rf"^ +orchmllm {command} \S", said, re.M)  # an example; tests/docs run it


def said_by(argv: list[str], capsys) -> tuple[object, str]:
    """(exit code, output) of a command."""
    try:
        code = dispatch(argv)
    except SystemExit as stop:
        code = stop.code
    return code, "".join(capsys.readouterr())


def test_without_a_command_or_with_a_wrong_one_the_commands_are_listed(capsys):
    wrong = orchmllm("trian")
    assert wrong.returncode == 2 and wrong.stderr.startswith(
        "error: 'trian' is no command of orchmllm; did you mean train?\n")
    asked = [said_by(argv, capsys) for argv in (
        ["--help"], [], ["papers"], ["papers", "--help"], ["papers", "simulat"])]
    assert [code for code, _ in asked] == [0, 2, 2, 0, 2]
    assert "'papers simulat' is no command of orchmllm; did you mean papers simulate?" in (
        asked[-1][1])
    for text in (wrong.stderr, *(text for _, text in asked)):
        assert all(f"  {name} " in text for name in COMMANDS)


def test_versions(capsys):
    assert said_by(["--version"], capsys) == (0, ", ".join(
        f"{name} {version(name)}" for name in ("orchmllm", "torch", "transformers")) + "\n")


@pytest.mark.parametrize("argv, text", [
    (["train", "r.yaml", "--valdate"], "option --valdate; did you mean --validate?"),
    (["dry-run", "r.yaml", "--netwrok", "4"], "option --netwrok; did you mean --network?"),
    (["train"], "RECIPE is missing"), (["plan", "job", "r.yaml"], "--ranks is missing"),
    (["report", "runs/x", "--gpu", "h200"], "--gpu has no effect without --score"),
    (["report", "runs/x", "--mix", "omni"], "--mix has no effect without --score"),
    (["generate", "runs/x", "What?", "--steps", "9"], "--steps has no effect without --out"),
    (["generate", "x", "?", "--video-audio"], "--video-audio has no effect without --video"),
    (["generate", "x", "?", "--video", "no.mp4", "--video-fps", "nan"], "--video-fps nan: must be"),
    (["generate", "x", "?", "--video", "no.mp4"], "argument --video: no.mp4: "),
    *((argv.split(), f"argument {argv.split()[-2]}: {said}") for command in (
        "generate x What? --out", "dry-run r.yaml --json", "plan job r.yaml --ranks 2 --out",
        "papers ablations r.yaml --json") for argv, said in (
            (f"{command} nowhere/x", "nowhere/x: nowhere is no folder; make it, or name another"),
            (f"{command} .", ". is a folder: name a file"))),
    (["compose", "--llm", "a", "--vision", "b", "--out", "c", "--audio-packed"],
     "--audio-packed has no effect without --audio"),
    (["compose", "--llm", "a", "--audio", "b", "--out", "c", "--max-pixels", "9"],
     "--max-pixels has no effect without --generator")])
def test_a_wrong_command_line_names_the_cure(argv, text, capsys):
    code, said = said_by(argv, capsys)
    assert code == 2 and text in said


def test_the_recipe_may_be_the_value_of_an_option(tmp_path, capsys):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"data: {{path: none}}\nmodel: {{config: {MODEL.config}}}\n",
                      encoding="utf-8")
    plain, *others = (said_by(["train", *words, "train.lr=0.5", "--print-config"], capsys)
                      for words in ([str(recipe)], ["--recipe", str(recipe)],
                                    ["run.seed=0", f"--recipe={recipe}"]))
    assert plain[0] == 0 and "lr: 0.5" in plain[1] and others[0] == plain
    assert others[1][0] == 0 and "lr: 0.5" in others[1][1]


def test_the_console_script_is_this_command():
    [script] = [e for e in entry_points(group="console_scripts") if e.name == "orchmllm"]
    assert script.value == "orchmllm.cli:main"


@pytest.mark.parametrize("error", [ValueError("a value"), FileNotFoundError("a file"),
                                   StorageError("a server"), MemoryError("an array")])
def test_what_cannot_be_done_is_one_line(error, capsys):
    @in_one_line
    def command(argv: list[str]) -> int:
        raise error

    assert command([]) == 2 and capsys.readouterr().err == f"error: {error}\n"
