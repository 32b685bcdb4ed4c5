"""Tries a recipe without its GPUs: shards the model without memory, plans a workload, and prints
what to expect: memory, time and balance.

    orchmllm dry-run recipes/mllm84b.yaml --world-size 2560 [section.key=value ...]

Lengths are the recipe's own where `orchmllm data index RECIPE` has been run, else a drawn mix.
Exit code: 0 it fits, 2 it does not, or cannot run.
"""

from __future__ import annotations

from pathlib import Path

from orchmllm.cli.options import at_least, cluster_of, cluster_options, in_one_line, recipe_parser
from orchmllm.config import read_recipe
from orchmllm.estimate.text import run


@in_one_line
def main(argv: list[str]) -> int:
    parser = recipe_parser("dry-run", __doc__)
    parser.add_argument("--world-size", type=at_least(1), default=0, metavar="N",
                        help="number of ranks (those that the recipe starts, or one shard group, "
                        "or one node)")
    cluster_options(parser)
    parser.add_argument("--ablations", action="store_true",
                        help="compare balancing schemes instead; lengths are drawn unless --mix or "
                        "--lengths says otherwise")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what was found")
    args = parser.parse_intermixed_args(argv)
    loaded = read_recipe(args.recipe, args.overrides)
    return run(loaded, args.world_size, ablations=args.ablations, json_path=args.json,
               hardware=cluster_of(args), mix=args.mix, lengths=args.lengths)
