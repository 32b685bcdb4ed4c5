"""What a Chrome trace of a step tells: how long the GPU had nothing to do, and its longest kernels.

    python -m scripts.gpu.trace FILE.json.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from pathlib import Path

ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")


def read(path: Path, longest: int = 10) -> dict:
    """idle_share: of the time from the first kernel to the end of the last one, None without a
    GPU. longest: lines of milliseconds, launches and name, of kernels of one name together."""
    with gzip.open(path) as file:
        found = sorted((e["ts"], e["dur"], e["name"]) for e in json.load(file)["traceEvents"]
                       if e.get("cat") in ON_A_GPU)
    if not found:
        return {"idle_share": None, "longest": []}
    busy, end, took, count = 0.0, found[0][0], Counter(), Counter()
    for start, duration, name in found:  # kernels of several streams overlap
        busy += max(0.0, start + duration - max(start, end))
        end = max(end, start + duration)
        took[name] += duration
        count[name] += 1
    return {"idle_share": 1 - busy / (end - found[0][0]),
            "longest": [f"{took[name] / 1e3:.1f} ms, {count[name]} x {name[:100]}"
                        for name, _ in took.most_common(longest)]}


def main(argv: list[str]) -> int:
    found = read(Path(argv[0]), longest=40)
    print(*found["longest"], f"idle: {found['idle_share'] or 0:.1%}", sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
