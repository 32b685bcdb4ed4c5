"""The mechanism behind both front ends (the trainer's StepLoader and `BalancedDataLoader`): steps
that are drawn, planned, loaded and agreed in a prefetch thread.

Flow per step, in the thread: draw -> lengths -> LAYOUT -> plan -> load -> COMMIT; in the caller:
dispatch. A `Feed` says where examples come from; planning runs as far ahead of loading as the feed
asks for (worker processes want work early).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from orchmllm.comm.errors import AgreedError
from orchmllm.data.loading.prefetch import Prefetcher
from orchmllm.orchestrator import UNKNOWN, FailedSegment, Orchestrator
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import RankPlan, StepPlan

T = TypeVar("T")


class Drawn(NamedTuple):
    """What a rank knows of a step before LAYOUT. part: layout of its own examples; everything:
    instead, the whole global batch's, where every rank knows it (only headers travel then).
    content: whatever the feed needs to load it. num_dropped: see Orchestrator.gather_layout."""

    part: BatchLayout | None = None
    everything: BatchLayout | None = None
    content: Any = None
    exhausted: bool = False
    num_dropped: int = 0


@dataclass(frozen=True)
class PlannedStep:
    """A step after LAYOUT. plans: per microbatch (positions of its examples in the step's batch,
    its plan); rank_plans: this rank's parts. error: why there is no plan."""

    index: int
    layout: BatchLayout
    content: Any
    plans: list[tuple[np.ndarray, StepPlan]]
    rank_plans: list[RankPlan]
    plan_s: float
    error: Exception | None = None


@dataclass(frozen=True)
class Loaded:
    """What a feed made of a plan: content per microbatch. num_targets: labels in it, or UNKNOWN."""

    micro: list[Any]
    failed: list[FailedSegment] = field(default_factory=list)
    num_targets: int = UNKNOWN


@dataclass(frozen=True)
class Ready(Generic[T]):
    """A step after COMMIT. num_targets: of all ranks and microbatches, None if nobody counted."""

    planned: PlannedStep
    micro: list[T]
    failed: list[FailedSegment]
    num_targets: int | None
    plan_s: float
    wait_s: float = 0.0


class Feed(Protocol):
    """Where examples come from; all methods are called by one thread.

    config_digest: configuration that all ranks have to share, as 64 bits. lookahead: steps that are
    planned beyond the one that is loaded, for worker processes that want work early; equal on all
    ranks.
    """

    config_digest: int
    lookahead: int

    def draw(self, index: int) -> Drawn:
        """The examples of a step; called once for each, in order."""
        ...

    def announce(self, planned: PlannedStep) -> None:
        """A step was planned; up to `lookahead` more follow before it is loaded."""
        ...

    def load(self, planned: PlannedStep) -> Loaded:
        """What this rank processes of a step; called once for each announced one, in order. If it
        exchanges data with other ranks it takes part in all exchanges whatever fails on this rank
        (see Postponed)."""
        ...

    def close(self) -> None:
        """Ends worker processes."""
        ...


class Postponed:
    """What failed on this rank between exchanges of one step, until all of them are done: the other
    ranks are waiting in them, and learn of it in COMMIT.

    incomplete: whether another rank had nothing to send in place of an item."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self.incomplete = False

    def call(self, function: Callable[..., T], *args: Any) -> T | None:
        """function(*args); None if it raises."""
        try:
            return function(*args)
        except Exception as e:
            self._error = self._error or e
            return None

    def everything_came(self) -> bool:
        """After the last exchange: raises this rank's first error; False if that of another rank
        leaves nothing to do but to go to COMMIT, where it is raised."""
        if self._error is not None:
            raise self._error
        return not self.incomplete


class Pipeline:
    """Iterates `Ready` steps from first_step until the feed ends. prefetch: steps prepared ahead
    (0: in the caller's thread). accumulation_steps: microbatches.

    An exception of any rank while drawing, planning or loading is raised on all ranks as
    RemoteError with the same text, after the steps that were complete before it. On the rank that
    failed its __cause__ is the exception, with its traceback.
    num_dropped: examples that all ranks together left out; known at the end.
    """

    def __init__(
        self, feed: Feed, orchestrator: Orchestrator, *, first_step: int = 0,
        accumulation_steps: int = 1, prefetch: int = 2,
    ) -> None:
        if accumulation_steps < 1:
            raise ValueError(f"accumulation_steps is {accumulation_steps}: must be >= 1")
        if prefetch < 0:
            raise ValueError(f"prefetch is {prefetch}: must be >= 0")
        self.feed, self.orchestrator, self.first_step = feed, orchestrator, first_step
        self.accumulation_steps, self.prefetch = accumulation_steps, prefetch
        self.num_dropped = 0

    @property
    def ahead(self) -> int:
        """Steps that may be planned beyond the one last yielded."""
        return self.prefetch + self.feed.lookahead

    def __iter__(self) -> Iterator[Ready]:
        if self.prefetch == 0:
            steps = self._steps()
            try:
                while True:
                    started = time.perf_counter()
                    step = next(steps, None)
                    if step is None:
                        return
                    yield replace(step, wait_s=time.perf_counter() - started)
            finally:
                steps.close()
        ahead = Prefetcher(self._steps(), self.prefetch)
        try:
            while True:
                started = time.perf_counter()
                try:
                    step = ahead.next()
                except StopIteration:
                    return
                yield replace(step, wait_s=time.perf_counter() - started)
        finally:
            ahead.close()

    def _steps(self) -> Generator[Ready, None, None]:
        """Everything up to COMMIT, in one thread. The order of agreements is the same on all ranks,
        whatever fails on one: LAYOUT of `lookahead` steps more, then COMMIT."""
        waiting: deque[PlannedStep] = deque()
        index, failure, ended = self.first_step, None, False
        try:
            while True:
                while not ended and len(waiting) <= self.feed.lookahead:
                    try:
                        planned = self._plan(index)
                    except AgreedError as e:  # must not overtake the steps before it
                        planned, failure = None, e
                    if planned is not None:
                        waiting.append(planned)
                    ended = planned is None  # an error may be this rank's alone: go on to COMMIT
                    index += 1
                if not waiting:
                    break
                yield self._load(waiting.popleft())
            if failure is not None:
                raise failure
        finally:
            self.feed.close()

    def _load(self, planned: PlannedStep) -> Ready:
        """Load and COMMIT."""
        loaded, error = Loaded([]), planned.error
        if error is None:
            try:
                loaded = self.feed.load(planned)
            except Exception as e:  # shared in COMMIT, so that every rank raises it
                error = e
        return self._commit(planned, loaded, error)

    def _plan(self, index: int) -> PlannedStep | None:
        """LAYOUT and plan of a step; None after the last one."""
        orch, drawn, error = self.orchestrator, Drawn(), None
        try:
            drawn = self.feed.draw(index)
        except Exception as e:  # shared in LAYOUT, so that every rank raises it
            error = e
        started = time.perf_counter()
        with caused_by(error):
            gathered = orch.gather_layout(
                index, drawn.part, error=describe(error), exhausted=drawn.exhausted,
                num_dropped=drawn.num_dropped, config_digest=self.feed.config_digest)
        if gathered.layout is None:
            self.num_dropped = gathered.num_dropped
            return None
        layout = gathered.layout if drawn.everything is None else drawn.everything
        plans, rank_plans, error = [], [], None
        try:
            plans = orch.plan(layout, self.accumulation_steps)
            rank_plans = [orch.rank_plan(plan) for _, plan in plans]
        except Exception as e:  # shared in COMMIT
            error = e
        planned = PlannedStep(index, layout, drawn.content, plans, rank_plans,
                          time.perf_counter() - started, error)
        if error is None:
            try:
                self.feed.announce(planned)
            except Exception as e:  # shared in COMMIT
                return replace(planned, error=e)
        return planned

    def _commit(self, planned: PlannedStep, loaded: Loaded, error: Exception | None) -> Ready:
        started = time.perf_counter()
        with caused_by(error):
            committed = self.orchestrator.commit(
                planned.index, [p for _, p in planned.plans], error=describe(error),
                failed=loaded.failed, num_targets=loaded.num_targets)
        return Ready(planned, loaded.micro, committed.failed, committed.num_targets,
                     planned.plan_s + time.perf_counter() - started)


def describe(error: BaseException | None) -> str | None:
    """The text under which an exception is raised on all ranks."""
    return None if error is None else f"{type(error).__name__}: {error}"


@contextmanager
def caused_by(error: BaseException | None) -> Iterator[None]:
    """In the block, what all ranks raise together has this rank's own exception as its cause, so
    that its traceback is shown."""
    try:
        yield
    except AgreedError as agreed:
        raise agreed from error
