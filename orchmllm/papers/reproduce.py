"""Every table and figure of OrchMLLM, DistTrain, MMScale and OmniBal beside ours, or all schemes at
equal data (compare).

    orchmllm papers reproduce omnibal --table 7 --samples 1000
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterable

from orchmllm.cli.options import add_options, at_least, command_parser, in_one_line
from orchmllm.papers import fact
from orchmllm.papers.mixes import MIXES, MODELS, headers_of
from orchmllm.papers.schemes import SCHEMES, Result, run, scheme_table
from orchmllm.tools.predict.workload import batch_layout

RANKS = (32, 64, 128, 512, 2560)


def parse(argv: list[str]) -> argparse.Namespace:
    made = command_parser("papers reproduce", __doc__)
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
                       ("--batch-size", 30, "examples a rank"), ("--seed", 0, "of the draws")))
    return made.parse_args(argv)


def show(lines: Iterable[fact.Fact], args: argparse.Namespace) -> None:
    """Prints the rows that --table or --figure asks for. Raises ValueError if there is none."""
    kind, number = ("Table", args.table) if args.table else ("Figure", args.figure)
    chosen = [line for line in lines if not number or (
        line.where.startswith(kind) and number in line.where.split())]
    if not chosen:
        raise ValueError(f"{args.what} has no such table or figure")
    print(fact.__doc__, "", *chosen, "", f"{len(chosen)} rows: {fact.counts(chosen)}", sep="\n")


def all_schemes(mix: str, model: str, num_ranks: int, batch: int, seed: int) -> dict[str, Result]:
    """Every scheme on the same 2 to 10 steps of a mix, at the costs of a model of MODELS."""
    steps = max(2, min(10, 640 // num_ranks))
    pool = batch_layout(headers_of(mix, num_ranks * batch * steps, seed), MODELS[model], 1)
    return {name: run(s, pool, MODELS[model], num_ranks=num_ranks, batch=batch, seed=seed)
            for name, s in SCHEMES.items()}


def compare(args: argparse.Namespace) -> None:
    """All schemes on all mixes, and the gain over the best that moves whole examples."""
    gains = []
    for mix in MIXES:
        for d in args.ranks:
            found = all_schemes(mix, args.model, d, args.batch_size, args.seed)
            gains.append(found["pre-balance"].over_perfect / found["per-phase"].over_perfect)
            print(f"\n{mix} mix, {args.model} costs, {d} ranks x {args.batch_size} examples, "
                  f"{found['random'].steps} steps [modelled; communication not counted]\n"
                  f"{scheme_table(found)}\npre-balance over per-phase: {gains[-1]:.3f}x")
    print(f"\ngain of a plan per phase over pre-balancing: {min(gains):.3f}x to {max(gains):.3f}x")


@in_one_line
def main(argv: list[str]) -> int:
    args = parse(argv)
    print(f"orchmllm papers reproduce {' '.join(argv)}\n"
          f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
          f"Python {platform.python_version()}; times are CPU seconds of one thread; seeds are "
          "fixed\n")
    if args.what == "compare":
        compare(args)
        return 0
    from orchmllm.papers import disttrain, omnibal, orchmllm

    show({"omnibal": lambda: omnibal.lines(args.samples), "orchmllm": orchmllm.lines}.get(
        args.what, lambda: disttrain.lines(args.what))(), args)
    return 0
