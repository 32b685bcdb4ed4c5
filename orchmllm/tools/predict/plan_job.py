"""Searches batch size, microbatches, shard group, what stays gathered and what is recomputed for
the best throughput that fits, by the predictions of the dry run.

    orchmllm plan job recipes/mllm84b.yaml --ranks 2560 [section.key=value ...]
        [--out job.txt]
    orchmllm train recipes/mllm84b.yaml $(cat job.txt)

All other keys stay as the recipe has them, the examples of a step too, unless --global-batch says
otherwise. Exit code: 0, or 2 if nothing fits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from textwrap import wrap

from orchmllm.cli.options import at_least, in_one_line, new_file, recipe_parser
from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.plan.assign import PHASES
from orchmllm.tools.predict.examples import examples_of
from orchmllm.tools.predict.options import cluster_of, cluster_options
from orchmllm.tools.predict.search import Found, Search
from orchmllm.tools.predict.text import gpu_text

SHOWN = 5


def parse(argv: list[str]) -> argparse.Namespace:
    parser = recipe_parser("plan job", __doc__, (
        ("--global-batch", at_least(0), "examples a step; 0: any (as the recipe says)"),
        ("--steps", 2, "planned for each batch size"),
        ("--out", new_file, "writes the overrides, one a line"),
        ("--ranks", at_least(1), "GPUs of the job; has to be given")))
    cluster_options(parser)
    args = parser.parse_recipe(argv)
    if args.ranks is None:
        parser.error("--ranks is missing: the number of GPUs of the job")
    return args


def settings_table(best: list[Found], search: Search) -> str:
    """The best settings and the recipe's own."""
    given = search.given()
    kept = {"full": "no", "node": "node", "none": "all"}
    rows = [(f, "") for f in best[:SHOWN]] + ([(given, "\n  as the recipe says")] if given else [])
    wide = 1 + max(10, *(len("/".join(f.setting.checkpointing)) for f, _ in rows))
    lines = [f"{'batch x micro':>13} {'shards':>6} {'gathered':<15}{'recomputed':<{wide}}"
             f"{'tok/s/GPU':>9}{'s':>8}{'GB':>6}"]
    for f, note in rows:
        s = f.setting
        if f.peak_bytes > search.budget:
            note += f", needs {(f.peak_bytes - search.budget) / 1e9:.1f} GB more"
        lines.append(
            f"{s.batch_size:>6} x {s.microbatches:<4} {s.shard_size:>6} "
            f"{'/'.join(kept[r] for r in s.reshard):<15}{'/'.join(s.checkpointing):<{wide}}"
            f"{f.tokens_per_s / search.num_ranks:>9.0f}{f.time.seconds:>8.3g}"
            f"{f.peak_bytes / 1e9:>6.1f}{note}")
    return "\n".join(lines)


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for what the search cannot take or write."""
    args, started = parse(argv), time.process_time()
    recipe, gpus = load_recipe(args.recipe, args.overrides), args.ranks
    if recipe.data.batching == "capped":
        raise ValueError(
            "data.batching is capped: data.max_batch_tokens decides what a rank holds, and the "
            "train.batch_size that is searched has no effect; try caps with orchmllm dry-run, or "
            "search with data.batching=sample data.max_batch_tokens=0 data.max_batch_images=0")
    train = recipe.train
    whole = args.global_batch if args.global_batch is not None else (
        resolve(recipe, gpus, 1).global_batch_size)
    search = Search(recipe, gpus, cluster_of(args),
                    examples_of(recipe, args.mix, args.lengths), whole, args.steps)
    best = search.best()
    told = (f"{gpus} GPUs: {gpu_text(asdict(search.hardware))}; {search.budget / 1e9:.1f} GB for "
            f"tensors ({search.allowed_by})",
            f"{f'{whole} examples a step' if whole else 'any number of examples a step'}, lengths "
            f"{search.examples.what}", search.caps(best[0].setting))
    *given, caps = ("\n".join(wrap(text, 79, subsequent_indent="  ")) for text in told)
    print(*given, "\nPredicted, the best that fit (vision/audio/llm):\n"
          f"{settings_table(best, search)}\n\n{caps}", sep="\n")
    # With balance.group: shard a shard size of 0 is refused, also for one shard of all ranks.
    lines = best[0].setting.overrides(gpus if recipe.balance.group == "world" else 0)
    absent = tuple(f"fsdp.{p}_" for p in PHASES if p not in search.phases())
    lines = [line for line in lines if not line.startswith(absent)]
    if train.global_batch_size:  # or it would go on deciding the batch
        lines.append(f"train.global_batch_size={whole or 0}")
    print("\nOverrides:", *lines, sep="\n  ")
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"\nThis took {time.process_time() - started:.1f} s of CPU.")
    return 0
