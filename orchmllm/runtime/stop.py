"""What ends a run at a step boundary: a signal, of which the first asks and a later one insists, or
another run that has taken the run folder."""

from __future__ import annotations

import os
import signal
import threading
import time

from orchmllm.launch import SAME_REQUEST_S, STOP_SIGNALS

FOLDER_TAKEN = 128  # in place of a signal's number; above all of them


class Stopped(Exception):
    """The run was asked to stop and did, at a step boundary, on all ranks, with a checkpoint if the
    recipe writes any. exit_code: 128 + the signal's number."""

    def __init__(self, number: int, step: int) -> None:
        self.exit_code = 128 + number
        super().__init__(f"stopped on request after step {step}")


class StopSignal:
    """Context manager; `signal` is 0 until one of STOP_SIGNALS arrives, then its number. A second
    request (later than SAME_REQUEST_S) ends the process at once. folder_taken: is set when another
    run has taken the run folder."""

    def __init__(self, folder_taken: threading.Event | None) -> None:
        self._folder_taken = folder_taken
        self.signal = 0
        self._at = 0.0
        self._previous: dict[int, object] = {}

    @property
    def asked(self) -> int:
        """Why this rank is to stop: FOLDER_TAKEN, the number of a signal, or 0 for neither."""
        taken = self._folder_taken
        return FOLDER_TAKEN if taken and taken.is_set() else self.signal

    def __enter__(self) -> StopSignal:
        self._previous = {s: signal.signal(s, self._receive) for s in STOP_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _frame: object) -> None:
        if self.signal and time.monotonic() - self._at > SAME_REQUEST_S:
            os._exit(128 + number)
        if not self.signal:
            self.signal, self._at = number, time.monotonic()
            # From now on torchrun shows no error of a rank, so that rank 0 tells it.
            if os.environ.get("RANK") == "0" and "ORCHMLLM_CHECKED" not in os.environ:
                os.environ.pop("TORCHELASTIC_ERROR_FILE", None)
