"""Events with the methods of torch.cuda.Event on a device that works like a queue: what is
recorded has no time until the host has waited for the device."""

from __future__ import annotations

import time


class QueuedEvent:
    """Reading one before `wait` was called after it was recorded is an error, as on a GPU. Its
    times are those of the host. read: how many intervals were read."""

    waiting: list[QueuedEvent] = []
    read = 0

    def __init__(self) -> None:
        self.at: float | None = None
        self.done = False

    def record(self) -> None:
        self.at = time.perf_counter()
        self.waiting.append(self)

    def elapsed_time(self, end: QueuedEvent) -> float:
        """Milliseconds. Raises RuntimeError where the device may not have got there."""
        if not (self.done and end.done):
            raise RuntimeError("device not ready")
        QueuedEvent.read += 1
        return 1e3 * (end.at - self.at)

    @classmethod
    def wait(cls) -> None:
        """The host waits for the device."""
        for event in cls.waiting:
            event.done = True
        cls.waiting.clear()
