"""Looks at a recipe's data before training on it.

    orchmllm data index RECIPE     lengths of every row, for fast starts
    orchmllm data lint RECIPE      rows and media that cannot be used, and why;
                                   where 2,000 rows of each source go
    orchmllm data stats RECIPE     lengths, and what balancing gives
    orchmllm data stats DATA --model FOLDER    the same of a data file or folder
    orchmllm data preview RECIPE   examples as training sees them

Every command but preview builds the length index first. Where there is one, only the rows that were
unusable are read again; lint reads all. Exit code: 0 fine, 1 problems found, 2 the recipe or a
source cannot be read.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.data.formats.open import DataSource, index_path
from orchmllm.data.index import LengthIndex
from orchmllm.data.lengths import LengthReader
from orchmllm.data.survey import survey
from orchmllm.tools.data.build_index import build_index
from orchmllm.tools.data.stats import drawn, of_data, show
from orchmllm.tools.predict.examples import dataset_of

# What stands before a colon is the only command that has the option.
OPTIONS = (
    ("--workers", os.cpu_count() or 1, "processes that read rows and headers"),
    ("--decode", False, "lint: also decode every medium, as training would (much slower)"),
    ("--ranks", 0, "stats: ranks to predict for; 0: launch.nproc_per_node, or 8; 64 without data"),
    ("--model", str, "stats without a recipe: folder of the model, which has to be given"),
    ("--batch-size", 30, "stats without a recipe: examples a rank"),
    ("--row", 1, "preview: the first row, counted over all sources"),
    ("--count", 1, "preview: rows to show"))


def parse(argv: list[str]) -> argparse.Namespace:
    parser = command_parser("data", __doc__, OPTIONS)
    parser.add_argument("command", choices=("index", "lint", "stats", "preview"), metavar="WHAT",
                        help="index, lint, stats or preview")
    parser.add_recipe("YAML file; only data, model, balance and train are used. stats also takes a "
                      "data file or folder instead, or nothing: a mix drawn from published length "
                      "statistics; then --model", before="WHAT ")
    args = parser.parse_recipe(argv, optional=True)
    if not is_recipe(args.recipe) and (args.command != "stats" or args.overrides):
        parser.error(f"{args.recipe} is no recipe: index, lint, preview and overrides need a YAML "
                     "file" if args.recipe else "RECIPE is missing: name a YAML file")
    command = args.command + " without a recipe" * (not is_recipe(args.recipe))
    for flag, _, text in OPTIONS:
        only, colon, _ = text.partition(": ")
        name = flag[2:].replace("-", "_")
        if colon and not command.startswith(only) and (
                getattr(args, name) != parser.get_default(name)):
            parser.error(f"{flag} is an option of {only}, and not of {args.command} here")
    if not is_recipe(args.recipe) and not args.model:
        parser.error("--model is missing: name the folder of a model, for which the data are "
                     "measured (`orchmllm init DATA` writes a small one)")
    return args


def is_recipe(path: str) -> bool:
    """Whether `path` is a recipe and not a data file or folder."""
    return path.endswith((".yaml", ".yml"))


def index_all(
    sources: list[DataSource], reader: LengthReader, folder: Path, num_workers: int, *,
    fresh: bool = False,
) -> list[LengthIndex]:
    """Builds or refreshes all indexes, with a progress bar; prints a line per source. fresh: all
    rows are read, whether there is an index or not."""
    out = []
    for source in sources:
        print(source, flush=True)
        started = time.perf_counter()
        with tqdm(total=len(source), unit="row", desc=source.name, disable=None) as bar:
            index, num_read = build_index(source, reader, folder, num_workers=num_workers,
                                          fresh=fresh, progress=bar.update)
        print(f"  {len(index.start) and index.start[-1]} segments, {len(index.problems)} unusable "
              f"rows; {num_read} rows read in {time.perf_counter() - started:.1f} s -> "
              f"{index.folder}", flush=True)
        out.append(index)
    return out


def lint(sources: list[DataSource], indexes: list[LengthIndex]) -> int:
    """Prints a line per unusable row; returns their number."""
    for source, index in zip(sources, indexes, strict=True):
        for row, problem in sorted(index.problems.items()):
            file, number = source.store.place(row)
            about = f"{problem.path}: " if problem.path else ""
            print(f"{file}, row {number}: {about}{problem.reason}")
    return sum(len(index.problems) for index in indexes)


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


@in_one_line
def main(argv: list[str]) -> int:
    args = parse(argv)
    recipe = (load_recipe(args.recipe, args.overrides) if is_recipe(args.recipe)
              else of_data(args.recipe, args.model, args.batch_size))
    if not args.recipe:
        return drawn(recipe, args)
    dataset = dataset_of(recipe)
    if args.command == "preview":
        from orchmllm.tools.data.preview import preview

        return preview(dataset, args.row - 1, args.count)
    sources, reader = dataset.sources, dataset.reader
    indexes = index_all(sources, reader, index_path(recipe.data.index_dir), args.workers,
                        fresh=args.command == "lint")
    if args.command == "stats":
        survey(sources, reader, replace(recipe.data, max_lost_percent=100), print, 2000)
        show(recipe, args, sources, indexes)
    if args.command != "lint":
        return 0
    num_problems = lint(sources, indexes) + (lint_decoding(recipe) if args.decode else 0)
    for source in sources:
        try:
            survey([source], reader, recipe.data, print, 2000)
        except ValueError as error:
            print(f"a run does not start: {error}")
            num_problems = max(1, num_problems)
    print(f"{num_problems} problem(s) in {sum(map(len, sources))} rows")
    return int(num_problems > 0)
