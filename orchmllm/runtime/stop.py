"""Signals that end a run at a step boundary: the first asks, a later one insists."""

from __future__ import annotations

import os
import signal
import time

from orchmllm.launch import SAME_REQUEST_S

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Stopped(Exception):
    """The run was asked to stop and did, at a step boundary, on all ranks, with a checkpoint if the
    recipe writes any. exit_code: 128 + the signal's number."""

    def __init__(self, number: int, step: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}")


class StopSignal:
    """Context manager; `signal` is 0 until one of SIGNALS arrives, then its number. A second
    request (later than SAME_REQUEST_S) ends the process at once."""

    def __init__(self) -> None:
        self.signal = 0
        self._at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        self._previous = {s: signal.signal(s, self._receive) for s in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.signal and time.monotonic() - self._at > SAME_REQUEST_S:
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._at = number, time.monotonic()
