"""`orchmllm COMMAND ...`, also as `python -m orchmllm COMMAND ...`: everything that is started from
a shell. A command is a module with `main(argv) -> exit code`, imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version

from orchmllm.cli.options import did_you_mean
from orchmllm.launch import exit_with

# Name -> (module, what it does).
COMMANDS = {
    "init": ("orchmllm.tools.init.command", "write a recipe for data, or the demo's"),
    "compose": ("orchmllm.tools.compose.command", "make one model of towers and an LLM"),
    "train": ("orchmllm.train", "train from a recipe"),
    "data": ("orchmllm.tools.data.command", "index, check or describe the data of a recipe"),
    "dry-run": ("orchmllm.tools.predict.dry_run_command",
                "predict memory, time and balance without GPUs"),
    "plan job": ("orchmllm.tools.predict.plan_job",
                 "search the batch size and sharding for a number of GPUs"),
    "compare": ("orchmllm.tools.compare", "train with balancing off and on, and compare"),
    "doctor": ("orchmllm.tools.doctor.command", "check this machine, or all machines of a job"),
    "report": ("orchmllm.tools.report.command", "show a run as one HTML page, or compare two"),
    "generate": ("orchmllm.tools.generate.command",
                 "ask a trained model about images and clips"),
    "export": ("orchmllm.tools.export.command", "write a checkpoint as Hugging Face folders"),
    "papers reproduce": ("orchmllm.papers.reproduce", "print the papers' tables beside ours"),
    "papers simulate": ("orchmllm.papers.simulate",
                        "try a scheme of the papers on a recipe's lengths"),
    "papers ablations": ("orchmllm.papers.ablations",
                         "compare the paper's balancing schemes, predicted"),
}


def usage() -> str:
    """The help text of `orchmllm`."""
    lines = [f"  {name:<16} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: orchmllm COMMAND ...", "", "commands:", *lines, "",
                      "`orchmllm COMMAND --help` says what a command takes, and",
                      "`orchmllm --version` which versions are installed."])


def versions() -> str:
    """The versions of orchmllm and of what decides how a model trains."""
    return ", ".join(f"{name} {version(name)}" for name in ("orchmllm", "torch", "transformers"))


def dispatch(words: Sequence[str]) -> int:
    """Runs the command that the words name; 2 for one that does not exist."""
    if not words or words[-1] in ("-h", "--help", "help") and not _command(words):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        print(versions())
        return 0
    name = _command(words)
    if not name:
        group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
        wrong = " ".join(words[:2] if group else words[:1])
        near = did_you_mean(wrong, [*COMMANDS, "--version"]) or did_you_mean(words[0], group)
        print(f"error: {wrong!r} is no command of orchmllm{near}\n{usage()}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name][0]).main(words[len(name.split()):])


def _command(words: Sequence[str]) -> str:
    """The command that the first one or two words name, or ""."""
    return next((name for n in (2, 1) if (name := " ".join(words[:n])) in COMMANDS), "")


def main() -> None:
    """The console script."""
    exit_with(dispatch)
