"""A thread that prepares items ahead of their use: one in, one out.

It works `ahead` items beyond the one last taken and no further, so that all ranks have made the
same agreements whenever they stop together.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from typing import Any, Generic, TypeVar

from orchmllm.batch import on_this_device

T = TypeVar("T")
THREAD_NAME = "orchmllm-prefetch"
_END = object()


class _Shared:
    """What both threads see; the finalizer holds it instead of the prefetcher."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.ready: list[tuple[Any, BaseException | None]] = []
        self.taken = 0
        self.stopped = False


class Prefetcher(Generic[T]):
    """Iterates a generator in a thread. The constructor waits for the first item: the generator
    starts its worker processes for it, and no other Python thread should be at work while processes
    are forked. An exception of the generator is raised by next()."""

    def __init__(self, items: Generator[T, None, None], ahead: int) -> None:
        if ahead < 1:
            raise ValueError(f"ahead is {ahead}: must be >= 1")
        self._shared = shared = _Shared()
        self.thread = threading.Thread(
            target=on_this_device(_work), args=(shared, items, ahead), name=THREAD_NAME,
            daemon=True)
        self.thread.start()
        # At exit too: a thread that is cut off inside a collective would abort the process.
        self._finalizer = weakref.finalize(self, _stop, shared, self.thread, 5.0)
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready)

    def __next__(self) -> T:
        shared = self._shared
        with shared.changed:
            shared.changed.wait_for(lambda: shared.ready)
            item, error = shared.ready[0]
            if error is None and item is not _END:
                shared.ready.pop(0)
                shared.taken += 1
                shared.changed.notify_all()
        if error is not None:
            raise error
        if item is _END:
            raise StopIteration
        return item

    def close(self, timeout_s: float = 30.0) -> None:
        """Lets the thread finish the items that all ranks work on, then joins it; after timeout_s
        it is left alone, since the other ranks may be gone."""
        _stop(self._shared, self.thread, timeout_s)
        self._finalizer.detach()


def _stop(shared: _Shared, thread: threading.Thread, timeout_s: float) -> None:
    with shared.changed:
        shared.stopped = True
        shared.changed.notify_all()
    thread.join(timeout_s)


def _work(shared: _Shared, items: Generator, ahead: int) -> None:
    def put(item: Any, error: BaseException | None = None) -> None:
        with shared.changed:
            shared.ready.append((item, error))
            shared.changed.notify_all()

    made = 0
    try:
        while True:
            with shared.changed:
                # A stop takes effect only here: by then all ranks made the same agreements.
                shared.changed.wait_for(
                    lambda made=made: made < shared.taken + ahead or shared.stopped)
                if made >= shared.taken + ahead:
                    return
            item = next(items, _END)
            put(item)
            made += 1
            if item is _END:
                return
    except BaseException as e:  # handed to the caller's thread
        put(None, e)
    finally:
        items.close()
