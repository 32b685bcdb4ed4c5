"""What a Chrome trace of steps tells of the last one: how long the GPU had nothing to do, and its
longest kernels.

    python -m scripts.gpu.trace FILE.json.gz
"""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ON_A_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCHES = ("cuda_runtime", "cuda_driver")


def events(path: Path) -> list[dict]:
    """All that have a duration."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [e for e in json.load(file)["traceEvents"] if "dur" in e]


def of_last_step(found: Sequence[dict]) -> list[tuple[dict, dict]]:
    """(What runs on a GPU, what launched it), without what was launched before the last step: the
    GPU may still be busy with it when the recording begins."""
    updates = sorted(e["ts"] + e["dur"] for e in found if e.get("cat") == "user_annotation"
                     and e["name"].startswith("Optimizer.step"))
    since = updates[-2] if len(updates) > 1 else 0.0
    launches = {e["args"]["correlation"]: e for e in found if e.get("cat") in LAUNCHES
                and "correlation" in e.get("args", {}) and e["ts"] >= since}
    return [(e, launches[e["args"]["correlation"]]) for e in found if e.get("cat") in ON_A_GPU
            and e["args"].get("correlation") in launches]


def read(path: Path, longest: int = 10) -> dict:
    """idle_share: of the time from the first kernel to the end of the last one, None without a
    GPU. longest: lines of milliseconds, launches and name, of kernels of one name together."""
    found = sorted((e["ts"], e["dur"], e["name"]) for e, _ in of_last_step(events(path)))
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
