"""The lengths of a user's examples, and the facts that the loader tells of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX, Step
from orchmllm.plan.layout import TEXT, BatchLayout
from orchmllm.plan.step import StepPlan, imbalance


@dataclass(frozen=True)
class StepInfo:
    """What balancing knows of a batch: `BalancedDataLoader.step`. The batch itself is untouched.

    num_examples: in this batch; 0 for a filler, whose loss must not count. example_ids: their
    dataset indices (of a stream: numbers within it). step, epoch: of the loader. microbatch: place
    of this batch in its step, from 0; num_microbatches: batches of a step. imbalance: (slowest
    rank's cost / mean as sampled, as planned). wait_s: seconds the loop waited for this step.
    num_ranks: ranks that share the step. num_targets: labels of the step on all ranks and
    microbatches, None if unknown; num_shifted_targets: those that a model predicts which shifts the
    labels itself (all but the first of each row). local_targets: both counts for this batch alone,
    -1 if unknown.
    """

    num_examples: int
    example_ids: list[int]
    step: int
    epoch: int
    microbatch: int
    num_microbatches: int
    imbalance: tuple[float, float]
    wait_s: float
    num_ranks: int
    num_targets: int | None
    num_shifted_targets: int | None
    local_targets: tuple[int, int]
    _on_read: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    @classmethod
    def of(
        cls, step: Step, k: int, epoch: int, num_ranks: int, on_read: Callable[[], None]
    ) -> StepInfo:
        """Of the k-th microbatch of a step. on_read: called when somebody asks for the targets."""
        micro, mine = step.micro[k], step.micro[k].rank_plan
        return cls(
            num_examples=len(mine.examples), example_ids=mine.example_ids.tolist(),
            step=step.index, epoch=epoch, microbatch=k, num_microbatches=len(step.micro),
            imbalance=imbalance_of(micro.plan), wait_s=step.wait_s if k == 0 else 0.0,
            num_ranks=num_ranks, num_targets=step.num_global_targets,
            num_shifted_targets=step.num_shifted_targets, local_targets=micro.num_targets,
            _on_read=on_read)

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.microbatch == self.num_microbatches - 1

    @property
    def num_global_targets(self) -> int:
        """Labels of the step on all ranks and microbatches: the loss's denominator. Raises
        ValueError if they are not known."""
        return self.denominator(shifted=False)

    def denominator(self, *, shifted: bool) -> int:
        """num_targets or num_shifted_targets. Raises ValueError if they are not known."""
        self._on_read()
        count = self.num_shifted_targets if shifted else self.num_targets
        if count is None:
            raise ValueError(
                "num_global_targets: the number of targets is not known, because the batch has no "
                'tensor "labels"; give BalancedDataLoader a num_targets function (collated batch '
                "-> int)")
        return count


def imbalance_of(plan: StepPlan) -> tuple[float, float]:
    """(slowest rank's cost / mean as sampled, as planned)."""
    before, after = plan.phase_cost("llm")
    return imbalance(before), imbalance(after)


def count_labels(batch: Any) -> tuple[int, int] | None:
    """Labels of a collated batch that are not -100: all of them, and without the first of each row,
    which a model that shifts the labels never predicts. None where there is no tensor "labels"."""
    labels = labels_of(batch)
    if labels is None:
        return None
    counted = labels != IGNORE_INDEX
    return int(counted.sum()), int(counted[..., 1:].sum()) if labels.dim() else 0


def ignore_labels(batch: Any) -> Any:
    """The batch with labels that are all ignored; a new one where it cannot be changed."""
    labels = labels_of(batch)
    if labels is None:
        return batch
    ignored = torch.full_like(labels, IGNORE_INDEX)  # not in place: it may be the dataset's own
    if hasattr(batch, "__setitem__"):
        batch["labels"] = ignored
    elif dataclasses.is_dataclass(batch):
        batch = dataclasses.replace(batch, labels=ignored)
    elif hasattr(batch, "_replace"):
        batch = batch._replace(labels=ignored)
    else:
        batch.labels = ignored
    return batch


def labels_of(batch: Any) -> Tensor | None:
    """The tensor "labels" of a batch, None where there is none."""
    try:
        labels = batch["labels"]
    except (TypeError, KeyError, IndexError):
        labels = getattr(batch, "labels", None)
    return labels if isinstance(labels, torch.Tensor) else None


def batch_layout(
    example_ids: Sequence[int], lengths: Sequence[Any], examples_per_rank: Sequence[int] | None
) -> BatchLayout:
    """The layout of examples of these lengths, each a whole number; without examples_per_rank they
    all sit on one rank. Raises TypeError or ValueError naming the example for anything else."""
    n = len(lengths)
    table = np.zeros((n, 7), np.int64)
    table[:, 0] = TEXT
    for k, given in enumerate(lengths):
        try:
            length = index(given)
        except TypeError as error:
            raise TypeError(
                f"example {example_ids[k]}: its length is {given!r}; give a whole number (media "
                "are balanced by orchmllm.balance_encoders)") from error
        if length < 0:
            raise ValueError(f"example {example_ids[k]} has length {length}: must be >= 0")
        table[k, 3] = length
    return BatchLayout.from_table(np.asarray(example_ids, np.int64), np.zeros(n, np.int64),
                                  np.ones(n, np.int64), table, examples_per_rank)
