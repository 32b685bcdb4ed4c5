"""Writes the tables of docs/schemes.md and docs/scale.md that `orchmllm papers reproduce` makes,
between their markers; times of this machine are left out.

    python scripts/make_paper_tables.py [--check] [--picture]

--check: writes nothing; exit code 1 if a page is not what would be written. --picture: also draws
docs/schemes.png (matplotlib).
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from orchmllm.papers import disttrain, fact, omnibal, orchmllm
from orchmllm.papers.advice import ratio, rows
from orchmllm.papers.mixes import MIXES
from orchmllm.papers.reproduce import RANKS, all_schemes
from orchmllm.papers.schemes import SCHEMES

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAPERS: dict[str, Callable] = {
    "orchmllm": orchmllm.lines, "disttrain": lambda: disttrain.lines("disttrain"),
    "mmscale": lambda: disttrain.lines("mmscale"), "omnibal": omnibal.lines}
BATCH, GBITS = 30, (25, 100, 400)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body))


def evidence(paper: str) -> str:
    """How many values of the paper have which verdict."""
    facts = list(PAPERS[paper]())
    return f"{len(facts)} values: {fact.counts(facts)}."


def comparison() -> str:
    """The step of every scheme over perfect balance."""
    found = {f"{mix}, {d:,} ranks": all_schemes(mix, "84b", d, BATCH, 0) for mix, d in (
        ("natural", 64), ("natural", 2560), *((mix, 64) for mix in MIXES[1:]))}
    first = next(iter(found.values()))
    body = [[name, *(f"{of[name].over_perfect:.3f}" for of in found.values()),
             f"{first[name].internode_mb:.1f}", scheme.paper] for name, scheme in SCHEMES.items()]
    gains = [of["pre-balance"].over_perfect / of["per-phase"].over_perfect for of in found.values()]
    body.append(["**pre-balance over per-phase**", *(f"**{x:.3f}**" for x in gains), "", ""])
    return table(("scheme", *found, "MB a rank and step between nodes", "what"), body) + (
        f"\n\nThe gain of a plan per phase over pre-balancing is {min(gains):.3f}x to "
        f"{max(gains):.3f}x here.")


def units() -> str:
    """Units over colocated, for DistTrain's 72B on 1,296 A800."""
    def over(images: int, gbit: int) -> float:
        hardware = replace(disttrain.A800, network_bandwidth=gbit * 1e9 / 8)
        return ratio(rows(disttrain.disttrain_profiles("72B", images=images), num_gpus=1296,
                          global_batch=2592, gpu_bytes=disttrain.ROOM, hardware=hardware))

    return table(("images a sample", *(f"{g} Gbit/s a GPU" for g in GBITS)),
                 [[str(n), *(f"{over(n, g):.2f}x" for g in GBITS)] for n in (2, 5, 10, 20)])


TABLES: Mapping[str, Callable[[], str]] = {
    "compare": comparison, "units": units,
    **{paper: lambda paper=paper: evidence(paper) for paper in PAPERS}}


def made(text: str) -> str:
    """The page with every table between markers made anew."""
    return re.sub(r"(<!-- Made by scripts/make_paper_tables\.py: (.+?) -->\n).*?(<!-- End -->)",
                  lambda m: f"{m[1]}{TABLES[m[2]]()}\n{m[3]}", text, flags=re.S)


def draw(path: Path) -> None:
    """Time lost to imbalance against the number of ranks, a line per scheme."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import ScalarFormatter

    results = [all_schemes("natural", "84b", d, BATCH, 0) for d in RANKS]
    figure = Figure(figsize=(8.5, 4.8), layout="constrained")
    axes = figure.subplots()
    for k, name in enumerate(sorted(results[-1], key=lambda n: -results[-1][n].over_perfect)):
        axes.plot(RANKS, [100 * (r[name].over_perfect - 1) for r in results], label=name,
                  marker="os^v"[k % 4], color=f"C{k % 10}",
                  linewidth=2.4 if "per-phase" in name else 1.2)
    axes.set(xlabel="data-parallel ranks", xscale="log", yscale="log", xticks=list(RANKS),
             title=f"84b, {BATCH} examples a rank, natural mix (modelled)",
             ylabel="step beyond perfect balance, %")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.legend(frameon=False, bbox_to_anchor=(1.0, 1.0), loc="upper left")
    figure.savefig(path, dpi=130)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--picture", action="store_true", help="also draw docs/schemes.png")
    args = parser.parse_args(argv)
    stale = 0
    for page in (DOCS / "schemes.md", DOCS / "scale.md"):
        text = page.read_text(encoding="utf-8")
        new = made(text)
        if new != text:
            stale += 1
            print(f"docs/{page.name}: " + (
                "not what the commands say: run python scripts/make_paper_tables.py"
                if args.check else "written"), file=sys.stderr)
            if not args.check:
                page.write_text(new, encoding="utf-8")
    if args.picture:
        draw(DOCS / "schemes.png")
    return int(args.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
