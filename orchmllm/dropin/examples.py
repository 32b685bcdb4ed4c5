"""What a user's loop sees: how examples are described to the loader, and the batch it gets back.

A batch is what the user's collate_fn returned, with what balancing knows of it as attributes:
see `StepInfo`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import (
    MODALITIES,
    TEXT,
    BatchLayout,
    ExampleLayout,
    SegmentLengths,
)
from orchmllm.plan.step import RankPlan


class Segment(NamedTuple):
    """One piece of an example, in reading order.

    modality: text, vision or audio. num_tokens: LLM positions it becomes. rows: rows that travel to
    its encoder (patches, frames; 0 for text). attn_len: positions that the encoder's attention sees
    (default: rows). grid: (t, h, w) of an image.
    """

    modality: str
    num_tokens: int
    rows: int = 0
    attn_len: int | None = None
    grid: tuple[int, int, int] = (0, 0, 0)


@dataclass(frozen=True)
class Phase:
    """How one encoder's inputs are found in a user's example.

    cost: of one medium, by its attn_len. media: key of the example (a dict) that holds the list of
    its media of this modality, in reading order. collate: list of the media that this rank encodes
    (possibly empty) -> the encoder's input, `batch.inputs[phase]`.
    """

    cost: CostModel
    media: str
    collate: Callable[[list[Any]], Any]


@dataclass(frozen=True)
class StepInfo:
    """What balancing knows of a batch: `BalancedDataLoader.step`, and attributes of the batch.

    plan: this rank's part of the plan; plan.feature[phase] is for exchange_rows,
    plan.scatter[phase] where feature rows go in the packed sequence. inputs: encoder phase -> what
    its Phase.collate made of the media this rank encodes. num_examples: in this batch; 0 for a
    filler, whose labels are all ignored. example_ids: their dataset indices (of a stream: numbers
    within it). step, epoch: of the loader. microbatch: place of this batch in its step, from 0;
    num_microbatches: batches of a step. imbalance: phase -> (slowest rank's cost / mean as
    sampled, as planned). wait_s: seconds the loop waited for this step. num_ranks: ranks that
    share the step. num_targets: labels of the step on all ranks and microbatches, None if unknown.
    """

    plan: RankPlan
    inputs: Mapping[str, Any]
    num_examples: int
    example_ids: list[int]
    step: int
    epoch: int
    microbatch: int
    num_microbatches: int
    imbalance: Mapping[str, tuple[float, float]]
    wait_s: float
    num_ranks: int
    num_targets: int | None

    @property
    def is_last_microbatch(self) -> bool:
        """Whether the optimizer steps after this batch."""
        return self.microbatch == self.num_microbatches - 1

    @property
    def num_global_targets(self) -> int:
        """Labels of the step on all ranks and microbatches: the loss's denominator. Raises
        ValueError if they are not known."""
        if self.num_targets is None:
            raise ValueError(
                "the number of targets is not known: the batch has no \"labels\"; give "
                "BalancedDataLoader a num_targets function (collated batch -> int)")
        return self.num_targets


_NAMES = (*(f.name for f in fields(StepInfo)), "is_last_microbatch", "num_global_targets")


class _Informed:
    """Reads StepInfo's attributes from `balance_info`."""

    balance_info: StepInfo

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES and "balance_info" in self.__dict__:
            return getattr(self.balance_info, name)
        return super().__getattr__(name) if hasattr(super(), "__getattr__") else _missing(
            self, name)


def _missing(owner: object, name: str) -> Any:
    why = (": it was moved or rebuilt after the loader yielded it; use loader.step, and "
           "loader.scale_sum(loss_sum) for the loss" if name in _NAMES else "")
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{why}")


_informed_types: dict[type, type] = {}


def attach(batch: Any, info: StepInfo) -> Any:
    """`batch` as an object of a subclass of its class that has StepInfo's attributes; a dict stays
    a dict and a tuple a tuple. A tensor is changed in place, and an object whose class cannot be
    exchanged (transformers' BatchEncoding, an OrderedDict, slots, frozen) is returned as it is:
    loader.step has the facts. Raises TypeError for numbers, strings and None."""
    kind = type(batch)
    if isinstance(batch, Tensor):
        for name in _NAMES[:-1]:
            setattr(batch, name, getattr(info, name))
        batch.num_global_targets = info.num_targets
        return batch
    if batch is None or kind in (bool, int, float, str, bytes):
        raise TypeError(f"collate_fn returned a {kind.__name__}: return a dict, a tuple, a list, a "
                        "tensor or an object, which can carry num_global_targets and the plan")
    try:
        if kind not in _informed_types:
            _informed_types[kind] = type(kind.__name__, (_Informed, kind),
                                         {"__module__": __name__})
        informed = _informed_types[kind]
        if kind is dict or kind is list:
            batch = informed(batch)
        elif isinstance(batch, tuple):
            batch = informed(*batch) if hasattr(batch, "_fields") else informed(batch)
        else:
            batch.__class__ = informed
    except (TypeError, AttributeError):
        return batch
    batch.__dict__["balance_info"] = info
    return batch


def count_labels(batch: Any) -> int | None:
    """Labels of a collated batch that are not -100; None where there is no tensor \"labels\"."""
    labels = _labels(batch)
    return None if labels is None else int((labels != IGNORE_INDEX).sum())


def ignore_labels(batch: Any, rank: int) -> None:
    """Ignores all labels of a filler batch. Raises ValueError if it has none to ignore."""
    labels = _labels(batch)
    if labels is None:
        raise ValueError(
            f"rank {rank} has no example in this step and cannot be given a filler, because the "
            'batch has no tensor "labels" to ignore: use drop_last=True, more examples, or a '
            "collate_fn that returns \"labels\"")
    ignored = torch.full_like(labels, IGNORE_INDEX)  # not in place: it may be the dataset's own
    if hasattr(batch, "__setitem__"):
        batch["labels"] = ignored
    else:
        batch.labels = ignored


def _labels(batch: Any) -> Tensor | None:
    try:
        labels = batch["labels"]
    except (TypeError, KeyError, IndexError):
        labels = getattr(batch, "labels", None)
    return labels if isinstance(labels, torch.Tensor) else None


def batch_layout(
    example_ids: Sequence[int], lengths: Sequence[Any], examples_per_rank: Sequence[int] | None
) -> BatchLayout:
    """Layouts of examples, joined; see layout_of and BatchLayout.from_examples."""
    if not all(type(n) is int and n >= 0 for n in lengths):
        return BatchLayout.from_examples(
            [layout_of(int(i), n) for i, n in zip(example_ids, lengths, strict=True)],
            examples_per_rank)
    n = len(lengths)  # a sequence model's tokens: the same without an object for each
    zeros = np.zeros(n, np.int64)
    return BatchLayout(
        example_id=np.asarray(example_ids, np.int64),
        examples_per_rank=np.array([n] if examples_per_rank is None else examples_per_rank,
                                   np.int64),
        num_targets=zeros, segments_per_example=np.ones(n, np.int64),
        modality=np.full(n, TEXT), rows=zeros, attn_len=zeros,
        num_tokens=np.array(lengths, np.int64), grid=np.zeros((n, 3), np.int64))


def layout_of(example_id: int, lengths: Any) -> ExampleLayout:
    """lengths: one integer (a sequence model's tokens), or Segments in reading order."""
    if hasattr(lengths, "__index__"):
        tokens = lengths.__index__()
        if tokens < 0:
            raise ValueError(f"example {example_id} has length {tokens}: must be >= 0")
        return ExampleLayout.from_segments(
            example_id, 0, [(TEXT, SegmentLengths(0, 0, tokens, (0, 0, 0)))])
    if not isinstance(lengths, Sequence) or not all(isinstance(s, Segment) for s in lengths):
        raise TypeError(f"example {example_id}: its length is {lengths!r}; give an integer, or a "
                        "list of orchmllm.Segment")
    table = []
    for s in lengths:
        if s.modality not in MODALITIES:
            raise ValueError(f"example {example_id}: modality {s.modality!r} is none of "
                             f"{', '.join(MODALITIES)}")
        attn_len = s.rows if s.attn_len is None else s.attn_len
        table.append((MODALITIES[s.modality],
                      SegmentLengths(s.rows, attn_len, s.num_tokens, tuple(s.grid))))
    return ExampleLayout.from_segments(example_id, 0, table)
