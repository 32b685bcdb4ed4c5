"""Worker processes that read and decode for the trainer's loader.

A worker is a fork of the rank: it has the dataset as it is, with every file that it reads opened
anew or read with pread. Results come back as numpy arrays, in the order of the calls, so that a
step is the same with any number of workers. Each worker has a pipe of its own. With a queue that
is shared, as in a ProcessPoolExecutor, a worker that is killed while it writes an answer leaves the
rank waiting for the rest of it for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.pool import RemoteTraceback
from multiprocessing.reduction import ForkingPickler
from multiprocessing.util import Finalize
from queue import PriorityQueue, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import ProcessedExample
from orchmllm.comm.agree import describe
from orchmllm.data.loading.forks import SureFork
from orchmllm.plan.layout import TEXT

CHUNKS_PER_WORKER = 4  # of a request: small enough to even out, large enough to be worth sending
ORPHAN_CHECK_S = 0.5


Call = tuple[tuple, dict[str, Any]]  # arguments of a method of the dataset; on_error is added
# What a call returned; (segment, reason, modality) of each medium that failed, TEXT where a row
# failed as a whole; and the seconds that it took.
Result = tuple[Any, list[tuple[int, str, int]], float]
Answer = tuple[list[Result], str, str]  # results, or an error and its traceback


class _Worker(SureFork):
    """Answers one request at a time through a pipe of its own. It shares no lock and no queue with
    another process: whenever it is killed, even halfway through an answer, the rank reads the end
    of the file. Daemonic: an interpreter that exits before close() ends its workers."""

    def __init__(self, dataset: Any) -> None:
        self.pipe, self._theirs = Pipe()
        super().__init__(target=_serve, args=(dataset, os.getpid(), self._theirs), daemon=True)

    def start(self) -> None:
        try:
            super().start()
        finally:
            self._theirs.close()  # the worker has the only other one

    def ask(self, method: str, chunk: Sequence[Call]) -> bytes:
        """The pickled answer; EOFError or OSError if the worker has died."""
        self.pipe.send((method, chunk))
        return self.pipe.recv_bytes()

    def end(self) -> None:
        """A worker keeps nothing, and SIGTERM is not for it."""
        if self.pid is not None:
            self.kill()
            self.join()
        self.pipe.close()


class Workers:
    """num_workers: processes, forked at start() or the first request; 0: calls run in the caller's
    thread when their results are asked for. Used by one thread. Raises ValueError for a negative
    number."""

    def __init__(self, dataset: Any, num_workers: int) -> None:
        if num_workers < 0:
            raise ValueError(f"num_workers is {num_workers}: must be >= 0")
        self.dataset, self.num_workers = dataset, num_workers
        self.at_once = num_workers  # calls that are answered at the same time
        self.processes: list[_Worker] = []
        self._idle: SimpleQueue[_Worker] = SimpleQueue()
        # (step, number, calls, their answer): what is smaller comes first
        self._waiting: PriorityQueue[tuple[int, int, tuple, Future]] = PriorityQueue()
        self._numbers = count()
        self._threads: ThreadPoolExecutor | None = None  # one waits for each worker
        self._at_exit: Finalize | None = None

    def request(self, method: str, calls: Sequence[Call], step: int = 0, *, alone: bool = False
                ) -> Callable[[], list[Result]]:
        """Starts calls of the dataset's `load`; what is returned waits for their results, in order.
        step: that needs them; those of earlier steps start first. alone: a worker gets one at a
        time.

        It raises RuntimeError with the text of what a call raised in a worker, and if a worker died
        or could not be started."""
        if not self.num_workers:
            return lambda: _results(self.dataset, method, calls)
        self.start()
        answers = []
        for chunk in chunks_of(calls, self.num_workers, alone):
            answers.append(Future())
            self._waiting.put((step, next(self._numbers), (method, chunk), answers[-1]))
            self._threads.submit(self._answer)
        return lambda: [result for answer in answers
                        for result in results_of(ForkingPickler.loads(answer.result()))]

    def start(self) -> None:
        """Forks the processes if they are not there. Raises RuntimeError if they do not start."""
        if not self.num_workers or self._threads is not None:
            return
        self.processes = []
        # Before multiprocessing asks its children to end with SIGTERM.
        self._at_exit = Finalize(self, _end, (self.processes,), exitpriority=1)
        try:
            for _ in range(self.num_workers):
                self.processes.append(_Worker(self.dataset))
                self.processes[-1].start()  # before the next pipe is made: no other has its end
                self._idle.put(self.processes[-1])
        except BaseException:
            self.close()
            raise
        self._threads = ThreadPoolExecutor(self.num_workers, "data-worker")

    def _answer(self) -> None:
        """Waits for a worker, which gets the first calls."""
        worker = self._idle.get()
        _, _, calls, answer = self._waiting.get()
        try:
            answer.set_result(worker.ask(*calls))
        except (EOFError, OSError) as error:
            died = RuntimeError("a data worker exited unexpectedly (killed, or out of memory); "
                                "data.num_workers=0 decodes in the rank itself")
            died.__cause__ = error
            answer.set_exception(died)
        except BaseException as error:  # of calls that cannot be pickled
            answer.set_exception(error)
        finally:
            self._idle.put(worker)  # one that died fails every call that it gets

    def close(self) -> None:
        """Ends the processes, whatever they are doing; calls that have not started are dropped."""
        for worker in self.processes:  # a thread that waits for an answer reads the end of file
            if worker.pid is not None:
                worker.kill()
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        if self._at_exit is not None:
            self._at_exit()
        self._idle, self._waiting, self._at_exit = SimpleQueue(), PriorityQueue(), None


def _end(processes: list[_Worker]) -> None:
    for worker in processes:
        worker.end()


def chunks_of(calls: Sequence[Call], num_workers: int, alone: bool) -> list[Sequence[Call]]:
    """What is asked of a worker at a time."""
    size = 1 if alone else max(1, -(-len(calls) // (CHUNKS_PER_WORKER * num_workers)))
    return [calls[at: at + size] for at in range(0, len(calls), size)]


def results_of(answer: Answer) -> list[Result]:
    """Raises RuntimeError with what a call raised."""
    results, error, traceback_text = answer
    if error:
        raise RuntimeError(f"a data worker failed: {error}") from RemoteTraceback(traceback_text)
    return [(_convert(value, np.ndarray, torch.from_numpy), *rest) for value, *rest in results]


# In the worker.

def _serve(dataset: Any, parent: int, pipe: Connection) -> None:
    """The rank decides when a worker ends: signals to the process group are not for it, but it
    does not outlive the rank."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    use_one_core()  # threads did not survive the fork
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    while True:
        answer = answer_to(dataset, *pipe.recv())
        try:
            pickled = ForkingPickler.dumps(answer)
        except Exception as error:  # of what a dataset returned
            pickled = ForkingPickler.dumps(([], describe(error), traceback.format_exc()))
        pipe.send_bytes(pickled)


def use_one_core() -> None:
    """For a process beside others that decode."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)


def answer_to(dataset: Any, method: str, calls: Sequence[Call]) -> Answer:
    """What a worker sends back. Tensors are arrays: they would travel as descriptors of shared
    memory and need their worker to stay alive."""
    try:
        return [(_convert(value, Tensor, Tensor.numpy), *rest)
                for value, *rest in _results(dataset, method, calls)], "", ""
    except Exception as error:  # as text: not every exception can be pickled
        return [], describe(error), traceback.format_exc()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


def _results(dataset: Any, method: str, calls: Sequence[Call]) -> list[Result]:
    if method == "load" and hasattr(dataset, "prepare_loads"):
        dataset.prepare_loads(calls)
    return [_run(dataset, method, call) for call in calls]


def _run(dataset: Any, method: str, call: Call) -> Result:
    failed: list[tuple[int, str, int]] = []

    def on_error(segment: int, error: Exception) -> None:
        failed.append((segment, getattr(error, "reason", str(error)),
                       getattr(error, "modality", TEXT)))

    started = time.perf_counter()
    value = getattr(dataset, method)(*call[0], **call[1], on_error=on_error)
    return value, failed, time.perf_counter() - started


def _convert(value: Any, kind: type, to: Callable) -> Any:
    """The value, or a copy of an example, in which to(x) is in the place of each x of `kind`."""
    if isinstance(value, kind):
        return to(value)
    if isinstance(value, dict):
        return {key: _convert(part, kind, to) for key, part in value.items()}
    if isinstance(value, ProcessedExample):
        return replace(value, **{field.name: _convert(getattr(value, field.name), kind, to)
                                 for field in fields(value)})
    return value
