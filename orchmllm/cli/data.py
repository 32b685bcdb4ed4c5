"""Looks at a recipe's data before training on it.

    orchmllm data index RECIPE   lengths of every row, for fast starts (dispatch: load)
    orchmllm data lint RECIPE    every row and medium that cannot be used, and why
    orchmllm data stats RECIPE   lengths, what balancing gives, a plot of the composition

Every command builds or refreshes the length index first. Exit code: 0 fine, 1 problems found,
2 the recipe or a source cannot be read.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from tqdm import tqdm

from orchmllm.config import Recipe, RecipeError, SourceConfig, load_recipe
from orchmllm.data.formats.open import DataSource, beside, index_path, open_source
from orchmllm.data.index import LengthIndex, build_index
from orchmllm.data.lengths import LengthReader
from orchmllm.data.tokenizer import ChatTokenizer


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchmllm data", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("index", "lint", "stats"))
    parser.add_argument("recipe", help="YAML file; only data, model, balance and train are used")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value",
                        help="replaces a value of the recipe")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1,
                        help="processes that read rows and headers")
    parser.add_argument("--decode", action="store_true",
                        help="lint: also decode every medium, as training would (much slower)")
    parser.add_argument("--ranks", type=int, default=0,
                        help="stats: ranks to predict for (0: launch.nproc_per_node, or 8)")
    parser.add_argument("--out", type=Path, default=Path("composition.png"),
                        help="stats: where the plot goes")
    args = parser.parse_intermixed_args(argv)
    if args.workers < 1 or args.ranks < 0:
        parser.error("--workers must be >= 1 and --ranks >= 0")
    return args


def open_recipe(recipe: Recipe) -> tuple[list[DataSource], LengthReader]:
    """Raises ValueError naming what cannot be read."""
    data, folder = recipe.data, index_path(recipe.data.index_dir)
    configs = data.sources or (SourceConfig(path=data.path),)
    sources = [open_source(config, folder) for config in configs]
    tokenizer = ChatTokenizer(data.tokenizer or beside(configs[0].path))
    return sources, LengthReader(tokenizer, recipe.model.vision.geometry,
                                 recipe.model.audio.geometry, data.max_example_tokens)


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


def lint_decoding(recipe: Recipe) -> int:
    """Decodes every medium; prints a line per failure; returns their number."""
    from orchmllm.data.dataset import ConversationDataset

    sources, planner = open_recipe(recipe)
    dataset = ConversationDataset(
        [s.config for s in sources], tokenizer=planner.tokenizer, vision=planner.vision,
        audio=planner.audio, max_example_tokens=planner.max_example_tokens,
        index_dir=recipe.data.index_dir or None)
    count = 0
    for i in tqdm(range(len(dataset)), unit="row", desc="decoding", disable=None):
        failures: list = []
        if dataset.problem(i) is None:
            dataset.load(i, on_error=lambda *failure, found=failures: found.append(failure))
        for segment, error in failures:
            line = dataset.describe(i, segment)
            print(f"{line['data_file']}, row {line['row']}: {error.path}: {error.reason}")
            count += 1
    return count


def stats(recipe: Recipe, args: argparse.Namespace, sources: list[DataSource],
          indexes: list[LengthIndex]) -> None:
    from orchmllm.data.stats import plot, predict, read_lengths, table

    lengths = read_lengths([s.name for s in sources], indexes)
    print("\nLLM tokens per example that has the modality (share: of all tokens of the source)")
    print(table(lengths))
    ranks = args.ranks or recipe.launch.nproc_per_node or 8
    predicted = predict(indexes, recipe, ranks)
    print(f"\nslowest rank / mean, {ranks} ranks x {recipe.train.batch_size} examples, predicted "
          "from FLOPs")
    print(f"{'phase':<8} {'sampled':>8} {'balanced':>9}")
    for phase, (before, after) in predicted.items():
        if phase != "step":
            print(f"{phase:<8} {before:>8.2f} {after:>9.2f}")
    print(f"a balanced step takes {predicted['step'][1]:.2f} of an unbalanced one's time "
          f"({1 / predicted['step'][1]:.2f}x faster; communication not counted)")
    plot(lengths, args.out, f"{', '.join(lengths.names)}: {len(lengths.source)} examples")
    print(f"plot: {args.out}")


def main(argv: list[str]) -> int:
    args = parse(argv)
    try:
        recipe = load_recipe(args.recipe, args.overrides)
        sources, planner = open_recipe(recipe)
        indexes = index_all(sources, planner, index_path(recipe.data.index_dir), args.workers)
    except (RecipeError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.command == "stats":
        stats(recipe, args, sources, indexes)
    if args.command != "lint":
        return 0
    num_problems = lint(sources, indexes) + (lint_decoding(recipe) if args.decode else 0)
    print(f"{num_problems} problem(s) in {sum(map(len, sources))} rows")
    return int(num_problems > 0)
