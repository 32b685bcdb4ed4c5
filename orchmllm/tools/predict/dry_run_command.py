"""Tries a recipe without its GPUs: plans a workload, and prints what to expect: memory, time and
balance.

    orchmllm dry-run recipes/mllm84b.yaml --ranks 2560 [section.key=value ...]

Lengths are the recipe's own where `orchmllm data index RECIPE` has been run, else a drawn mix.
Exit code: 0 it fits, 2 it does not, or cannot run.
"""

from __future__ import annotations

from pathlib import Path

from orchmllm.cli.options import in_one_line, recipe_parser
from orchmllm.config.recipe import read_recipe
from orchmllm.tools.predict.options import cluster_of, cluster_options
from orchmllm.tools.predict.text import run


@in_one_line
def main(argv: list[str]) -> int:
    parser = recipe_parser("dry-run", __doc__, (
        ("--ranks --world-size", 0, "number of ranks; 0: those that the recipe starts, or one "
         "shard group, or one node"),
        ("--json", Path, "also write what was found")))
    cluster_options(parser)
    args = parser.parse_recipe(argv)
    loaded = read_recipe(args.recipe, args.overrides)
    return run(loaded, args.ranks, json_path=args.json,
               hardware=cluster_of(args), mix=args.mix, lengths=args.lengths)
