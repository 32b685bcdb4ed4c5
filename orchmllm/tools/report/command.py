"""What a run did, as one HTML page that needs nothing else: losses, throughput, where each
step's time went, imbalance, gain, bytes, the slowest ranks and their examples. Works while
the run goes on.

    orchmllm report runs/mine
    orchmllm report runs/mine --compare runs/plain    # also prints what differs
    orchmllm report runs/mine --score    # predictions beside measurements
"""

from __future__ import annotations

import time
from pathlib import Path

from orchmllm.cli.options import command_parser, in_one_line
from orchmllm.tools.predict.options import cluster_options


@in_one_line
def main(argv: list[str]) -> int:
    """Exit code. Raises ValueError for a page that cannot be written."""
    from orchmllm.tools.report.log import read_run
    from orchmllm.tools.report.page import HEAD, page
    from orchmllm.tools.report.verdict import compared, side_by_side, verdict

    parser = command_parser("report", __doc__, (
        ("--compare", Path, "run.dir of another run: its figures and settings beside these"),
        ("--score", False, "also print what the cost model and the dry run predict for "
         "the run beside what it measured; the options below say for which GPUs"),
        ("--out", Path, "default: RUN_DIR/report.html")))
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="run.dir of a run")
    cluster_options(parser)
    args, started = parser.parse_args(argv), time.perf_counter()
    parser.refuse_without(args, "--score", "--gpu", "--network", "--gpus-per-node", "--measured",
                          "--mix", "--lengths")
    out = args.out or args.run_dir / "report.html"
    run = read_run(args.run_dir)
    other = read_run(args.compare) if args.compare else None
    text = page(run)
    try:
        if out.is_file():
            with out.open("rb") as file:
                if file.read(len(HEAD)) not in (b"", HEAD.encode()):
                    raise ValueError(f"{out} exists and is no report: name another file with --out")
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise ValueError(f"{out}: {e.strerror}; choose another file with --out") from e
    print(f"{compared(run, other)}\n\n{side_by_side(run, other)}\n" if other else verdict(run))
    print(f"written: {out} ({run.num_steps} steps, {out.stat().st_size / 1e3:.0f} kB, "
          f"{time.perf_counter() - started:.1f} s)")
    if args.score:
        from orchmllm.tools.report.score import score

        print(score(run, args))
    return 0
