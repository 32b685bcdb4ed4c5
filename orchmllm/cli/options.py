"""Options that several commands take."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from orchmllm.data.storage.clients import StorageError
from orchmllm.models.gpus import GPUS
from orchmllm.tools.predict.hardware import Hardware, cluster
from orchmllm.tools.predict.workload import MIXES


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
    for flag, default, told in options:
        if default is False:
            to.add_argument(flag, action="store_true", help=told)
        elif callable(default):
            to.add_argument(flag, type=default, help=told)
        elif isinstance(default, tuple):
            first = default[0]
            to.add_argument(flag, choices=default, default=first, help=f"{told} ({first})")
        else:
            kind = at_least(1 if default else 0) if isinstance(default, int) else type(default)
            to.add_argument(flag, type=kind, default=default, help=f"{told} ({default})")


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


def lengths_parser(name: str, text: str, options: Sequence[tuple],
                   what: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser of `orchmllm NAME [WHAT] --recipe R [--mix MIX] [section.key=value ...]`. options:
    see add_options."""
    made = command_parser(name, text, options)
    if what:
        made.add_argument("what", choices=what, metavar="WHAT", help=", ".join(what))
    made.add_argument("--recipe", required=True, help="YAML file; data, model and train are used")
    made.add_argument("--mix", choices=MIXES, help="drawn lengths instead of the recipe's data")
    add_overrides(made)
    return made


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `cluster_of` reads, --mix and --lengths."""
    add_options(parser, (
        ("--gpu", "h100-sxm", f"of the data sheets: {', '.join(GPUS)}"),
        ("--network", 400.0, "Gbit/s of each GPU between nodes"),
        ("--gpus-per-node", 8, "of the cluster")))
    add_options(parser.add_mutually_exclusive_group(), (
        ("--efficiency", 0.0, "share of the peak that products reach, attention two thirds of it; "
         "0: products 0.6, attention 0.4"),
        ("--measured", Path, "shares measured by scripts/bench_gpu.py --out FILE")))
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--mix", choices=MIXES, default="",
                         help="drawn lengths instead of the recipe's data")
    add_options(lengths, (("--lengths", Path, "lengths of a file, a line an example: "
                           '{"images": [[width, height]], "audio_s": [seconds], '
                           '"text_tokens": n}'),))


def cluster_of(args: argparse.Namespace) -> Hardware:
    """The hardware of the options. Raises ValueError."""
    return cluster(args.gpu, gbit=args.network, per_node=args.gpus_per_node,
                   efficiency=args.efficiency, measured=args.measured)
