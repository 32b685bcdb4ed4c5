"""The mechanism behind both front ends (the trainer's StepLoader and `BalancedDataLoader`): steps
that are drawn, planned, loaded and agreed in a prefetch thread.

Flow per step, in the thread: draw -> lengths -> LAYOUT -> plan -> load -> COMMIT; in the caller:
dispatch. A `Feed` says where examples come from; planning runs as far ahead of loading as the feed
asks for (worker processes want work early).
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterator
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

import torch

from orchmllm.batch import UNCOUNTED, UNKNOWN, Step, on_this_device
from orchmllm.comm.errors import AgreedError
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.layout import NO_EXAMPLES, BatchLayout

T = TypeVar("T")


class Feed(Protocol):
    """Where examples come from; all methods are called by one thread.

    config_digest: configuration that all ranks have to share, as 64 bits. lookahead: steps that are
    planned beyond the one that is loaded, for worker processes that want work early; it may change
    from step to step, alike on all ranks. knows_all: whether every rank draws the whole global
    batch (only headers travel then). num_dropped: see Orchestrator.gather_layout.
    """

    config_digest: int
    lookahead: int
    knows_all: bool
    num_dropped: int

    def draw(self, index: int) -> BatchLayout | None:
        """The examples of a step, this rank's or all; called once for each, in order. None after
        the last one."""

    def announce(self, step: Step) -> None:
        """A step was planned; some more may follow before it is loaded (see lookahead)."""

    def load(self, step: Step) -> tuple[int, int]:
        """Adds what this rank processes to the microbatches, and to step.failed what could not be
        decoded; returns how many labels that holds (see Orchestrator.commit), or UNCOUNTED. Called
        once for each announced step, in order. If it exchanges data with other ranks it takes part
        in all exchanges whatever fails on this rank (see Postponed)."""

    def close(self) -> None:
        """Ends worker processes."""


class Pipeline:
    """Iterates `Step`s from first_step until the feed ends. prefetch: steps prepared ahead (0: in
    the caller's thread). accumulation_steps: microbatches.

    An exception of any rank while drawing, planning or loading is raised on all ranks as
    RemoteError with the same text, after the steps that were complete before it. On the rank that
    failed its __cause__ is the exception, with its traceback.
    num_dropped: examples that all ranks together left out; known at the end. committed: called
    after COMMIT, before another step is planned; it may change the orchestrator's spec.
    """

    def __init__(
        self, feed: Feed, orchestrator: Orchestrator, *, first_step: int = 0,
        accumulation_steps: int = 1, prefetch: int = 2,
        committed: Callable[[Step], None] = lambda step: None,
    ) -> None:
        self.feed, self.orchestrator, self.first_step = feed, orchestrator, first_step
        self.accumulation_steps, self.prefetch = accumulation_steps, prefetch
        self.committed, self.num_dropped = committed, 0
        self._loop_us: dict[int, int] = {}  # by step: what the caller took from it to the next

    def __iter__(self) -> Iterator[Step]:
        steps = self._steps()
        self.orchestrator.settle()
        ready = Prefetcher(steps, self.prefetch) if self.prefetch else steps
        # Waiting for other ranks takes no CPU time; of a GPU's work the host sees its wall time.
        clock = time.perf_counter if torch.cuda.is_initialized() else time.thread_time
        try:
            while True:
                started = time.perf_counter()
                step = next(ready, None)
                if step is None:
                    return
                step.wait_s = time.perf_counter() - started
                taken = clock()
                yield step
                self._loop_us[step.index] = int(1e6 * (clock() - taken))
        finally:
            if self.prefetch:
                self.orchestrator.gather.closed_thread = ready.thread
            ready.close()

    def _steps(self) -> Generator[Step, None, None]:
        """Everything up to COMMIT, in one thread. The order of agreements is the same on all ranks,
        whatever fails on one: LAYOUT of `lookahead` steps more, then COMMIT."""
        waiting: deque[Step] = deque()
        index, failure, ended = self.first_step, None, False
        try:
            while True:
                while not ended and len(waiting) <= self.feed.lookahead:
                    try:
                        step = self._plan(index)
                    except AgreedError as e:  # must not overtake the steps before it
                        step, failure = None, e
                        if self.orchestrator.is_shard:
                            step = Step(index, NO_EXAMPLES, error=e)
                            if self.orchestrator.spec.balance.measures(index):
                                self.orchestrator.any_refuses(True)  # where other shards plan it
                    if step is not None:
                        waiting.append(step)
                    ended = step is None  # an error may be this rank's alone: go on to COMMIT
                    index += 1
                if not waiting:
                    break
                yield self._load(waiting.popleft())
            if failure is not None:
                raise failure
        finally:
            self.feed.close()

    def _plan(self, index: int) -> Step | None:
        """LAYOUT and plan of a step; None after the last one."""
        orch, drawn, error = self.orchestrator, None, None
        try:
            drawn = self.feed.draw(index)
        except Exception as e:  # shared in LAYOUT, so that every rank raises it
            error = e
        started = time.perf_counter()
        layout, num_dropped = orch.gather_layout(
            index, None if self.feed.knows_all else drawn, error=error,
            exhausted=drawn is None and error is None, num_dropped=self.feed.num_dropped,
            config_digest=self.feed.config_digest)
        if layout is None:
            self.num_dropped = num_dropped
            return None
        step = Step(index, drawn if self.feed.knows_all else layout)
        try:
            if orch.spec.balance.measures(index):
                step.micro, step.kept_balanced = orch.plan_as_sampled(
                    step.layout, self.accumulation_steps)
                step.as_sampled = not step.kept_balanced
            if not step.as_sampled:
                step.micro = orch.plan(step.layout, self.accumulation_steps)
            step.plan_s = time.perf_counter() - started
            self.feed.announce(step)
        except Exception as e:  # shared in COMMIT
            step.error = e
        return step

    def _load(self, step: Step) -> Step:
        """Load and COMMIT. Ranks that send each other what they drew agree on the plan before: one
        that has an error, or another plan, would keep the others waiting for its data."""
        if not self.feed.knows_all:
            self.orchestrator.commit(step.index, step.plans, error=step.error)
        num_targets = UNCOUNTED
        if step.error is None:
            try:
                num_targets = self.feed.load(step)
            except Exception as e:  # shared in COMMIT, so that every rank raises it
                step.error = e
        started = time.perf_counter()
        # This step became wanted when the one `prefetch` before it was taken, on every rank: the
        # caller had ended the one before that.
        earlier = step.index - self.prefetch - 1
        step.failed, counts, step.geometry, step.seen, loop_us = self.orchestrator.commit(
            step.index, step.plans, error=step.error, failed=step.failed, num_targets=num_targets,
            geometry=max((micro.geometry for micro in step.micro), default=0),
            seen=max((micro.seen for micro in step.micro), default=(0, 0)),
            loop_us=self._loop_us.pop(earlier, UNKNOWN))
        step.loop = earlier, loop_us
        step.num_global_targets, step.num_shifted_targets = counts
        step.plan_s += time.perf_counter() - started
        self.committed(step)
        return step


class Prefetcher(Generic[T]):
    """Iterates a generator in a thread that works `ahead` items (>= 1) beyond the one last taken
    and no further, so that all ranks have made the same agreements whenever they stop together. The
    constructor waits for the first item: the generator starts its worker processes for it, and no
    other Python thread should be at work while processes are forked. An exception of the generator
    is raised by next()."""

    def __init__(self, items: Generator[T, None, None], ahead: int) -> None:
        self._wanted: SimpleQueue[bool] = SimpleQueue()  # True for each item, False: to stop
        self._ready: SimpleQueue[tuple[Any, Any]] = SimpleQueue()  # item, what is raised
        for _ in range(ahead):
            self._wanted.put(True)
        begun = threading.Event()
        self.thread = threading.Thread(
            target=on_this_device(_work), args=(items, self._wanted, self._ready, begun),
            name="orchmllm-prefetch", daemon=True)
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
    except StopIteration:  # the one that was raised keeps the frames that it passed alive
        ready.put((None, StopIteration))
    except BaseException as error:  # for the caller's thread
        ready.put((None, error))
    finally:
        begun.set()
        items.close()
