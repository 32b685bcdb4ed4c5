"""Which rank the others wait for, found out once, through a tree in the store of the run.

Each rank posts one report for itself and the ranks below it, and reads those of at most FAN_OUT
others, so 2,560 ranks ask the store a few times each and are done in three levels. The root is the
rank that noticed the stall first. A rank that does not answer (stopped, or gone) is passed over:
the one above it reads the reports below it, and names it.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager

import torch
import torch.distributed as dist

FAN_OUT = 16
LEVEL_S = 1.4  # that a rank waits for each level below it
SHOWN = 4  # late ranks that are named


def count_collectives(device: str) -> tuple[int, int]:
    """(launched, completed) collectives of this process on its device's groups, by torch's flight
    recorder; (0, 0) where it does not record."""
    c10d = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json"
    if not hasattr(c10d, name):
        return 0, 0
    groups = json.loads(getattr(c10d, name)(includeCollectives=False)).get("pg_status", {}).values()
    launched, completed = (sum(max(int(g.get(f"last_{what}_collective", 0)), 0) for g in groups)
                           for what in ("enqueued", "completed"))
    return launched, completed


def report_of(rank: int, progress: tuple[int, ...], waits: bool, text: str) -> dict:
    """A rank's own report. progress: how far it got, to be compared with others. waits: whether it
    is in a collective, so that another rank may be to blame. text: what is said of it."""
    mine = [[rank, text]]
    return {"least": list(progress), "late": [] if waits else mine,
            "waiting": mine if waits else [], "silent": []}


def merge(parts: list[dict]) -> dict:
    """One report of several: those that got least far, first those that do not wait for others."""
    least = min(p["least"] for p in parts)
    behind = [p for p in parts if p["least"] == least]
    return {"least": least, "silent": sorted(r for p in parts for r in p["silent"]),
            **{key: sorted(x for p in behind for x in p[key])[:SHOWN]
               for key in ("late", "waiting")}}


def describe(report: dict) -> str:
    """The late ranks of a merged report in words."""
    late = report["late"] or report["waiting"]
    parts = [f"rank {rank} is late: {text}" for rank, text in late]
    if report["silent"]:
        silent = report["silent"]
        shown = ", ".join(map(str, silent[:SHOWN])) + (
            f" and {len(silent) - SHOWN} more" if len(silent) > SHOWN else "")
        parts.insert(0, f"rank{'s' if len(silent) > 1 else ''} {shown} did not answer in time: "
                        "stopped or gone")
    return "; ".join(parts)


class ReportTree:
    """One rank's part in a report. store: used under `lock`. root: the rank that asked."""

    def __init__(self, store: dist.Store, lock: AbstractContextManager | None, rank: int,
                 world_size: int, root: int) -> None:
        self._store, self._lock = store, lock or threading.Lock()
        self.world_size, self.root = world_size, root
        self._place = (rank - root) % world_size  # in the tree, whose root has place 0
        self.num_keys = 0  # that were asked for or written

    def gather(self, mine: dict) -> dict:
        """Posts the report of this rank and those below it; the report of all ranks at the root."""
        report = merge([mine, *self._below(self._place, self._height(self._place) * LEVEL_S)])
        if self._place:
            self._ask("set", self._key(self._place), json.dumps(report))
        return report

    def _below(self, place: int, wait_s: float) -> list[dict]:
        """The reports of the places right below `place`, and in place of one that does not answer
        those below that one."""
        deadline = time.monotonic() + wait_s
        waiting, there = [*self._children(place)], []
        while waiting:
            if self._ask("check", [self._key(p) for p in waiting]):
                return there + self._read(waiting)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.05)
        for child in waiting:
            if self._ask("check", [self._key(child)]):
                there += self._read([child])
            else:
                silent = (child + self.root) % self.world_size
                there += [{"least": [1 << 62], "late": [], "waiting": [], "silent": [silent]},
                          *self._below(child, 0.0)]
        return there

    def _read(self, places: Iterable[int]) -> list[dict]:
        values = self._ask("multi_get", [self._key(p) for p in places])
        return [json.loads(v) for v in values]

    def _children(self, place: int) -> Iterator[int]:
        first = place * FAN_OUT + 1
        yield from range(first, min(first + FAN_OUT, self.world_size))

    def _height(self, place: int) -> int:
        """Levels below a place."""
        height = 0
        while (place := place * FAN_OUT + 1) < self.world_size:
            height += 1
        return height

    def _key(self, place: int) -> str:
        return f"stall{self.root}/{place}"

    def _ask(self, what: str, *args):
        self.num_keys += len(args[0]) if isinstance(args[0], list) else 1
        with self._lock:
            return getattr(self._store, what)(*args)
