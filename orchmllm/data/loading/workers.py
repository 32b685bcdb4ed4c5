"""Worker processes that read and decode for the trainer's loader.

A worker is a fork of the rank: it has the dataset as it is, with every file that it reads opened
anew or read with pread. Results come back through a pipe as numpy arrays, in the order of the
calls, so that a step is the same with any number of workers.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkContext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import Example
from orchmllm.data.loading.forks import SureFork
from orchmllm.plan.layout import TEXT

CHUNKS_PER_WORKER = 4  # of a request: small enough to even out, large enough to be worth sending
ORPHAN_CHECK_S = 0.5


Call = tuple[tuple, dict[str, Any]]  # arguments of a method of the dataset; on_error is added
# What a call returned, and (segment, reason, modality) of each medium that failed; the modality is
# TEXT where a row failed as a whole.
Result = tuple[Any, list[tuple[int, str, int]]]


class _Worker(SureFork):
    """Daemonic: an interpreter that exits before close() ends its workers, not waits for them."""

    def __init__(self, *args: Any, **keys: Any) -> None:
        super().__init__(*args, **keys, daemon=True)

    def terminate(self) -> None:
        """What the pool does to the others when one died; SIGTERM is not for workers."""
        self.kill()


class _Context(ForkContext):
    def __init__(self) -> None:
        self.workers: list[_Worker] = []

    def Process(self, *args: Any, **keys: Any) -> _Worker:
        self.workers.append(_Worker(*args, **keys))
        return self.workers[-1]


class Workers:
    """num_workers: processes, forked at the first request; 0: calls run in the caller's thread
    when their results are asked for. Used by one thread."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}: must be >= 0")
        self.dataset, self.num_workers = dataset, num_workers
        self._pool: ProcessPoolExecutor | None = None
        self._context = _Context()

    def request(self, method: str, calls: Sequence[Call]) -> Callable[[], list[Result]]:
        """Starts calls of the dataset's `load` or `decode`; what is returned waits for their
        results, in order.

        It raises what a call raised, and RuntimeError if a worker died or could not be started."""
        if not self.num_workers:
            return lambda: [_run(self.dataset, method, call) for call in calls]
        size = max(1, -(-len(calls) // (CHUNKS_PER_WORKER * self.num_workers)))
        chunks = [calls[at: at + size] for at in range(0, len(calls), size)]
        futures = [self._submit(method, chunk) for chunk in chunks]
        return lambda: [(_convert(value, np.ndarray, torch.from_numpy), failed)
                        for future in futures for value, failed in _result_of(future)]

    def _submit(self, method: str, chunk: Sequence[Call]) -> Future:
        if self._pool is None:
            self._context = _Context()
            self._pool = ProcessPoolExecutor(
                self.num_workers, self._context, _start, (self.dataset, os.getpid()))
        try:
            return self._pool.submit(_run_all, method, chunk)
        except BrokenProcessPool as error:
            raise _died() from error
        except BaseException:  # a pool that started some of its workers would not end them
            for worker in self._context.workers:
                if worker.pid is not None:
                    worker.kill()
                    worker.join()
            self._pool = None
            raise

    def close(self) -> None:
        """Ends the processes; calls that have not started are dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None


def _result_of(future: Future) -> list[Result]:
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _died() from error


def _died() -> RuntimeError:
    return RuntimeError("a data worker exited unexpectedly (killed, or out of memory); "
                        "data.num_workers=0 decodes in the rank itself")


# In the worker.

_dataset: Any = None


def _start(dataset: Any, parent: int) -> None:
    """The rank decides when a worker ends: signals to the process group are not for it, but it
    does not outlive the rank."""
    global _dataset
    _dataset = dataset
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads did not survive the fork
    torch.set_num_threads(1)  # nor did OpenMP's
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


def _run_all(method: str, calls: Sequence[Call]) -> list[Result]:
    """With arrays for tensors, which would travel as descriptors of shared memory and need their
    worker to stay alive."""
    results = (_run(_dataset, method, call) for call in calls)
    return [(_convert(value, Tensor, Tensor.numpy), failed) for value, failed in results]


def _run(dataset: Any, method: str, call: Call) -> Result:
    failed: list[tuple[int, str, int]] = []

    def on_error(segment: int, error: Exception) -> None:
        failed.append((segment, getattr(error, "reason", str(error)),
                       getattr(error, "modality", TEXT)))

    return getattr(dataset, method)(*call[0], **call[1], on_error=on_error), failed


def _convert(value: Any, kind: type, to: Callable) -> Any:
    if isinstance(value, Example):
        parts = (value.token_ids, value.labels)
        return Example(value.example_id, *(p if p is None else to(p) for p in parts),
                       {s: to(m) for s, m in value.media.items()})
    return to(value) if isinstance(value, kind) else value
