"""Options that several commands take."""

from __future__ import annotations

import argparse
import difflib
import functools
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NoReturn

from orchmllm.data.storage.clients import StorageError
from orchmllm.launch import report_failure


def in_one_line(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """The command, which answers what cannot be done with one line and exit code 2."""
    @functools.wraps(command)
    def answered(argv: list[str]) -> int:
        try:
            return command(argv)
        except BrokenPipeError:  # as under `| head`, which is no error
            raise
        except (ValueError, OSError, StorageError, MemoryError) as error:
            report_failure(f"error: {error}")
            return 2
    return answered


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""
    def number(text: str) -> int:
        if not least <= int(text) < 2**63:  # what numpy and torch take
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least} and below 2**63")
        return int(text)
    return number


def new_file(text: str) -> Path:
    """The type of an option that names a file to write, so that what cannot be written is refused
    before minutes of work. Raises ArgumentTypeError."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text} is a folder: name a file")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: {path.parent} is no folder; make it, or name "
                                         "another")
    return path


def add_options(to: argparse._ActionsContainer, options: Sequence[tuple]) -> None:
    """Adds (flag, default, help) each. A default of False makes a switch, a tuple holds the
    choices, the default first, and a type or another callable reads what has no default. A whole
    number with a default above 0 has to be above 0 itself, others at least 0."""
    for flag, default, text in options:
        if default is False:
            how = {"action": "store_true"}
        elif callable(default):
            how = {"type": default}
        elif isinstance(default, tuple):
            how = {"choices": default, "default": default[0]}
        else:
            kind = at_least(1 if default else 0) if isinstance(default, int) else type(default)
            how = {"type": kind, "default": default, "metavar": None if kind is str else "N"}
        if "default" in how:
            text += f" ({how['default']})"
        to.add_argument(flag, help=text, **how)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The end of a message about a word that is not known: the nearest one that is."""
    near = difflib.get_close_matches(word, known, 1)
    return f"; did you mean {near[0]}?" if near else ""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Fills the paragraphs of a help text, and leaves those with indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n\n".join(
            part if re.search("^ ", part, re.M) else textwrap.fill(part, width)
            for part in text.strip().split("\n\n"))


class Parser(argparse.ArgumentParser):
    """The parser of a command, which knows what a recipe on the command line looks like."""

    def error(self, message: str) -> NoReturn:
        """Names the nearest option, or the nearest value of one, where it is not known."""
        unknown = re.match("unrecognized arguments: (-[^ =]*)", message)
        if unknown:
            message = f"unrecognized option {unknown[1]}" + did_you_mean(
                unknown[1], re.findall("--[a-z-]+", self.format_help()))
        chosen = re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message)
        if chosen:
            message += did_you_mean(chosen[1], chosen[2].replace("'", "").split(", "))
        super().error(message)

    def refuse_without(self, args: argparse.Namespace, needed: str, *flags: str) -> None:
        """An error where one of the flags is given, and not the one without which it has no effect.
        """
        for flag in flags:
            name = flag[2:].replace("-", "_")
            if not getattr(args, needed[2:]) and getattr(args, name) != self.get_default(name):
                self.error(f"{flag} has no effect without {needed}")

    def add_recipe(self, text: str = "every key of it is in docs/recipe.md",
                   before: str = "") -> None:
        """Adds RECIPE, or `--recipe RECIPE`, and the overrides that follow it. before: the usage's
        words for the arguments that come before it."""
        self.usage = f"%(prog)s [options] {before}RECIPE [section.key=value ...]"
        self.add_argument("recipe", nargs="?", default="", metavar="RECIPE", help=text)
        self.add_argument("overrides", nargs="*", metavar="section.key=value",
                          help="replaces a value of the recipe, e.g. train.lr=1e-4")
        self.add_argument("--recipe", dest="named", help=argparse.SUPPRESS)

    def parse_recipe(self, argv: Sequence[str], optional: bool = False) -> argparse.Namespace:
        """The arguments, with overrides before and after options. optional: RECIPE may be left
        out, and is "" then."""
        args = self.parse_intermixed_args(argv)
        words = filter(None, (args.named, args.recipe, *args.overrides))
        args.recipe, args.overrides = next(words, ""), [*words]
        if not args.recipe and not optional:
            self.error("RECIPE is missing: name a YAML file, e.g. recipes/demo.yaml")
        return args


def command_parser(name: str, text: str, options: Sequence[tuple] = ()) -> Parser:
    """A parser of `orchmllm NAME`. options: see add_options."""
    made = Parser(prog=f"orchmllm {name}", description=text,
                  formatter_class=Formatter)
    add_options(made, options)
    return made


def recipe_parser(name: str, text: str, options: Sequence[tuple] = ()) -> Parser:
    """A parser of `orchmllm NAME RECIPE [section.key=value ...]`. options: see add_options."""
    made = command_parser(name, text, options)
    made.add_recipe()
    return made
