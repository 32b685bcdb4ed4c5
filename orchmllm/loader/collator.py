"""What the user's collate_fn returned: whether it is padded, how many targets it holds, and what a
rank without an example makes of it."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data._utils.pin_memory import pin_memory

from orchmllm.batch import IGNORE_INDEX, UNCOUNTED, Microbatch, Step

log = logging.getLogger("orchmllm.loader")
_PADDING = {f"DataCollator{name}" for name in (  # of transformers and TRL
    "WithPadding", "ForTokenClassification", "ForSeq2Seq", "ForLanguageModeling", "ForPreference",
    "ForMultipleChoice", "ForVisionPreference", "ForVisionLanguageModeling")}


class Collator:
    """The user's functions, and what counts as a target. tail_is_filled: whether it is known that
    some rank gets a filler at the end of the epoch. without_padding: see PaddingWatch."""

    def __init__(
        self, collate: Callable, rank: int, num_targets: Callable[[Any], int] | None, pins: bool,
        tail_is_filled: bool, without_padding: int,
    ) -> None:
        self.collate, self.rank, self.num_targets = collate, rank, num_targets
        self._pins = pins and torch.cuda.is_available()
        self._tail_is_filled, self._padding = tail_is_filled, PaddingWatch(without_padding)

    def finish(self, micro: Microbatch, batch: Any) -> None:
        """Puts the batch into the microbatch, with its targets. A filler's labels are ignored.
        Raises TypeError for None, ValueError if a filler, now or at the end of the epoch, has no
        labels to ignore, or as PaddingWatch does."""
        if batch is None:
            raise TypeError("collate_fn returned None: it has to return the batch")
        self._padding.see(micro, batch)
        counts, is_filler = self.num_targets, not len(micro.rank_plan.examples)
        labels = labels_of(batch) if counts is None or is_filler else None
        # It fails at the first batch of an epoch that ends with fillers, not at the last.
        if (is_filler or self._tail_is_filled) and counts is None and labels is None:
            raise ValueError(
                f"rank {self.rank} has no example in this step and cannot be given a filler, "
                'because the batch has no tensor "labels" to ignore: use drop_last=True, more '
                'examples, a collate_fn that returns "labels", or num_targets=')
        if is_filler:
            batch, micro.num_targets = ignore_labels(copy.copy(batch), labels), (0, 0)
        elif counts is not None:
            micro.num_targets = (_whole(counts(batch)),) * 2
        else:
            micro.num_targets = UNCOUNTED if labels is None else count_labels(labels)
        micro.content = pin_memory(batch) if self._pins else batch


def _whole(count: Any) -> int:
    """What num_targets returned. ValueError for what is no count: cut to an integer it would weigh
    the loss wrongly."""
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
    try:
        labels = batch["labels"]
    except (TypeError, KeyError, IndexError):
        labels = getattr(batch, "labels", None)
    return labels if isinstance(labels, torch.Tensor) else None


def count_labels(labels: Tensor) -> tuple[int, int]:
    """Labels (...) that are not -100: all of them, and without the first of each row, which a model
    that shifts the labels never predicts."""
    counted = labels != IGNORE_INDEX
    return int(counted.sum()), int(counted[..., 1:].sum()) if labels.dim() else 0


def ignore_labels(batch: Any, labels: Tensor | None) -> Any:
    """The batch with its `labels` all ignored; a new one where it cannot be changed."""
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


class PaddingWatch:
    """Whether collate pads: then a batch costs its number of examples times the longest, and a plan
    that evens out the sums of lengths can make steps longer. Compares the sizes of batches with the
    lengths that were planned, until one shows padding.

    Padding in the `first` batches, those of the first step, is an error, which all ranks raise
    before anything was trained; later it is a warning, as on ranks whose first batches held one
    example or equal lengths. first: 0 if nothing is compared, because the user chose a policy."""

    def __init__(self, first: int) -> None:
        self._first, self._done = first, not first

    def see(self, micro: Microbatch, batch: Any) -> None:
        """Raises ValueError."""
        self._first -= 1
        plan = micro.plan
        if self._done or not plan.spec.balance.enabled or plan.layout.num_ranks == 1:
            return
        lengths = plan.layout.tokens_per_example[micro.rank_plan.examples]
        values = batch.values() if isinstance(batch, Mapping) else (
            batch if isinstance(batch, list | tuple) else [batch])
        padded = [v.shape for v in values if isinstance(v, Tensor) and _is_padded(v.shape, lengths)]
        if not padded:
            return
        self._done = True
        text = (f"collate_fn pads: examples of lengths {lengths.tolist()[:8]} became a tensor of "
                f"shape {tuple(padded[0])}, which costs their number times the longest, and the "
                "default policy evens out sums of lengths, so that steps can take longer than "
                "without it: give policy='padded', or policy='least_move' if the model computes "
                "no padding")
        if self._first >= 0:
            raise ValueError(text)
        log.warning(text)


def _is_padded(shape: tuple[int, ...], lengths: np.ndarray) -> bool:
    """Whether a tensor (n, T, ...) holds n examples at the length of the longest: some more for
    special tokens and multiples of 8, not any size, as lengths may have another unit."""
    longest = int(lengths.max(initial=0))
    return (len(shape) > 1 and shape[0] == len(lengths) and longest <= shape[1] <= (
        1.25 * longest + 8) and shape[0] * shape[1] > 1.1 * lengths.sum())


def collator_pads(collator: Any) -> bool:
    """Whether it is known to pad a batch to its longest example."""
    return (any(c.__name__ in _PADDING for c in type(collator).__mro__)
            and not getattr(collator, "padding_free", False)
            and getattr(collator, "padding", True) in (True, "longest"))
