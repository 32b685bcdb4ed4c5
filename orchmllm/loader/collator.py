"""What the user's collate_fn returned: how many targets it holds, and what a rank without an
example makes of it."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from orchmllm.batch import IGNORE_INDEX, UNCOUNTED, Microbatch, Step
from orchmllm.loader.positions import geometry_of, tensor_in

_LOOKS, _LOOKED_AT = 3, 64  # batches, and labels of each, that may show what the loss ignores


class Collator:
    """The user's functions, and what counts as a target. tail_is_filled: whether it is known that
    some rank gets a filler at the end of the epoch."""

    def __init__(
        self, collate: Callable, rank: int, num_targets: Callable[[Any], int] | None, pins: bool,
    ) -> None:
        self.collate, self.rank, self.num_targets = collate, rank, num_targets
        self._pins = pins and torch.cuda.is_available()
        self.tail_is_filled = False  # set for each pass
        self._ignored, self._looks = IGNORE_INDEX, _LOOKS if num_targets else 0

    def finish(self, micro: Microbatch, batch: Any) -> None:
        """Puts the batch into the microbatch, with its targets and geometry. A filler's labels are
        ignored. Raises TypeError for None, ValueError if a filler, now or at the end of the epoch,
        has no labels to ignore."""
        if batch is None:
            raise TypeError("collate_fn returned None: it has to return the batch")
        counts, is_filler = self.num_targets, not len(micro.rank_plan.examples)
        if not is_filler:
            micro.geometry, micro.seen = geometry_of(micro, batch)
        labels = labels_of(batch)
        micro.labels_shape = None if labels is None else tuple(labels.shape)
        if is_filler or self.tail_is_filled:  # not at the last batch, where it is known before
            self._check_filler(batch, labels)
        if is_filler:
            batch = ignore_labels(copy.copy(batch), labels, self._ignored)
            micro.num_targets = 0, 0
        elif counts is not None:
            micro.num_targets = (_whole(counts(batch)),) * 2
            if self._looks and labels is not None and labels.numel() and labels.dtype.is_signed:
                self._looks -= 1
                self._look_for_ignored(batch, labels)
        else:
            micro.num_targets = UNCOUNTED if labels is None else count_labels(labels)
        micro.content = pin_memory(batch) if self._pins else batch

    def _look_for_ignored(self, batch: Any, labels: Tensor) -> None:
        """What a filler's labels become: -100, or the first of the batch's own of which num_targets
        counts none, because the loss ignores that."""
        copied = copy.copy(batch)
        for value in (IGNORE_INDEX, *labels.unique()[:_LOOKED_AT].tolist(), labels.max().item()):
            copied = ignore_labels(copied, labels, value)
            with suppress(Exception):  # what it cannot count is not what it ignores
                if not self.num_targets(copied):
                    self._ignored, self._looks = value, 0
                    break
        with_labels(copied, labels)  # a copy may share what holds the tensors

    def _check_filler(self, batch: Any, labels: Tensor | None) -> None:
        if labels is None and self.num_targets is None:
            raise ValueError(
                f"rank {self.rank} has no example in this step and cannot be given a filler, "
                'because the batch has no tensor "labels" to ignore: use drop_last=True, more '
                'examples, a collate_fn that returns "labels", or num_targets=')
        if labels is None:
            return
        if not labels.dtype.is_signed:
            raise ValueError(
                f'the "labels" are {labels.dtype}, which cannot hold {IGNORE_INDEX}, so those of a '
                "rank without examples could not be ignored: return torch.int64 from collate_fn")
        try:
            with_labels(copy.copy(batch), labels)
        except Exception as error:  # whatever the batch's own class raises
            raise ValueError(
                f'the "labels" of a {type(batch).__name__} cannot be replaced ({error}), so those '
                "of a rank without examples could not be ignored: return a dict from collate_fn, "
                "or use drop_last=True") from error


def _whole(count: Any) -> int:
    """What num_targets returned. ValueError for what is no count: cut to an integer it would weigh
    the loss wrongly."""
    if math.prod(shape := tuple(getattr(count, "shape", ()))) != 1:
        raise ValueError(f"num_targets returned a {type(count).__name__} of shape {shape}: return "
                         "how many of the batch's labels are targets, a whole number")
    value = count.item() if hasattr(count, "item") else count
    if not isinstance(value, int | float) or not value >= 0 or value % 1:  # nan is neither
        raise ValueError(f"num_targets returned {value!r}: return a whole number >= 0, of targets")
    return int(value)


def targets_of(step: Step) -> tuple[int, int]:
    """Of this rank's microbatches together (see Orchestrator.commit)."""
    counts = [micro.num_targets for micro in step.micro]
    return UNCOUNTED if UNCOUNTED in counts else tuple(map(sum, zip(*counts, strict=True)))


def labels_of(batch: Any) -> Tensor | None:
    """The tensor "labels" of a batch, None where there is none."""
    return tensor_in(batch, "labels")


def count_labels(labels: Tensor) -> tuple[int, int]:
    """Labels, of any shape, that are not -100: all of them, and those without the first of each
    row, which a model that shifts the labels never predicts."""
    counted = labels != IGNORE_INDEX
    return int(counted.sum()), int(counted[..., 1:].sum()) if labels.dim() else 0


def ignore_labels(batch: Any, labels: Tensor | None, ignored: float = IGNORE_INDEX) -> Any:
    """The batch with its `labels`, of any shape, all `ignored`; a new one where it cannot be
    changed."""
    if labels is None:
        return batch
    # Not in place: they may be the dataset's own.
    return with_labels(batch, torch.full_like(labels, ignored))


def with_labels(batch: Any, labels: Tensor) -> Any:
    """The batch with these labels, of any shape; a new one where it cannot be changed."""
    if hasattr(batch, "__setitem__"):
        batch["labels"] = labels
    elif dataclasses.is_dataclass(batch):
        batch = dataclasses.replace(batch, labels=labels)
    elif hasattr(batch, "_replace"):
        batch = batch._replace(labels=labels)
    else:
        batch.labels = labels
    return batch
