"""orchmllm reproduce: every table and figure of OrchMLLM, DistTrain, MMScale and OmniBal beside
ours, or all schemes at equal data (compare)."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

from orchmllm.cli.options import add_options, at_least, in_one_line
from orchmllm.papers.disttrain import Fact
from orchmllm.papers.schemes import SCHEMES, plot, run, scheme_table
from orchmllm.tools.pictures import check_can_draw
from orchmllm.tools.predict.workload import MODELS, batch_layout, sample_headers

RANKS = (32, 64, 128, 512, 2560)
BEST, HELD_OUT = 1.06, "omni"  # what a plan per phase must reach at 64 ranks; the second mix


def parse(argv: list[str]) -> argparse.Namespace:
    made = argparse.ArgumentParser(prog="orchmllm reproduce", description=__doc__)
    kinds = made.add_subparsers(dest="what", required=True, metavar="WHAT")
    for name in ("orchmllm", "disttrain", "mmscale", "omnibal"):
        paper = kinds.add_parser(name, help="the paper's tables and figures")
        which = paper.add_mutually_exclusive_group()
        which.add_argument("--table", help="only this table")
        which.add_argument("--figure", help="only this figure")
    paper.add_argument("--samples", type=at_least(1000), default=1_200_000,
                       help="of the synthetic mix (1200000)")
    all_ = kinds.add_parser("compare", help="all schemes at equal data")
    all_.add_argument("--ranks", type=at_least(1), nargs="+", default=list(RANKS))
    add_options(all_, (("--model", tuple(MODELS)[::-1], "whose costs"),
                       ("--batch-size", 30, "examples a rank"), ("--seed", 0, "of the draws"),
                       ("--out", Path, "where the picture goes (PNG)")))
    return made.parse_args(argv)


def wanted(line: Fact, args: argparse.Namespace) -> bool:
    """Whether --table and --figure ask for a row."""
    if args.table is None and args.figure is None:
        return True
    kind, number = ("Table", args.table) if args.table else ("Figure", args.figure)
    return line.where.startswith(kind) and number in line.where.split()


def show(lines: Iterable[Fact], args: argparse.Namespace) -> None:
    """Prints the rows that are asked for. Raises ValueError if there is none."""
    line = None
    for line in filter(lambda line: wanted(line, args), lines):
        print(f"{line.where} | {line.what}\n    paper: {line.paper}\n    ours:  {line.ours} "
              f"[{line.kind}]", flush=True)
    if line is None:
        raise ValueError(f"{args.what} has no such table or figure")


def compare(args: argparse.Namespace) -> int:
    """All schemes on two mixes; 1 if a plan per phase misses its bound at 64 ranks."""
    missed, model = False, MODELS[args.model]
    for mix in ("natural", HELD_OUT):
        results = []
        for d in args.ranks:
            steps = max(2, min(10, 640 // d))
            pool = batch_layout(sample_headers(mix, d * args.batch_size * steps, args.seed), model,
                                1)
            results.append({name: run(s, pool, model, num_ranks=d, batch=args.batch_size,
                                      seed=args.seed) for name, s in SCHEMES.items()})
            print(f"\n{mix} mix, {args.model} costs, {d} ranks x {args.batch_size} examples, "
                  f"{steps} steps [modelled; communication not counted]\n"
                  f"{scheme_table(results[-1])}", flush=True)
            missed |= d == 64 and not results[-1]["per-phase"].over_perfect <= BEST
        if args.out:
            path = args.out.with_stem(args.out.stem + ("_" + mix) * (mix == HELD_OUT))
            plot(args.ranks, results, f"{args.model}, {args.batch_size} examples a rank, {mix} mix "
                 "(modelled)", str(path))
            print(f"picture: {path}")
    if missed:
        print(f"error: a plan per phase takes more than {BEST} of perfect balance at 64 ranks",
              file=sys.stderr)
    return int(missed)


@in_one_line
def main(argv: list[str]) -> int:
    args = parse(argv)
    print(f"orchmllm reproduce {' '.join(argv)}\n{platform.processor() or platform.machine()}, "
          f"{os.cpu_count()} cores, Python {platform.python_version()}; times are CPU seconds of "
          "one thread; seeds are fixed\n")
    if args.what == "compare":
        if args.out:
            check_can_draw("--out")
        return compare(args)
    from orchmllm.papers import disttrain, omnibal
    from orchmllm.papers import orchmllm as paper

    show({"omnibal": lambda: omnibal.lines(args.samples), "orchmllm": paper.lines}.get(
        args.what, lambda: disttrain.lines(args.what))(), args)
    return 0
