"""Looks at a recipe's data before training on it.

    orchmllm data index RECIPE   lengths of every row, for fast starts (dispatch: load)
    orchmllm data lint RECIPE    every row and medium that cannot be used, and why
    orchmllm data stats RECIPE   lengths, what balancing gives, a plot of the composition
    orchmllm data stats DATA --ranks 64    the same of a data file or folder, without a recipe
    orchmllm data preview RECIPE           examples as training sees them, with what is learnt

Every command but preview builds or refreshes the length index first. Exit code: 0 fine, 1 problems
found, 2 the recipe or a source cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from orchmllm.cli.data_stats import drawn, of_data, show
from orchmllm.config import Recipe, RecipeError, load_recipe
from orchmllm.data.formats.open import DataSource, index_path
from orchmllm.data.index import LengthIndex, build_index
from orchmllm.data.lengths import LengthReader
from orchmllm.data.storage.clients import StorageError
from orchmllm.estimate.lengths import open_recipe
from orchmllm.estimate.workload import MODELS

# Options that one command has, alone or without a recipe.
ONLY = {"decode": "lint", "ranks": "stats", "out": "stats", "model": "stats without a recipe",
        "batch_size": "stats without a recipe", "row": "preview", "count": "preview",
        "html": "preview"}


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchmllm data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("index", "lint", "stats", "preview"))
    parser.add_argument("recipe", nargs="?", default="", metavar="RECIPE",
                        help="YAML file; only data, model, balance and train are used. stats also "
                        "takes a data file or folder instead, or nothing: a mix drawn from "
                        "published length statistics")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="replaces a value of the recipe")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes that read rows and headers")
    parser.add_argument("--decode", action="store_true",
                        help="lint: also decode every medium, as training would (much slower)")
    parser.add_argument("--ranks", type=int, default=0,
                        help="stats: ranks to predict for (0: launch.nproc_per_node, or 8)")
    parser.add_argument("--model", choices=tuple(MODELS), default="10b",
                        help="stats without a recipe: a model of OrchMLLM Table 1 (default 10b)")
    parser.add_argument("--batch-size", type=int, default=30, metavar="N",
                        help="stats without a recipe: examples a rank (default 30)")
    parser.add_argument("--out", type=Path, default=Path("composition.png"),
                        help="stats: where the plot goes")
    parser.add_argument("--row", type=int, default=1, metavar="N",
                        help="preview: the first row, counted over all sources (default 1)")
    parser.add_argument("--count", type=int, default=3, metavar="N",
                        help="preview: rows to show (default 3)")
    parser.add_argument("--html", type=Path, metavar="FILE",
                        help="preview: also a page with the pictures and spectrograms")
    args = parser.parse_intermixed_args(argv)
    if args.workers < 1 or args.ranks < 0 or args.batch_size < 1:
        parser.error("--workers and --batch-size must be >= 1, --ranks >= 0")
    if not is_recipe(args.recipe) and (args.command != "stats" or args.overrides):
        parser.error(f"{args.recipe or 'nothing'} is no recipe: index, lint and overrides need a "
                     "YAML file")
    command = args.command + " without a recipe" * (not is_recipe(args.recipe))
    for name, only in ONLY.items():
        if not command.startswith(only) and getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name.replace('_', '-')} is an option of {only}, and not of "
                         f"{args.command} here")
    return args


def is_recipe(path: str) -> bool:
    """Whether `path` is a recipe and not a data file or folder."""
    return path.endswith((".yaml", ".yml"))


def index_all(
    sources: list[DataSource], planner: LengthReader, folder: Path, num_workers: int
) -> list[LengthIndex]:
    """Builds or refreshes all indexes, with a progress bar; prints a line per source."""
    out = []
    for source in sources:
        print(source, flush=True)
        started = time.perf_counter()
        with tqdm(total=len(source), unit="row", desc=source.name, disable=None) as bar:
            index, num_read = build_index(source, planner, folder, num_workers=num_workers,
                                          progress=bar.update)
        print(f"  {len(index.start) and index.start[-1]} segments, {len(index.problems)} unusable "
              f"rows; {num_read} rows read in {time.perf_counter() - started:.1f} s -> "
              f"{index.folder}", flush=True)
        out.append(index)
    return out


def lint(sources: list[DataSource], indexes: list[LengthIndex]) -> int:
    """Prints a line per unusable row; returns their number."""
    for source, index in zip(sources, indexes, strict=True):
        for row, problem in sorted(index.problems.items()):
            where = f"{source.store.file(row)}, row {source.store.number(row)}"
            print(f"{where}: {problem.path + ': ' if problem.path else ''}{problem.reason}")
    return sum(len(index.problems) for index in indexes)


def dataset_of(recipe: Recipe):
    """The map-style dataset of a recipe's sources. Raises ValueError naming what cannot be read."""
    from orchmllm.data.stream import open_dataset

    return open_dataset(replace(recipe.data, streaming=False), recipe.model.vision.geometry,
                        recipe.model.audio.geometry, seed=recipe.run.seed)


def lint_decoding(recipe: Recipe) -> int:
    """Decodes every medium; prints a line per failure; returns their number."""
    dataset, count = dataset_of(recipe), 0
    for i in tqdm(range(len(dataset)), unit="row", desc="decoding", disable=None):
        failures: list = []
        if dataset.problem(i) is None:
            dataset.load(i, on_error=lambda *failure, found=failures: found.append(failure))
        for segment, error in failures:
            line = dataset.describe(i, segment)
            print(f"{line['data_file']}, row {line['row']}: {error.path}: {error.reason}")
            count += 1
    return count


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        return run(args)
    except (RecipeError, StorageError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def run(args: argparse.Namespace) -> int:
    """Returns the exit code. Raises RecipeError, StorageError, ValueError or OSError where
    something cannot be read."""
    recipe = (load_recipe(args.recipe, args.overrides) if is_recipe(args.recipe)
              else of_data(args.recipe, args.model, args.batch_size))
    if not args.recipe:
        return drawn(recipe, args)
    if args.command == "preview":
        from orchmllm.cli.data_preview import preview

        return preview(dataset_of(recipe), args.row - 1, args.count, args.html)
    sources, planner = open_recipe(recipe)
    indexes = index_all(sources, planner, index_path(recipe.data.index_dir), args.workers)
    if args.command == "stats":
        show(recipe, args, sources, indexes)
    if args.command != "lint":
        return 0
    num_problems = lint(sources, indexes) + (lint_decoding(recipe) if args.decode else 0)
    print(f"{num_problems} problem(s) in {sum(map(len, sources))} rows")
    return int(num_problems > 0)
