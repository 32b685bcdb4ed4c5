"""Searches batch size, microbatches, shard group, what stays gathered and what is recomputed for
the best throughput that fits, by the predictions of the dry run.

    orchmllm plan job recipes/mllm84b.yaml --gpus 2560 [section.key=value ...]
        [--out job.txt] [--picture job.svg]
    orchmllm train --recipe recipes/mllm84b.yaml $(cat job.txt)

All other keys stay as the recipe has them, the examples of a step too, unless --global-batch says
otherwise. Exit code: 0, or 2 if nothing fits.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, replace
from pathlib import Path

from orchmllm.cli.options import at_least, in_one_line, recipe_parser
from orchmllm.config.job import resolve
from orchmllm.config.recipe import read_recipe
from orchmllm.plan.assign import PHASES
from orchmllm.tools.pictures import check_can_draw
from orchmllm.tools.predict.examples import examples_of
from orchmllm.tools.predict.options import cluster_of, cluster_options
from orchmllm.tools.predict.search import Found, Search, difference
from orchmllm.tools.predict.text import gpu_text, unnamed_encoders

LINKS = (25, 50, 100, 200, 400, 800, 1600)  # Gbit/s of the picture
SHOWN = 5


def parse(argv: list[str]) -> argparse.Namespace:
    parser = recipe_parser("plan job", __doc__, (
        ("--global-batch", at_least(0), "examples a step; 0: any (as the recipe says)"),
        ("--steps", 2, "planned for each batch size"),
        ("--out", Path, "writes the overrides, one a line"),
        ("--picture", Path, "throughput against the link and the batch size, .svg or .png")))
    parser.add_argument("--gpus", type=at_least(1), required=True, help="ranks of the job")
    cluster_options(parser)
    return parser.parse_intermixed_args(argv)


def settings_table(best: list[Found], given: Found | None, search: Search) -> str:
    """The best settings and the recipe's own."""
    lines = [f"{'batch x micro':>13} {'shards':>6}  {'stays gathered':<16}{'recomputed':<30}"
             f"{'tok/s/GPU':>9}{'s':>7}{'GB':>7}"]
    kept = {"full": "no", "node": "node", "none": "all"}
    rows = [(f, "") for f in best[:SHOWN]] + ([(given, "  as the recipe says")] if given else [])
    for f, note in rows:
        s = f.setting
        if f.peak_bytes > search.budget:
            note += f", needs {(f.peak_bytes - search.budget) / 1e9:.1f} GB more"
        lines.append(
            f"{s.batch_size:>6} x {s.microbatches:<4} {s.shard_size:>6}  "
            f"{'/'.join(kept[r] for r in s.reshard):<16}{'/'.join(s.checkpointing):<30}"
            f"{f.tokens_per_s / search.num_ranks:>9.0f}{f.time.seconds:>7.2f}"
            f"{f.peak_bytes / 1e9:>7.1f}{note}")
    return "\n".join(lines)


def runner_up(best: list[Found]) -> Found | None:
    """The best with another batch size or shard group than the first, else the second."""
    def place(f: Found) -> tuple:
        return f.setting.batch_size, f.setting.microbatches, f.setting.shard_size

    others = [f for f in best[1:] if place(f) != place(best[0])]
    return (others or best[1:] or [None])[0]


def picture(search: Search, best: Found, second: Found | None, given: Found | None,
            path: Path) -> None:
    """Left: throughput against the link between nodes; right: against the batch size, a cross where
    it does not fit."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for one, name in ((best, "chosen"), (second, "runner-up"), (given, "as the recipe says")):
        if one is None:
            continue
        setting = one.setting
        found = [search.found(setting, replace(search.hardware, network_bandwidth=g * 1e9 / 8))
                 for g in LINKS]
        fits = found[0].peak_bytes <= search.budget
        left.plot(LINKS, [f.tokens_per_s / search.num_ranks for f in found],
                  marker="o" if fits else "x", linestyle="-" if fits else "--",
                  label=f"{name}: {setting.batch_size} x {setting.microbatches}, shards of "
                  f"{setting.shard_size}" + ("" if fits else ", does not fit"))
    left.axvline(search.hardware.network_bandwidth * 8 / 1e9, color="0.8", zorder=0)
    left.set(xscale="log", xlabel="Gbit/s of each GPU between nodes", xticks=LINKS,
             xticklabels=[str(g) for g in LINKS], ylabel="tokens/s and GPU", ylim=(0, None))
    left.minorticks_off()
    left.legend(frameon=False, fontsize=8)
    for k, choice in enumerate(("none", "selective", "full")):
        points = [search.found(replace(best.setting, batch_size=b, microbatches=m,
                                       checkpointing=(choice,) * len(PHASES)))
                  for b, m in search.batches()
                  if search.drawn(b, best.setting.shard_size)]
        x = [p.setting.batch_size for p in points]
        y = [p.tokens_per_s / search.num_ranks for p in points]
        right.plot(x, y, color=f"C{k}", linewidth=1, label=f"recomputed: {choice}")
        for fits, marker in ((True, "o"), (False, "x")):
            at = [i for i, p in enumerate(points) if (p.peak_bytes <= search.budget) == fits]
            right.plot([x[i] for i in at], [y[i] for i in at], marker, color=f"C{k}")
    right.plot([], [], "kx", label="does not fit")
    right.plot(best.setting.batch_size, best.tokens_per_s / search.num_ranks, "k*", markersize=11,
               label="chosen")
    right.set(xscale="log", xlabel="examples a rank and microbatch", ylim=(0, None),
              xticks=x, xticklabels=[str(b) for b in x])
    right.minorticks_off()
    right.legend(frameon=False, fontsize=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for what the search cannot take or write."""
    args, started = parse(argv), time.process_time()
    loaded = read_recipe(args.recipe, args.overrides)
    recipe, gpus = loaded.recipe, args.gpus
    for flag, path in (("--out", args.out), ("--picture", args.picture)):  # before the search
        if path and not path.parent.is_dir():
            raise ValueError(f"{flag} {path}: {path.parent} is no folder; make it, or name another")
    if args.picture:
        check_can_draw("--picture")
    if recipe.data.batching == "capped":
        raise ValueError(
            "data.batching is capped: data.max_batch_tokens decides what a rank holds, and the "
            "train.batch_size that is searched has no effect; try caps with orchmllm dry-run, or "
            "search with data.batching=sample data.max_batch_tokens=0 data.max_batch_images=0")
    without = unnamed_encoders(loaded)
    train = recipe.train
    whole = args.global_batch if args.global_batch is not None else (
        resolve(recipe, gpus, 1).global_batch_size)
    search = Search(recipe, gpus, cluster_of(args),
                    examples_of(recipe, args.mix, args.lengths, without), whole, args.steps)
    best = search.best()
    given = search.given()
    print(f"{gpus} GPUs: {gpu_text(asdict(search.hardware))}; {search.budget / 1e9:.1f} GB for "
          f"tensors ({search.allowed_by})\n"
          f"{f'{whole} examples a step' if whole else 'any number of examples a step'}, lengths "
          f"{search.examples.what}\n\nPredicted, the best that fit (vision/audio/llm):\n"
          f"{settings_table(best, given, search)}\n")
    second = runner_up(best)
    if second:
        print(f"Runner-up: {difference(best[0], second, gpus)}")
    # With balance.group: shard a shard size of 0 is refused, also for one shard of all ranks.
    lines = best[0].setting.overrides(gpus if recipe.balance.group == "world" else 0)
    if train.global_batch_size:  # or it would go on deciding the batch
        lines.append(f"train.global_batch_size={whole or 0}")
    print("\nOverrides: " + " ".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if args.picture:
        picture(search, best[0], second, given, args.picture)
        print(f"picture: {args.picture}")
    print(f"\nThis took {time.process_time() - started:.1f} s of CPU.")
    return 0
