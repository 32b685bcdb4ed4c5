"""Tries a recipe without its GPUs: plans a workload, and prints what to expect: memory, time and
balance.

    orchmllm dry-run recipes/mllm84b.yaml --ranks 2560 [section.key=value ...]

Lengths are the recipe's own where `orchmllm data index RECIPE` has been run, else a drawn mix.
Exit code: 0 it fits, 2 it does not, or cannot run.
"""

from __future__ import annotations

import json

from orchmllm.cli.options import in_one_line, new_file, recipe_parser
from orchmllm.config.job import default_world
from orchmllm.config.recipe import load_recipe
from orchmllm.tools.predict.dry_run import dry_run
from orchmllm.tools.predict.examples import examples_of
from orchmllm.tools.predict.options import cluster_of, cluster_options
from orchmllm.tools.predict.text import dry_run_text


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for what cannot run on these ranks."""
    parser = recipe_parser("dry-run", __doc__, (
        ("--ranks", 0, "number of ranks; 0: those that the recipe starts, or one "
         "shard group, or one node"),
        ("--json", new_file, "also write what was found")))
    cluster_options(parser)
    args = parser.parse_recipe(argv)
    recipe, hardware = load_recipe(args.recipe, args.overrides), cluster_of(args)
    ranks, why = args.ranks, "--ranks"
    if not ranks:
        ranks, why = default_world(recipe, hardware.ranks_per_node)
        why += "; --ranks N for others"
    found = dry_run(recipe, ranks, hardware,
                    examples=examples_of(recipe, args.mix, args.lengths))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    print(dry_run_text(found | {"world_size_from": why}))
    return 0 if found["fits"] else 2
