"""Reading and decoding by actors of a Ray cluster, in place of worker processes (data.preprocess).

A pool of readers is shared by the ranks of a run: whichever is free takes the next calls, and what
it made comes through Ray's object store, on the same node without a copy. Ray starts a reader that
was lost again, on another node if need be; its calls go to another one. What comes is what the rank
would have read, so losses do not depend on who decoded.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import numpy as np

from orchmllm.config.data import DataConfig
from orchmllm.data.loading.workers import (
    Call,
    Result,
    Workers,
    answer_to,
    chunks_of,
    results_of,
    use_one_core,
)

MOST_LOST = 3  # readers that are lost over the same calls: then these are the cause
SLOW_S = 10.0  # after which the log says what a rank waits for
Order = tuple[int, int, int]  # step, rank, number: what is smaller comes first


class Reader:
    """An actor that reads and decodes. opens: makes the dataset; folder: that the paths of a recipe
    are relative to; fingerprint: of the ranks' dataset."""

    def __init__(self, opens: Callable[[], Any], folder: str, fingerprint: dict) -> None:
        self._opens, self._folder, self._fingerprint = opens, folder, fingerprint
        self._dataset: Any = None

    def open(self) -> str:
        """Where it runs. Raises ValueError where it would not read what the ranks do."""
        import ray

        if self._dataset is None:
            use_one_core()
            os.chdir(self._folder)
            dataset = self._opens()
            there = dataset.fingerprint()
            if wrong := [k for k, v in self._fingerprint.items() if there.get(k) != v]:
                raise ValueError(f"{', '.join(wrong)}: not those of the ranks; every node has to "
                                 "see the same files at the same paths")
            self._dataset = dataset
        return f"node {ray.util.get_node_ip_address()}, process {os.getpid()}"

    def answer(self, method: str, calls: Sequence[Call]) -> tuple[Any, None]:
        """(See workers.answer_to; what says that it is there.)"""
        self.open()  # Ray may have started it again while nobody asked it
        return answer_to(self._dataset, method, calls), None


class Pool:
    """An actor that deals calls to readers, those of earlier steps first. num_readers: that it asks
    the cluster for; opening: arguments of each Reader."""

    def __init__(self, num_readers: int, *opening: Any) -> None:
        self._num_readers, self._opening = num_readers, opening
        self._waiting: asyncio.PriorityQueue = asyncio.PriorityQueue()
        self._serving: list[asyncio.Task] = []
        self._reads: dict[Order, str] = {}  # who reads what
        self._refused: Exception | None = None

    async def start(self) -> None:
        """Asks for readers; they work as soon as the cluster has a core for them."""
        import ray

        reader = ray.remote(Reader).options(num_cpus=1, max_restarts=-1,
                                            scheduling_strategy="SPREAD")
        self._serving = [asyncio.create_task(self._serve(reader.remote(*self._opening)))
                         for _ in range(self._num_readers)]

    async def load(self, order: Order, method: str, calls: Sequence[Call]) -> list:
        """[The object with what a reader answered.] Raises RuntimeError where a reader cannot be
        opened, and for calls with which readers are lost."""
        if self._refused is not None:
            raise self._refused
        made = asyncio.get_running_loop().create_future()
        self._waiting.put_nowait((order, method, calls, made, 0))
        return [await made]

    async def tell(self, text: str, waits: Order | None = None) -> None:
        """Prints what a rank says; of calls that it waits for, who has them."""
        _say(text if waits is None else f"{text}: {self._reads.get(waits, 'no reader is free')}")

    async def _serve(self, reader: Any) -> None:
        """Gives a reader work for ever."""
        import ray

        where = ""
        while True:
            work = None
            try:
                where = await reader.open.remote()
                while True:
                    work = order, method, calls, made, _ = await self._waiting.get()
                    self._reads[order] = where
                    answered, there = reader.answer.options(num_returns=2).remote(method, calls)
                    await there
                    del self._reads[order]
                    made.set_result(answered)
                    work = None
            except ray.exceptions.RayActorError as error:
                if error.actor_init_failed:  # Ray does not start it again
                    self._refuse(where, str(error).strip().splitlines()[-1])
                    return
                if where:  # else it has not started again
                    _say(f"lost: {where}; Ray starts another reader")
                where = ""
                if work is not None:
                    self._again(*work)
            except Exception as error:
                if work is not None:
                    self._waiting.put_nowait(work)
                self._refuse(where, getattr(error, "cause", error))
                return

    def _again(self, order: Order, method: str, calls: Sequence[Call], made: asyncio.Future,
               num_lost: int) -> None:
        """The calls of a reader that was lost are for another one, unless it is they that end
        readers."""
        del self._reads[order]
        if self._refused is not None:  # the others may have ended
            made.set_exception(self._refused)
        elif num_lost + 1 < MOST_LOST:
            self._waiting.put_nowait((order, method, calls, made, num_lost + 1))
        else:
            made.set_exception(RuntimeError(
                f"data.preprocess: {MOST_LOST} readers were lost over the examples "
                f"{[args[0] for args, _ in calls]} (killed, or out of memory)"))

    def _refuse(self, where: str, cause: object) -> None:
        """The run cannot go on: nodes have to be mended."""
        self._refused = RuntimeError(
            f"data.preprocess: {where or 'a reader'} cannot be used: {cause}")
        while not self._waiting.empty():
            self._waiting.get_nowait()[3].set_exception(self._refused)


class RayWorkers:
    """The same as Workers, by the readers of a pool. What none of them can read this rank reads
    itself. Used by one thread."""

    num_workers = 0  # a reader reads rows itself
    _numbers = count()  # of all loaders of a rank: training and validation ask for the same steps

    def __init__(self, dataset: Any, pool: Any, num_workers: int, rank: int) -> None:
        self._pool, self.at_once, self._rank = pool, num_workers, rank
        self._local = Workers(dataset, 0)

    def start(self) -> None:
        """There is nothing to start: the pool serves all loaders of a run."""

    def request(self, method: str, calls: Sequence[Call], step: int, *, alone: bool = False
                ) -> Callable[[], list[Result]]:
        """See Workers.request."""
        asked = []
        for chunk in chunks_of(calls, self.at_once, alone):
            order = step, self._rank, next(self._numbers)
            asked.append((order, chunk, self._pool.load.remote(order, method, chunk)))
        return lambda: [result for order, chunk, reply in asked
                        for result in self._come(order, method, chunk, reply)]

    def close(self) -> None:
        """See start."""

    def _come(self, order: Order, method: str, calls: Sequence[Call], reply: Any) -> list[Result]:
        import ray

        waited_s = 0.0
        while True:
            while not ray.wait([reply], timeout=SLOW_S)[0]:
                waited_s += SLOW_S
                first = self._local.dataset.name(calls[0][0][0])
                self._pool.tell.remote(f"step {order[0]}, rank {order[1]} has waited {waited_s:g} "
                                       f"s for what it needs of {len(calls)} examples, first "
                                       f"{first}", order)
            try:
                results = results_of(ray.get(ray.get(reply)[0]))
                break
            except ray.exceptions.RayTaskError as error:
                raise RuntimeError(str(error.cause)) from error
            except ray.exceptions.ObjectLostError:  # with the node that had it
                reply = self._pool.load.remote(order, method, calls)
        wrong = [k for k, (_, failed, _) in enumerate(results) if failed]
        own = self._local.request(method, [calls[k] for k in wrong], order[0])() if wrong else []
        for k, result in zip(wrong, own, strict=True):  # a node may lack files that are here
            if result[1] != results[k][1]:
                self._pool.tell.remote("a reader cannot read what this rank can, and has to see "
                                       f"the same files: {results[k][1][0][1]}")
            results[k] = result
        return results


def join_pool(data: DataConfig, opens: Callable[[], Any], dataset: Any, rank: int, num_ranks: int,
              gather: Callable[[list[float]], np.ndarray]) -> Any:
    """The pool of a run, which rank 0 makes; None where the recipe asks for none. Collective;
    gather: n numbers of each rank -> (num_ranks, n). opens: makes `dataset` elsewhere. Raises
    RuntimeError on all ranks where one of them finds no cluster."""
    if not data.preprocess:
        return None
    import ray

    # Of arrays in shared memory, which are copied when a batch is made of them.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    number, problem, pool = random.getrandbits(50), None, None
    try:
        if not ray.is_initialized():
            with _own_signals():
                ray.init(address="auto", log_to_driver=rank == 0, logging_level="WARNING")
        if rank == 0:
            pool = ray.remote(Pool).options(
                name=f"pool{number}", namespace="orchmllm", num_cpus=0, max_concurrency=10_000,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False)).remote(
                data.num_workers * num_ranks, opens, os.getcwd(), dataset.fingerprint())
            ray.get(pool.start.remote())
    except Exception as error:  # the other ranks wait in the collective
        problem = error
    rows = gather([float(number), float(problem is not None)])
    if rows[:, 1].any():
        raise RuntimeError(f"data.preprocess: rank {int(rows[:, 1].argmax())} cannot use a Ray "
                           "cluster, which `ray start` on its node, or $RAY_ADDRESS, gives it"
                           + (f": {problem}" if problem else "")) from problem
    try:
        pool = pool or ray.get_actor(f"pool{int(rows[0, 0])}", namespace="orchmllm")
    except Exception as error:  # as above
        problem = error
    if gather([float(problem is not None)]).any():
        raise RuntimeError("data.preprocess: all ranks have to belong to one Ray cluster, which "
                           f"$RAY_ADDRESS may name{f': {problem}' if problem else ''}") from problem
    return pool


@contextmanager
def own_cluster(data: DataConfig) -> Iterator[None]:
    """Where the recipe asks for Ray and this machine belongs to no cluster, one that ends with
    this; processes that start here find it."""
    if not data.preprocess:
        yield
        return
    import ray

    with _own_signals():
        there = ray.init(include_dashboard=False, log_to_driver=False, logging_level="WARNING")
    os.environ["RAY_ADDRESS"] = there.address_info["gcs_address"]
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray would leave a handler of SIGTERM behind."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, handler)


def _say(text: str) -> None:
    print(f"data.preprocess: {text}", file=sys.stderr, flush=True)  # Ray shows it on rank 0
