"""`orchmllm COMMAND ...`, also as `python -m orchmllm COMMAND ...`: everything that is started from
a shell. A command is a module with `main(argv) -> exit code`, imported when it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from orchmllm.launch import exit_with

# Name -> (module, what it does).
COMMANDS = {
    "train": ("orchmllm.train", "train from a recipe"),
    "data": ("orchmllm.tools.data.command", "index, check or describe the data of a recipe"),
    "preprocess": ("orchmllm.tools.preprocess.command",
                   "read and decode for runs on other machines"),
    "dry-run": ("orchmllm.tools.predict.dry_run_command",
                "predict memory, time and balance without GPUs"),
    "compare": ("orchmllm.tools.compare", "train with balancing off and on, and compare"),
    "simulate": ("orchmllm.papers.simulate", "try a scheme of the papers on a recipe's lengths"),
    "ablations": ("orchmllm.papers.ablations", "compare the paper's balancing schemes, predicted"),
    "plan": ("orchmllm.papers.plan", "decide on units, splits or recomputation before a run"),
    "profile": ("orchmllm.tools.predict.profile_command",
                "measure a recipe's phases on the device at hand"),
    "doctor": ("orchmllm.tools.doctor.command", "check this machine, or all machines of a job"),
    "report": ("orchmllm.tools.report.command", "show a run, or two, as one HTML page"),
    "reproduce": ("orchmllm.papers.reproduce", "print the papers' tables beside ours"),
    "export": ("orchmllm.tools.export.command", "write a checkpoint as Hugging Face folders"),
}


def usage() -> str:
    """The help text of `orchmllm`."""
    lines = [f"  {name:<10} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: orchmllm COMMAND ...", "", "commands:", *lines, "",
                      "`orchmllm COMMAND --help` says what a command takes."])


def dispatch(argv: Sequence[str]) -> int:
    """Runs the command that `argv` names; 2 for one that does not exist."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] not in COMMANDS:
        print(f"error: {argv[0]!r} is no command of orchmllm\n{usage()}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[argv[0]][0]).main(list(argv[1:]))


def main() -> None:
    """The console script."""
    exit_with(dispatch)
