"""What a scheme of the papers would give on a recipe's own lengths.

    orchmllm papers simulate length-group recipes/mllm10b.yaml --mix natural

Without --mix the lengths are those of the recipe's data.
"""

from __future__ import annotations

import os

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.papers.schemes import SCHEMES, run, scheme_table
from orchmllm.plan.layout import BatchLayout
from orchmllm.sharding.fits import with_real_batch
from orchmllm.tools.predict.examples import dataset_of, of_indexes, of_mix
from orchmllm.tools.predict.workload import MIXES


def lengths(recipe: Recipe, count: int, mix: str | None) -> BatchLayout:
    """`count` examples on one rank: drawn from a mix, or of the recipe's data by its length index,
    which is made first if it is not there. Raises ValueError for data that cannot be read."""
    if mix:
        return of_mix(recipe, mix).draw(1, count, recipe.run.seed)
    from orchmllm.data.formats.open import index_path
    from orchmllm.tools.data.command import index_all

    rows = dataset_of(recipe)
    indexes = index_all(rows.sources, rows.reader, index_path(recipe.data.index_dir),
                        os.cpu_count() or 1)
    return of_indexes(recipe, rows.sources, indexes).draw(1, count, recipe.run.seed)


@in_one_line
def main(argv: list[str]) -> int:
    schemes = "\n".join(f"  {n:<18} {s.paper}" for n, s in SCHEMES.items())
    parser = command_parser("papers simulate", f"{__doc__}\n\n{schemes}", (
        ("--ranks", 64, "data-parallel ranks"), ("--steps", 5, "global batches that are drawn")))
    parser.add_argument("what", choices=("all", *SCHEMES), metavar="WHAT", help="all, or a scheme")
    parser.add_recipe("YAML file; data, model and train are used", before="WHAT ")
    parser.add_argument("--mix", choices=MIXES, help="drawn lengths instead of the recipe's data")
    args = parser.parse_recipe(argv)
    recipe = with_real_batch(load_recipe(args.recipe, args.overrides), args.ranks)
    batch = recipe.train.batch_size
    pool = lengths(recipe, args.ranks * batch * args.steps, args.mix)
    names = SCHEMES if args.what == "all" else [args.what]
    found = {name: run(SCHEMES[name], pool, recipe.model, num_ranks=args.ranks, batch=batch,
                       seed=recipe.run.seed) for name in names}
    print(f"{args.ranks} ranks x {batch} examples, {pool.num_examples} examples of "
          f"{args.mix or 'the recipe'}, seed {recipe.run.seed}; modelled from FLOPs, communication "
          "not counted")
    print("slowest rank over mean by phase; step: over perfect balance; MB a rank and step\n")
    print(scheme_table(found))
    return 0
