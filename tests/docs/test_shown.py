"""What README and docs show is what the commands print, and their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest

from orchmllm.cli import COMMANDS, dispatch
from orchmllm.tools.predict import dry_run_command
from tests.lib.commands import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_shows_what_data_stats_prints(capsys):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```\n\$ (orchmllm data stats[^\n]*)\n(.*?)\n```", text, re.S)
    assert dispatch(shlex.split(block[1])[1:]) == 0
    assert capsys.readouterr().out.rstrip() == block[2]
    assert text.count("\n") <= 120


@pytest.mark.slow
def test_the_dry_run_of_docs_scale_is_what_the_command_prints(capsys):
    def without_clock(text: str) -> str:
        return re.sub(r"(?m)^(  planning, ms|This took ).*$", "", text.rstrip())

    text = (ROOT / "docs/scale.md").read_text(encoding="utf-8")
    [(line, output)] = re.findall(r"```\n\$ (orchmllm dry-run .*)\n((?:.*\n)+?)```", text)
    assert dispatch(shlex.split(line)[1:]) == 0
    printed = without_clock(capsys.readouterr().out)
    for part in without_clock(output).split("\n...\n"):  # what lies between two is left out
        before, found, printed = printed.partition(part)
        assert found, f"{part}\nis not in\n{before}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_files_that_are_named_exist(page):
    text = page.read_text(encoding="utf-8")
    for name in re.findall(r"`((?:orchmllm|cpp|scripts|tests|examples|recipes|docs)/[\w/.]+\.\w+)`",
                           text):
        assert (ROOT / name).exists(), name


def commands(text: str) -> list[str]:
    """What is typed in a page's code: commands of ours and of scripts, continued lines joined."""
    text = text.replace("\\\n", " ")
    blocks = re.findall(r"```\w*\n(.*?)```", text, re.S)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines += re.findall(r"(?<!`)`([^`\n]+)`", text)
    return [line.split("  #")[0] for line in lines
            if re.match(r"(orchmllm|python -m orchmllm|python scripts/|torchrun|make) ?", line)]


def told_by(name: str) -> str:
    """The source of a command, with the modules that it shares options with."""
    path = ROOT / (COMMANDS[name][0].replace(".", "/") + ".py")
    text = path.read_text(encoding="utf-8")
    shared = re.findall(r"from orchmllm\.([\w.]+\.options|[\w.]+\.plan_job|train) import"
                        r"|import train\b", text)
    return text + "".join(
        (ROOT / "orchmllm" / ((s or "train").replace(".", "/") + ".py")).read_text(encoding="utf-8")
        for s in shared)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_commands_that_are_shown_exist(page):
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    for line in commands(page.read_text(encoding="utf-8")):
        words = line.split()
        if words[0] == "make":
            assert {w for w in words[1:] if re.fullmatch(r"[\w-]+", w)} <= set(targets), line
            continue
        if words[:2] == ["python", "-m"]:
            words = [*words[2].replace("orchmllm.train", "orchmllm train").split(), *words[3:]]
        if words[0] == "orchmllm":
            if len(words) == 1 or not re.fullmatch(r"[a-z][a-z-]*", words[1]):
                continue  # a word of a sentence, COMMAND, or --version
            names = [name for name in (" ".join(words[1:3]), words[1]) if name in COMMANDS]
            assert names, line
            source = told_by(names[0])
        else:
            script = next((w for w in words if w.endswith(".py")), None)
            if script is None or not (ROOT / script).is_file():
                assert script is None or words[0] == "torchrun", line
                continue
            source = (ROOT / script).read_text(encoding="utf-8")
        for flag in re.findall(r"(?<!\S)--[a-z][\w-]*", line):
            if words[0] != "torchrun" and flag not in ("--help",):
                assert re.search(f'"{flag}[" ]', source), (line, flag)


MODELS = ("mllm10b", "mllm84b")


def predicted(overrides: Sequence[str], out: Path) -> list[str]:
    """The cells of a line: of each model, seconds of a step without and with balancing, and how
    many times as fast that is."""
    cells = []
    for name in MODELS:
        assert dry_run_command.main([f"recipes/{name}.yaml", "--ranks", "256", "--json", str(out),
                                     *overrides]) == 0
        found = json.loads(out.read_text())
        before, after = (found["predicted"][how]["step_s"] for how in ("none", "balanced"))
        cells.append(f"{before:.1f} -> {after:.1f} s, {before / after:.2f}x")
    return cells


@pytest.mark.slow
def test_the_predictions_of_the_settings_are_those_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "docs/stages.md").read_text(encoding="utf-8")
    lines = re.findall(r"^\| [^|]* \| (none|`model[^|]*`) \| (.*x) \|$", text, re.M)
    assert len(lines) == 5
    for overrides, shown in lines:
        cells = predicted(re.findall(r"`(.*?)`", overrides), tmp_path / "out.json")
        assert shown == " | ".join(cells)
