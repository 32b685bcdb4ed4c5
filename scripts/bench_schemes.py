"""Times of planning, reordering and grouping at the papers' sizes beside the papers' own, in CPU
seconds of one thread. Exit code 1 if one is over its limit.

    python scripts/bench_schemes.py
"""

from __future__ import annotations

import sys

import numpy as np

from orchmllm.papers import disttrain, omnibal
from orchmllm.papers.fact import Printed
from orchmllm.papers.grouping import isf
from orchmllm.papers.pipeline import search_order
from orchmllm.papers.split import split_layers
from orchmllm.plan.balance import core


def rows():
    """(what, the paper's ms, our limit in ms, a call)."""
    printed = Printed("mmscale").left
    for gpus, batch in disttrain.SCALES:
        limit = 5 if gpus == 112 else 20
        paper = printed["Table 2", "planning", f"MLLM-72B on {gpus} GPUs, batch {batch}"]["value"]
        yield (f"plan_units, 72B on {gpus} GPUs", paper, limit,
               lambda g=gpus, b=batch: disttrain.plan("72B", g, b))
    for dp in (30, 60, 120):
        intra, inter = (printed["Table 3", f"{what}-microbatch reordering", f"DP {dp}"]["value"]
                        for what in ("intra", "inter"))
        times = disttrain.sample_times(1920, dp)
        size, home = np.round(1e6 * times.sum(axis=0)).astype(np.int64), np.zeros(1920, np.int64)
        stages = disttrain.stage_times(times[:, :1920 // dp], 12)
        yield (f"intra, 1920 samples over {dp}", intra, 0.2,
               lambda s=size, h=home, d=dp: core().greedy(s, h, d))
        yield (f"inter, {1920 // dp} microbatches, search", inter, 1.2,
               lambda s=stages: search_order(*s))
    tiles, tokens = omnibal.mix(1_200_000, 0)
    for leftovers in ("drop", "pack"):
        yield (f"isf, 1.2 M samples, leftovers: {leftovers}", 60_000, 5_000,
               lambda x=leftovers: isf(tiles, tokens, **omnibal.CAPS, leftovers=x))
    time = omnibal.layer_ms("InternVL-6B", "Llama3-70B")["ms"]
    yield ("split_layers, exact, 125 layers on 8", None, 20, lambda: split_layers(
        time, 2 * time, num_stages=8, num_microbatches=16, method="exact"))


def main() -> int:
    late = 0
    print(f"{'what':<42} {'paper ms':>9} {'limit ms':>9} {'ours ms':>9}")
    for what, paper, limit, call in rows():
        ms = 1e3 * disttrain.seconds(call, 2 if limit > 1000 else 20)
        late += ms > limit
        print(f"{what:<42} {paper or '-':>9} {limit:>9} {ms:>9.3f}{'  LATE' * (ms > limit)}")
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())
