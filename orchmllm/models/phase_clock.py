"""Where a step's time goes.

`PhaseClock` attributes time to phases in forward and backward: `mark` is an identity in the graph
that switches the clock both ways. It counts wall time and the thread's CPU time; the second is what
a rank computes even where several ranks share a core (on CPU the backward pass runs in the calling
thread). It does not see work queued on an accelerator.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


class PhaseClock:
    """Seconds per phase since the last `reset`: wall_s and cpu_s, by phase name; cpu_s of the
    threads that switch, of which a GPU's backward pass has one of its own. phase: the current
    one, None at the beginning of a step. switches: how often it changed, ever (another thread sees
    progress by it). has_events: whether a device measures, too."""

    def __init__(self) -> None:
        self.wall_s: dict[str, float] = defaultdict(float)
        self.cpu_s: dict[str, float] = defaultdict(float)
        self.phase: str | None = None
        self.switches = 0
        self._since = 0.0
        self._cpu_of: dict[int, float] = {}  # thread -> its CPU time at its last switch
        self.has_events = False
        self._marks: list[tuple[str, Any]] = []  # the phase from that event on

    def use_events(self, new_event: Callable[[], Any]) -> None:
        """From now on every switch also records an event on the device's current stream.
        new_event: makes one, with the methods `record` and `elapsed_time` of torch.cuda.Event."""
        self.has_events, self._new_event = True, new_event

    def take_marks(self) -> list[tuple[str, Any]]:
        """The events since the last `reset`, for `device_s`; then it has none."""
        marks, self._marks = self._marks, []
        return marks

    def reset(self) -> None:
        """Begins a step. The update that ended the step before stays: it is read with this one."""
        update_s = self.cpu_s["update"]
        self.wall_s.clear()
        self.cpu_s.clear()
        self.cpu_s["update"] = update_s
        self._marks = self._marks[:2] if self._marks and self._marks[0][0] == "update" else []
        self.phase = None

    def switch(self, phase: str) -> None:
        """From now on time belongs to `phase`."""
        now, cpu, thread = time.perf_counter(), time.thread_time(), threading.get_ident()
        if self.phase is not None:
            self.wall_s[self.phase] += now - self._since
            self.cpu_s[self.phase] += cpu - self._cpu_of.get(thread, cpu)
        self.phase, self._since, self._cpu_of[thread] = phase, now, cpu
        self.switches += 1
        if self.has_events:
            event = self._new_event()
            event.record()
            self._marks.append((phase, event))

    def mark(self, x: Tensor, *, before: str, after: str) -> Tensor:
        """x, with the clock switched to `after` now and back to `before` when x's gradient arrives.
        x: of any shape."""
        self.switch(after)
        return _Mark.apply(x, self, before) if x.requires_grad else x


def device_s(marks: list[tuple[str, Any]]) -> dict[str, float]:
    """Seconds of the device per phase between events of a PhaseClock. Nothing waits, so the host
    has to have waited for the last one's work before."""
    out: dict[str, float] = defaultdict(float)
    for (phase, start), (_, end) in pairwise(marks):
        out[phase] += 1e-3 * start.elapsed_time(end)
    return out


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, clock, before):
        ctx.clock, ctx.before = clock, before
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.switch(ctx.before)
        return grad, None, None
