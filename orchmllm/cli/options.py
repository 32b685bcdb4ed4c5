"""Options that several commands take."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence

from orchmllm.data.storage.clients import StorageError


def in_one_line(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """The command, which answers what cannot be done with one line and exit code 2."""
    @functools.wraps(command)
    def answered(argv: list[str]) -> int:
        try:
            return command(argv)
        except BrokenPipeError:  # the reader of the output left: no mistake
            raise
        except (ValueError, OSError, StorageError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
    return answered


def at_least(least: int) -> Callable[[str], int]:
    """The type of an option that is a whole number."""
    def number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return int(text)
    return number


def add_options(to: argparse._ActionsContainer, options: Sequence[tuple]) -> None:
    """Adds (flag, default, help) each. A default of False makes a switch, a tuple holds the
    choices, the default first, and a type or another callable reads what has no default. A whole
    number with a default above 0 has to be above 0 itself, others at least 0."""
    for flag, default, text in options:
        if default is False:
            to.add_argument(flag, action="store_true", help=text)
        elif callable(default):
            to.add_argument(flag, type=default, help=text)
        elif isinstance(default, tuple):
            first = default[0]
            to.add_argument(flag, choices=default, default=first, help=f"{text} ({first})")
        else:
            kind = at_least(1 if default else 0) if isinstance(default, int) else type(default)
            to.add_argument(flag, type=kind, default=default, help=f"{text} ({default})")


def command_parser(name: str, text: str, options: Sequence[tuple] = ()) -> argparse.ArgumentParser:
    """A parser of `orchmllm NAME`. options: see add_options."""
    made = argparse.ArgumentParser(prog=f"orchmllm {name}", description=text,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(made, options)
    return made


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds what follows a recipe; such a parser is asked by parse_intermixed_args."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="replaces a value of the recipe")


def recipe_parser(name: str, text: str, options: Sequence[tuple] = ()) -> argparse.ArgumentParser:
    """A parser of `orchmllm NAME RECIPE [section.key=value ...]`. options: see add_options."""
    made = command_parser(name, text, options)
    made.add_argument("recipe", metavar="RECIPE", help="every key of it is in docs/recipe.md")
    add_overrides(made)
    return made
