"""A thread that prepares items ahead of their use: one in, one out.

It works `ahead` items beyond the one last taken and no further, so that all ranks have made the
same agreements whenever they stop together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from orchmllm.batch import on_this_device

T = TypeVar("T")
THREAD_NAME = "orchmllm-prefetch"


class Prefetcher(Generic[T]):
    """Iterates a generator in a thread. The constructor waits for the first item: the generator
    starts its worker processes for it, and no other Python thread should be at work while processes
    are forked. An exception of the generator is raised by next()."""

    def __init__(self, items: Generator[T, None, None], ahead: int) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}: must be >= 1")
        self._wanted: SimpleQueue[bool] = SimpleQueue()  # True for each item, False: to stop
        self._ready: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        for _ in range(ahead):
            self._wanted.put(True)
        begun = threading.Event()
        self.thread = threading.Thread(
            target=on_this_device(_work), args=(items, self._wanted, self._ready, begun),
            name=THREAD_NAME, daemon=True)
        self.thread.start()
        # At exit too: a thread that is cut off inside a collective would abort the process.
        self._finalizer = weakref.finalize(self, _stop, self._wanted, self.thread, 5.0)
        begun.wait()

    def __next__(self) -> T:
        item, error = self._ready.get()
        if error is not None:
            self._ready.put((None, error))  # also for a later call
            raise error
        self._wanted.put(True)
        return item

    def close(self, timeout_s: float = 30.0) -> None:
        """Lets the thread finish the items that all ranks work on, then joins it; after timeout_s
        it is left alone, since the other ranks may be gone."""
        _stop(self._wanted, self.thread, timeout_s)
        self._finalizer.detach()


def _stop(wanted: SimpleQueue[bool], thread: threading.Thread, timeout_s: float) -> None:
    """It takes effect behind the items that are wanted: by then all ranks have made the same
    agreements."""
    wanted.put(False)
    thread.join(timeout_s)


def _work(items: Generator, wanted: SimpleQueue[bool], ready: SimpleQueue,
          begun: threading.Event) -> None:
    try:
        while wanted.get():
            ready.put((next(items), None))
            begun.set()
    except BaseException as error:  # for the caller's thread; StopIteration is the end
        ready.put((None, error))
    finally:
        begun.set()
        items.close()
