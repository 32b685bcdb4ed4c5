"""Tries a recipe without its GPUs: shards the model without memory, plans a drawn workload, and
prints what to expect.

    orchmllm dry-run recipes/mllm84b.yaml --world-size 2560 [section.key=value ...]

It is `python -m orchmllm.train --recipe RECIPE --dry-run`, with its exit codes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from orchmllm import train


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchmllm dry-run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="every key of it is in docs/recipe.md")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="replaces a value of the recipe")
    parser.add_argument("--world-size", type=int, default=0, metavar="N", help="number of ranks")
    parser.add_argument("--ablations", action="store_true",
                        help="compare balancing schemes instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    what = "--ablations" if args.ablations else "--dry-run"
    written = ["--json", str(args.json)] if args.json else []
    return train.main(["--recipe", args.recipe, what, "--world-size", str(args.world_size),
                       *written, *args.overrides])
