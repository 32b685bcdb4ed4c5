"""The trainer's front end: steps of a dataset that knows lengths before it decodes, and decodes
single segments. orchmllm.data.loading.pipeline has the mechanism, orchmllm.data.loading.feed what
is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from orchmllm.batch import Batch, Example
from orchmllm.data.loading.feed import SegmentFeed
from orchmllm.data.loading.pipeline import Pipeline, Ready
from orchmllm.data.sampler import GlobalSampler
from orchmllm.orchestrator import FailedSegment, Microbatch, Orchestrator
from orchmllm.plan.layout import TEXT, AudioGeometry, BatchLayout, ExampleLayout, VisionGeometry
from orchmllm.plan.step import StepPlan


class Dataset(Protocol):
    """What the loader needs of a dataset (see orchmllm.data.dataset.ConversationDataset)."""

    vision: VisionGeometry
    audio: AudioGeometry

    def layout(self, index: int) -> ExampleLayout: ...

    def load(self, index: int, *, text: bool = True, segments: Sequence[int] | None = None,
             on_error=None) -> Example: ...

    def describe(self, index: int, segment: int) -> dict[str, str | int]: ...

    # For dispatch `bytes` also:
    # read(index, segment, *, on_error) -> bytes of the encoded medium, b"" after on_error(segment,
    #     error) was called;
    # decode(modality, data, rows, *, segment, on_error) -> its rows, zeros after on_error.


@dataclass(frozen=True)
class Step:
    """One optimizer step of k microbatches. num_global_targets: labels of all ranks and
    microbatches (failed examples excluded). failed: media that could not be decoded, on any rank.
    plan_s: seconds spent in agreements and planning. wait_s: seconds the caller waited."""

    index: int
    layout: BatchLayout
    num_global_targets: int
    micro: list[Microbatch]
    failed: list[FailedSegment]
    plan_s: float
    wait_s: float
    orchestrator: Orchestrator

    @property
    def media(self) -> list[tuple[int, int]]:
        """(example position, segment) of every medium of the global batch, in source order."""
        layout = self.layout
        at = np.flatnonzero(layout.modality != TEXT)
        example = layout.example_of_segment[at]
        return list(zip(example.tolist(), (at - layout.segment_start[example]).tolist(),
                        strict=True))

    @property
    def example_ids(self) -> np.ndarray:
        """(n,) dataset indices of the global batch."""
        return self.layout.example_id

    @property
    def example_ids_of_rank(self) -> list[int]:
        """Dataset indices of what this rank's LLM processes."""
        return [i for m in self.micro for i in m.rank_plan.example_ids.tolist()]

    @property
    def plans(self) -> list[StepPlan]:
        return [m.plan for m in self.micro]

    def batches(self) -> Iterator[Batch]:
        """Dispatches one microbatch at a time; every rank has to draw all of them."""
        for micro in self.micro:
            yield self.orchestrator.dispatch(micro, self.num_global_targets)


class StepLoader:
    """The trainer's front end: yields `Step`s from first_step to num_steps (exclusive), or until
    the sampler's pass ends.

    dataset: map-style, with `layout` (no decoding) and `load`. sampler: global batches.
    num_workers: processes that read and decode; 0: the prefetch thread does. Other arguments and
    errors: see Pipeline.
    """

    def __init__(
        self, dataset: Dataset, sampler: GlobalSampler, orchestrator: Orchestrator, *,
        num_steps: int, first_step: int = 0, accumulation_steps: int = 1, prefetch: int = 2,
        num_workers: int = 0,
    ) -> None:
        feed = SegmentFeed(dataset, sampler, orchestrator, num_steps, num_workers)
        self._pipeline = Pipeline(feed, orchestrator, first_step=first_step, prefetch=prefetch,
                                  accumulation_steps=accumulation_steps)
        self.num_steps, self.first_step = num_steps, first_step
        self.orchestrator = orchestrator

    def __len__(self) -> int:
        return self.num_steps - self.first_step

    @property
    def ahead(self) -> int:
        """See Pipeline."""
        return self._pipeline.ahead

    def __iter__(self) -> Iterator[Step]:
        steps = iter(self._pipeline)
        try:
            for ready in steps:
                yield step_of(ready, self.orchestrator)
        finally:
            steps.close()


def step_of(ready: Ready, orchestrator: Orchestrator) -> Step:
    """The step as the trainer takes it, for content of a SegmentFeed."""
    planned, layout = ready.planned, ready.planned.layout
    lost = {f.example for f in ready.failed}
    micro = [
        Microbatch(plan, mine, inputs, text,
                  frozenset(np.flatnonzero(np.isin(positions, list(lost))).tolist()))
        for (positions, plan), mine, (inputs, text) in zip(
            planned.plans, planned.rank_plans, ready.micro, strict=True)
    ]
    targets = int(layout.num_targets.sum()) - sum(int(layout.num_targets[e]) for e in lost)
    return Step(index=planned.index, layout=layout, num_global_targets=targets, micro=micro,
                failed=ready.failed, plan_s=ready.plan_s, wait_s=ready.wait_s,
                orchestrator=orchestrator)
