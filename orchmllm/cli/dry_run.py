"""Tries a recipe without its GPUs: shards the model without memory, plans a workload, and prints
what to expect: memory, time and balance.

    orchmllm dry-run recipes/mllm84b.yaml --world-size 2560 [section.key=value ...]

Lengths are the recipe's own where `orchmllm data index RECIPE` has been run, else a drawn mix.
Exit code: 0 it fits, 2 it does not, or cannot run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from orchmllm.config import RecipeError, read_recipe
from orchmllm.estimate.hardware import cluster
from orchmllm.estimate.text import run
from orchmllm.estimate.workload import MIXES
from orchmllm.models.gpus import GPUS


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `cluster_of` reads."""
    parser.add_argument("--gpu", default="h100-sxm", metavar="NAME",
                        help=f"of the data sheets: {', '.join(GPUS)} (h100-sxm)")
    parser.add_argument("--network", type=float, default=400, metavar="GBIT",
                        help="Gbit/s of each GPU between nodes (400)")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N", help="(8)")
    parser.add_argument("--efficiency", type=float, default=0, metavar="SHARE",
                        help="of the peak that products reach (0.6; attention two thirds of it)")
    parser.add_argument("--measured", type=Path, metavar="FILE",
                        help="shares measured by scripts/bench_gpu.py --out FILE")


def cluster_of(args: argparse.Namespace):
    """The hardware of the options. Raises ValueError."""
    return cluster(args.gpu, gbit=args.network, per_node=args.gpus_per_node,
                   efficiency=args.efficiency, measured=args.measured)


def length_options(parser: argparse.ArgumentParser) -> None:
    """Adds --mix and --lengths."""
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--mix", choices=MIXES, default="",
                         help="drawn lengths instead of the recipe's data")
    lengths.add_argument("--lengths", type=Path, metavar="FILE",
                         help='lengths of a file, a line an example: {"images": [[width, height]], '
                         '"audio_s": [seconds], "text_tokens": n}')


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchmllm dry-run", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", metavar="RECIPE", help="every key of it is in docs/recipe.md")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="replaces a value of the recipe")
    parser.add_argument("--world-size", type=int, default=0, metavar="N",
                        help="number of ranks (those that the recipe starts, or one shard group, "
                        "or one node)")
    cluster_options(parser)
    length_options(parser)
    parser.add_argument("--ablations", action="store_true",
                        help="compare balancing schemes instead")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found")
    return parser.parse_intermixed_args(argv)


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        loaded = read_recipe(args.recipe, args.overrides)
    except (RecipeError, ValueError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return run(loaded, args.world_size, ablations=args.ablations, json_path=args.json,
               hardware=lambda: cluster_of(args), mix=args.mix, lengths=args.lengths)
