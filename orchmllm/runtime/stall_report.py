"""Which rank the others wait for, found out once, through the store of the run.

The rank that noticed the stall first, the root, asks. Every rank posts a report of its own, and the
root alone reads them: all with one request, so 2,560 ranks ask the store a few thousand times in
all. A rank that does not answer (stopped, or gone) is named.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
ANSWER_S = 4.0  # that ranks have to answer
SHOWN = 4  # late ranks that are named


def wait_until(found: Callable[[], T], seconds: float) -> T:
    """What found() returns as soon as that is true, or after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (value := found()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


class Report(NamedTuple):
    """Where a rank is. progress: how far it got, to be compared with others. waits: whether it is
    in a collective, so that another rank may be to blame. text: what is said of it."""

    progress: tuple[int, ...]
    waits: bool
    text: str


def count_collectives(device: str) -> tuple[int, int]:
    """(launched, completed) collectives of this process on its device's groups, by torch's flight
    recorder; (0, 0) where it does not record. Several threads complete those of a CPU and may be
    recorded in another order, so that the second number is too small there."""
    c10d = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json"
    if not hasattr(c10d, name):
        return 0, 0
    groups = json.loads(getattr(c10d, name)(includeCollectives=False)).get("pg_status", {}).values()
    launched, completed = (sum(max(int(g.get(f"last_{what}_collective", 0)), 0) for g in groups)
                           for what in ("enqueued", "completed"))
    return launched, completed


def post_report(store: dist.Store, root: int, rank: int, report: Report) -> None:
    """Answers what rank `root` has asked all ranks."""
    store.set(_key(root, rank), json.dumps(report))


def read_reports(store: dist.Store, root: int, world_size: int) -> dict[int, Report]:
    """The reports of the ranks that have answered, within ANSWER_S."""
    keys = [_key(root, rank) for rank in range(world_size)]
    complete = wait_until(lambda: store.check(keys), ANSWER_S)
    there = [rank for rank, key in enumerate(keys) if complete or store.check([key])]
    texts = store.multi_get([keys[rank] for rank in there])
    return {rank: Report(*json.loads(text)) for rank, text in zip(there, texts, strict=True)}


def describe(reports: dict[int, Report], world_size: int) -> str:
    """The late ranks in words: of those that got least far, the ones that do not wait for others,
    if there are any. reports: of at least one rank, in ascending order of ranks."""
    least = min(r.progress for r in reports.values())
    behind = {rank: r for rank, r in reports.items() if r.progress == least}
    silent = [rank for rank in range(world_size) if rank not in reports]
    late = [rank for rank, r in behind.items() if not r.waits] or ([] if silent else list(behind))
    parts = [f"rank {rank} is late: {behind[rank].text}" for rank in late[:SHOWN]]
    if silent:
        shown = ", ".join(map(str, silent[:SHOWN])) + (
            f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else "")
        parts.insert(0, f"rank{'s' if len(silent) > 1 else ''} {shown} did not answer in time: "
                        "stopped or gone")
    return "; ".join(parts)


def _key(root: int, rank: int) -> str:
    return f"stall{root}/{rank}"
