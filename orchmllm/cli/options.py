"""Options that several commands take."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from orchmllm.estimate.hardware import Hardware, cluster
from orchmllm.estimate.workload import MIXES
from orchmllm.models.gpus import GPUS


def in_one_line(command: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """The command, which answers what cannot be done with one line and exit code 2."""
    @functools.wraps(command)
    def answered(argv: list[str]) -> int:
        try:
            return command(argv)
        except BrokenPipeError:  # the reader of the output left: no mistake
            raise
        except (ValueError, OSError) as error:
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


def command_parser(name: str, text: str, options: Sequence[tuple] = ()) -> argparse.ArgumentParser:
    """A parser of `orchmllm NAME` with (flag, default, help). A whole number with a default above
    0 has to be above 0 itself, others at least 0."""
    made = argparse.ArgumentParser(prog=f"orchmllm {name}", description=text,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default, told in options:
        kind = at_least(1 if default else 0) if isinstance(default, int) else type(default)
        made.add_argument(flag, type=kind, default=default, help=f"{told} ({default})")
    return made


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Adds what follows a recipe; such a parser is asked by parse_intermixed_args."""
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="replaces a value of the recipe")


def recipe_parser(name: str, text: str) -> argparse.ArgumentParser:
    """A parser of `orchmllm NAME RECIPE [section.key=value ...]`."""
    made = command_parser(name, text)
    made.add_argument("recipe", metavar="RECIPE", help="every key of it is in docs/recipe.md")
    add_overrides(made)
    return made


def lengths_parser(name: str, text: str, options: Sequence[tuple],
                   what: Sequence[str] = ()) -> argparse.ArgumentParser:
    """A parser of `orchmllm NAME [WHAT] --recipe R [--mix MIX] [section.key=value ...]`. options:
    see command_parser."""
    made = command_parser(name, text, options)
    if what:
        made.add_argument("what", choices=what, metavar="WHAT", help=", ".join(what))
    made.add_argument("--recipe", required=True, help="YAML file; data, model and train are used")
    made.add_argument("--mix", choices=MIXES, help="drawn lengths instead of the recipe's data")
    add_overrides(made)
    return made


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `cluster_of` reads, --mix and --lengths."""
    parser.add_argument("--gpu", default="h100-sxm", metavar="NAME",
                        help=f"of the data sheets: {', '.join(GPUS)} (h100-sxm)")
    parser.add_argument("--network", type=float, default=400, metavar="GBIT",
                        help="Gbit/s of each GPU between nodes (400)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(8)")
    shares = parser.add_mutually_exclusive_group()
    shares.add_argument("--efficiency", type=float, default=0, metavar="SHARE",
                        help="of the peak that products reach (0.6; attention two thirds of it)")
    shares.add_argument("--measured", type=Path, metavar="FILE",
                        help="shares measured by scripts/bench_gpu.py --out FILE")
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--mix", choices=MIXES, default="",
                         help="drawn lengths instead of the recipe's data")
    lengths.add_argument("--lengths", type=Path, metavar="FILE",
                         help='lengths of a file, a line an example: {"images": [[width, height]], '
                         '"audio_s": [seconds], "text_tokens": n}')


def cluster_of(args: argparse.Namespace) -> Hardware:
    """The hardware of the options. Raises ValueError."""
    return cluster(args.gpu, gbit=args.network, per_node=args.gpus_per_node,
                   efficiency=args.efficiency, measured=args.measured)
