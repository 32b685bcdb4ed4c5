"""The trainer's front end: steps with the figures of their plans. The mechanism is in
orchmllm.data.loading.pipeline; what each rank reads, in orchmllm.data.loading.whole_examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from orchmllm.batch import Step
from orchmllm.data.loading.pipeline import Pipeline
from orchmllm.data.sampler import GlobalSampler
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.layout import MADE, BatchLayout
from orchmllm.plan.step import phase_figures


class StepLoader(Pipeline):
    """The trainer's front end: yields `Step`s from first_step to num_steps (exclusive), or until
    the sampler's pass ends.

    sampler: global batches. num_workers: processes that read and decode; 0: the prefetch thread
    does. flops_of: useful FLOP of each phase of a layout, where a step's are to be counted. feed:
    makes an orchmllm.data.loading.whole_examples.WholeFeed, which says what dataset and pool are,
    of the first arguments. Other arguments and errors: see Pipeline.
    """

    def __init__(
        self, dataset: Any, sampler: GlobalSampler, orchestrator: Orchestrator, *,
        num_steps: int, first_step: int = 0, accumulation_steps: int = 1, prefetch: int = 2,
        num_workers: int = 0, pool: Any = None,
        flops_of: Callable[[BatchLayout], dict[str, float]] | None = None,
        feed: Callable[..., Any],
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
        made = step.layout.segments[MADE]
        stays = ~lost[step.layout.example_of_segment[made]]
        step.num_made_rows = int(step.layout.rows[made][stays].sum())
        for micro in step.micro:
            micro.ignored = np.flatnonzero(lost[micro.positions])
        return step
