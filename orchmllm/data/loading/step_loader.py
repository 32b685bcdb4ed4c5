"""The trainer's front end: steps of a dataset that knows lengths before it decodes, and decodes
single segments. orchmllm.data.loading.pipeline has the mechanism, orchmllm.data.loading.feed what
is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from orchmllm.batch import Example, Step
from orchmllm.data.loading.feed import SegmentFeed
from orchmllm.data.loading.pipeline import Pipeline
from orchmllm.data.loading.preprocess_handshake import Servers
from orchmllm.data.sampler import GlobalSampler
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import phase_figures

__all__ = ["Dataset", "Step", "StepLoader"]


class Dataset(Protocol):
    """What the loader needs of a dataset (see orchmllm.data.dataset.ConversationDataset)."""

    vision: VisionGeometry
    audio: AudioGeometry

    def layout(self, index: int) -> BatchLayout: ...

    def load(self, index: int, *, text: bool = True, segments: Sequence[int] | None = None,
             on_error=None) -> Example: ...

    def describe(self, index: int, segment: int) -> dict[str, str | int]: ...

    # For dispatch `bytes` also:
    # load(..., encoded=segments): of these the bytes as stored, (n,) uint8; none of them after
    #     on_error(segment, error) was called;
    # decode(modality, data, rows, *, segment, on_error) -> the rows of such bytes, zeros after
    #     on_error.
    # kept(index) -> what planning read, or None; it is passed to load(..., row=) in a worker.
    # And to read several examples at once: layouts(indices, examples_per_rank), joined, and
    # prepare_loads(calls of load) before those are made.


class StepLoader(Pipeline):
    """The trainer's front end: yields `Step`s from first_step to num_steps (exclusive), or until
    the sampler's pass ends.

    dataset: map-style, with `layout` (no decoding) and `load`. sampler: global batches.
    num_workers: processes that read and decode; 0: the prefetch thread does. servers: do it
    instead, as long as one of them answers. Other arguments and errors: see Pipeline.
    """

    def __init__(
        self, dataset: Dataset, sampler: GlobalSampler, orchestrator: Orchestrator, *,
        num_steps: int, first_step: int = 0, accumulation_steps: int = 1, prefetch: int = 2,
        num_workers: int = 0, servers: Servers | None = None,
    ) -> None:
        feed = SegmentFeed(dataset, sampler, orchestrator, num_steps, num_workers, servers)
        super().__init__(feed, orchestrator, first_step=first_step, prefetch=prefetch,
                         accumulation_steps=accumulation_steps)
        self.num_steps = num_steps

    def __len__(self) -> int:
        return self.num_steps - self.first_step

    def _load(self, step: Step) -> Step:
        """With the figures of its plans, and labels as the lengths tell them, without those of
        examples that failed."""
        super()._load(step)
        step.phases = phase_figures(step.plans)
        lost = np.zeros(step.layout.num_examples, bool)
        lost[[f.example for f in step.failed]] = True
        step.num_global_targets = int(step.layout.num_targets[~lost].sum())
        for micro in step.micro:
            micro.ignored = np.flatnonzero(lost[micro.positions])
        return step
