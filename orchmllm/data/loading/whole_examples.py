"""The feed of a model of transformers: each rank loads the examples that its LLM takes, as the
processor makes them, and joins them to one packed row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from orchmllm.batch import (
    IGNORE_INDEX,
    UNCOUNTED,
    FailedSegment,
    Microbatch,
    PackedExamples,
    ProcessedExample,
    Step,
)
from orchmllm.data.loading.step_loader import SegmentFeed


class WholeFeed(SegmentFeed):
    """join: see orchmllm.models.hf.WholeModel. A rank for which a step has too few examples takes
    the shortest one, of which it learns nothing: the model needs a row. Other arguments: see
    SegmentFeed, whose dataset's `load` returns ProcessedExamples here."""

    def __init__(self, *args: Any, join: Callable[[Sequence[ProcessedExample]], PackedExamples],
                 **keys: Any) -> None:
        super().__init__(*args, **keys)
        self._join = join
        self._asked: deque[list[Callable]] = deque()

    def announce(self, step: Step) -> None:
        asked = []
        for micro in step.micro:
            ids = micro.rank_plan.example_ids.tolist() or [self._filler(step)]
            kept = getattr(self.dataset, "kept", None) if self._workers.num_workers else None
            asked.append(self._workers.request("load", [
                ((i,), {} if kept is None else {"row": kept(i)}) for i in ids]))
        self._asked.append(asked)

    def load(self, step: Step) -> tuple[int, int]:
        for micro, results in zip(step.micro, self._asked.popleft(), strict=True):
            micro.content = self._join([
                self._usable(k, *result, micro, step) for k, result in enumerate(results())])
        return UNCOUNTED  # the lengths tell it

    def close(self) -> None:
        self._asked.clear()
        super().close()

    def _usable(self, k: int, example: ProcessedExample, failures: list[tuple[int, str, int]],
                micro: Microbatch, step: Step) -> ProcessedExample:
        """The k-th example of this rank, without labels if it is a filler or something failed."""
        is_filler = not len(micro.rank_plan.examples)
        if not is_filler:
            position = int(micro.positions[micro.rank_plan.examples[k]])
            step.failed += [FailedSegment(position, *failure) for failure in failures]
        if is_filler or failures:
            return replace(example, labels=torch.full_like(example.labels, IGNORE_INDEX))
        return example

    @staticmethod
    def _filler(step: Step) -> int:
        return int(step.layout.example_id[step.layout.tokens_per_example.argmin()])
