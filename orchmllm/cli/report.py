"""What a run did, as one HTML page that needs nothing else: losses, throughput, where each
step's time went, imbalance, gain, bytes, the slowest ranks and their examples. Works while
the run goes on.

    orchmllm report runs/mine
    orchmllm report runs/mine --compare runs/plain --out comparison.html
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="orchmllm report", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run.dir of a run")
    parser.add_argument("--compare", type=Path, metavar="OTHER", help="run.dir of another run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="default: RUN_DIR/report.html")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    from orchmllm.report.log import NotALog, read_run
    from orchmllm.report.page import page

    args, started = parse(argv), time.perf_counter()
    out = args.out or args.run_dir / "report.html"
    try:
        run = read_run(args.run_dir)
        other = read_run(args.compare) if args.compare else None
    except (NotALog, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    try:
        out.write_text(page(run, other), encoding="utf-8")
    except OSError as e:
        print(f"error: {out}: {e.strerror}; choose another file with --out", file=sys.stderr)
        return 2
    print(f"written: {out} ({run.num_steps} steps, {out.stat().st_size / 1e3:.0f} kB, "
          f"{time.perf_counter() - started:.1f} s)")
    return 0
