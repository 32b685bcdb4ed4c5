"""Options of commands that predict: where lengths come from, and the cluster."""

from __future__ import annotations

import argparse
from pathlib import Path

from orchmllm.cli.options import add_options
from orchmllm.models.gpus import GPUS
from orchmllm.tools.predict.hardware import Hardware, cluster
from orchmllm.tools.predict.workload import MIXES


def cluster_options(parser: argparse.ArgumentParser) -> None:
    """Adds what `cluster_of` reads, --mix and --lengths."""
    add_options(parser, (
        ("--gpu", "h100-sxm", f"of the data sheets: {', '.join(GPUS)}"),
        ("--network", 400.0, "Gbit/s of each GPU between nodes"),
        ("--gpus-per-node", 8, "of the cluster"),
        ("--measured", Path, "shares measured by scripts/bench_gpu.py --out FILE")))
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument("--mix", choices=MIXES, default="",
                         help="drawn lengths instead of the recipe's data")
    add_options(lengths, (("--lengths", Path, "lengths of a file, a line an example: "
                           '{"images": [[width, height]], "audio_s": [seconds], '
                           '"made": [[width, height]], "text_tokens": n}'),))


def cluster_of(args: argparse.Namespace) -> Hardware:
    """The hardware of the options. Raises ValueError."""
    return cluster(args.gpu, gbit=args.network, per_node=args.gpus_per_node,
                   measured=args.measured)
