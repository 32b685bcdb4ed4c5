"""The trainer's front end: steps of a dataset that knows lengths before it decodes, and decodes
single segments. orchmllm.data.loading.pipeline has the mechanism; here stands what each rank reads,
by dispatch, and in whose process:

- `load`: the media that this rank encodes and the text that its LLM takes.
- `tensors`: whole examples that it sampled; rows move later, on the device's group.
- `bytes`: whole examples that it sampled, of which the media that leave stay encoded; media and
  text move here, and are decoded after.

An example is one call of the dataset on each rank that needs something of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from orchmllm.batch import FailedSegment, Microbatch, Step
from orchmllm.data.loading.pipeline import Pipeline
from orchmllm.data.loading.ray_workers import RayWorkers
from orchmllm.data.loading.workers import Workers
from orchmllm.data.sampler import GlobalSampler
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import phase_figures


class SegmentFeed:
    """Examples of a dataset that knows lengths before it decodes, and decodes single segments. With
    worker processes the next step is planned before one is taken, so that they have work meanwhile.
    pool: of a Ray cluster, reads and decodes instead (orchmllm.data.loading.ray_workers).

    dataset: has reader, layout, load and describe of
    orchmllm.data.dataset.ConversationDataset; for dispatch `bytes` load with `encoded`. If it has
    them, kept, layouts and prepare_loads are used, too: to give a worker what
    planning read, and to read several examples at once."""

    num_dropped = 0
    options: Mapping[str, Any] = {}  # of every call of the dataset's load

    def __init__(self, dataset: Any, sampler: GlobalSampler, orchestrator: Orchestrator,
                 num_steps: int, num_workers: int = 0, pool: Any = None) -> None:
        self.dataset, self.sampler, self.orchestrator = dataset, sampler, orchestrator
        self.num_steps = num_steps
        self.lookahead = self.config_digest = int(num_workers > 0)
        self.dispatch = orchestrator.spec.balance.dispatch
        self.knows_all = self.dispatch == "load"  # every rank can probe every example
        self._workers = (Workers(dataset, num_workers) if pool is None else
                         RayWorkers(dataset, pool, num_workers, orchestrator.rank))
        self._requested: deque[list[Request]] = deque()

    def draw(self, index: int) -> BatchLayout | None:
        if index >= self.num_steps:
            return None
        self._workers.start()  # before this process has threads that fetch
        sampled, rank = self.sampler.batch(index), self.orchestrator.rank
        shares = self.sampler.shares(index, self.orchestrator.world_size)
        probed = sampled if self.knows_all else sampled[shares[rank]]
        sizes = [s.stop - s.start for s in shares] if self.knows_all else [len(probed)]
        if hasattr(self.dataset, "layouts"):
            return self.dataset.layouts(probed, sizes)
        return BatchLayout.concat([self.dataset.layout(int(i)) for i in probed], sizes)

    def announce(self, step: Step) -> None:
        self._requested.append([
            Request(micro, self.orchestrator.rank, self.dispatch, self.dataset, self._workers,
                    self.options, step.index)
            for micro in step.micro])

    def close(self) -> None:
        self._requested.clear()
        self._workers.close()

class Request:
    """What this rank reads of a microbatch, one call for each example: for `load` what it
    processes, in slot order, else what it sampled, in source order. media[phase]: (example,
    segment); texts: examples. options: further keywords of each call."""

    def __init__(self, micro: Microbatch, rank: int, dispatch: str, dataset: Any,
                 workers: Workers | RayWorkers, options: Mapping[str, Any], step: int) -> None:
        plan, layout, mine = micro.plan, micro.plan.layout, micro.rank_plan
        self.micro, self.media = micro, {}
        sampled = np.arange(layout.num_examples)[plan.llm.items_of(rank)]
        self.texts = (mine.examples if dispatch == "load" else sampled).tolist()
        wanted: dict[int, dict] = {
            e: {"text": True, "segments": [], **options} for e in self.texts}
        for phase, code in ENCODERS.items():
            self.media[phase] = here = list(map(tuple, mine.media[phase].tolist()))
            if dispatch != "load":
                at = layout.places(layout.segments[code][plan.encode[phase].items_of(rank)])
                self.media[phase] = list(map(tuple, at.tolist()))
            leaving = set(self.media[phase]).difference(here) if dispatch == "bytes" else ()
            for example, segment in self.media[phase]:
                keys = wanted.setdefault(
                    example, {"text": False, "segments": [], **options})
                keys["segments"].append(segment)
                if (example, segment) in leaving:
                    keys.setdefault("encoded", []).append(segment)
        kept = getattr(dataset, "kept", None) if workers.num_workers else None
        calls = []
        for example, keys in wanted.items():
            index = int(layout.example_id[example])
            if kept is not None:  # a worker would have to read the row again
                keys["row"] = kept(index)
            calls.append(((index,), keys))
        self._examples, self._results = list(wanted), workers.request("load", calls, step)

    def loaded(self, step: Step) -> dict[int, Any]:
        """Waits. What the dataset loaded of each example; what could not be decoded is added to
        step.failed."""
        out = {}
        for example, (value, failures) in zip(self._examples, self._results(), strict=True):
            out[example] = value
            position = int(self.micro.positions[example])
            step.failed += [FailedSegment(position, *failure) for failure in failures]
        return out

class StepLoader(Pipeline):
    """The trainer's front end: yields `Step`s from first_step to num_steps (exclusive), or until
    the sampler's pass ends.

    dataset: see SegmentFeed. sampler: global batches.
    num_workers: processes that read and decode; 0: the prefetch thread does. pool: see SegmentFeed.
    flops_of: useful FLOP of each phase of a layout, where a step's are to be counted. feed: makes
    an orchmllm.data.loading.whole_examples.WholeFeed of the first arguments. Other arguments and
    errors: see Pipeline.
    """

    def __init__(
        self, dataset: Any, sampler: GlobalSampler, orchestrator: Orchestrator, *,
        num_steps: int, first_step: int = 0, accumulation_steps: int = 1, prefetch: int = 2,
        num_workers: int = 0, pool: Any = None,
        flops_of: Callable[[BatchLayout], dict[str, float]] | None = None,
        feed: Callable[..., SegmentFeed],
    ) -> None:
        self._flops_of = flops_of
        super().__init__(feed(dataset, sampler, orchestrator, num_steps, num_workers, pool),
                         orchestrator, first_step=first_step, prefetch=prefetch,
                         accumulation_steps=accumulation_steps)

    def _load(self, step: Step) -> Step:
        """With the figures of its plans, and labels as the lengths tell them, without those of
        examples that failed."""
        super()._load(step)
        step.phases = phase_figures(step.layout, step.plans)
        if self._flops_of is not None:
            step.useful_flop = sum(sum(self._flops_of(p.layout).values()) for p in step.plans)
        lost = np.zeros(step.layout.num_examples, bool)
        lost[[f.example for f in step.failed]] = True
        step.num_global_targets = int(step.layout.num_targets[~lost].sum())
        for micro in step.micro:
            micro.ignored = np.flatnonzero(lost[micro.positions])
        return step
