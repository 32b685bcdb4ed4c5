"""Feeds of the drop-in loader: where a user's examples come from and how a plan reaches them.

- `IndexFeed`: lengths are known by index, so a plan is a list of indices that torch's DataLoader
  loads and collates like any other batch, in worker processes if there are any.
- `ExampleFeed`: examples are loaded first, then move between ranks.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data._utils.pin_memory import pin_memory

from orchmllm.batch import UNCOUNTED, Microbatch, Step
from orchmllm.comm.exchange_bytes import Postponed, exchange_bytes
from orchmllm.loader import example_bytes as wire
from orchmllm.loader.draws import END, Batches, Draws
from orchmllm.loader.examples import (
    batch_layout,
    count_labels,
    ignore_labels,
    labels_of,
)
from orchmllm.loader.padding import PaddingWatch
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import StepPlan


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
        counts = self.num_targets
        is_filler = not len(micro.rank_plan.examples)
        # It fails at the first batch of an epoch that ends with fillers, not at the last.
        if (is_filler or self._tail_is_filled) and counts is None and labels_of(batch) is None:
            raise ValueError(
                f"rank {self.rank} has no example in this step and cannot be given a filler, "
                'because the batch has no tensor "labels" to ignore: use drop_last=True, more '
                'examples, a collate_fn that returns "labels", or num_targets=')
        if is_filler:
            batch, micro.num_targets = ignore_labels(copy.copy(batch)), (0, 0)
        elif counts is not None:
            micro.num_targets = (_whole(counts(batch)),) * 2
        else:
            micro.num_targets = count_labels(batch) or UNCOUNTED
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


class PlannedIndices:
    """torch's batch_sampler: one list of indices per microbatch, as the plans come."""

    def __init__(self) -> None:
        self.lists: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        while self.lists:  # until the last step: lookahead covers what torch asks for
            yield self.lists.popleft()


@dataclass
class IndexFeed:
    """Each rank loads the examples that it processes.

    source: of index lists. lengths: index -> length. batches: of torch's loader, with `indices` as
    its batch_sampler. lookahead: see Feed; enough for what its workers prefetch.
    """

    source: Draws
    lengths: Callable[[int], Any]
    batches: Batches
    indices: PlannedIndices
    collator: Collator
    config_digest: int
    lookahead: int
    knows_all: bool
    num_dropped: int

    def draw(self, index: int) -> BatchLayout | None:
        drawn = next(self.source, None)
        if drawn is None:
            return None
        sampled, sizes = drawn
        return batch_layout(sampled, [self.lengths(int(i)) for i in sampled], sizes)

    def announce(self, step: Step) -> None:
        for micro in step.micro:
            self.indices.lists.append(micro.rank_plan.example_ids.tolist()
                                      or [filler_of(micro.plan, step.layout)])

    def load(self, step: Step) -> tuple[int, int]:
        for micro in step.micro:
            batch = self.batches.next()
            if batch is END:
                raise RuntimeError("the dataset raised StopIteration")
            self.collator.finish(micro, batch)
        return targets_of(step)

    def close(self) -> None:
        self.batches.stop()
        self.indices.lists.clear()


def filler_of(plan: StepPlan, layout: BatchLayout) -> int:
    """The shortest example of the microbatch (of the step, if that is empty)."""
    layout = plan.layout if plan.layout.num_examples else layout
    return int(layout.example_id[layout.tokens_per_example.argmin()])


def measured(length_fn: Callable[[Any], Any], examples: list[Any]) -> list[tuple[Any, Any]]:
    """Examples with their lengths: collate_fn of worker processes. Raises TypeError where a batch
    is no list of examples."""
    if not isinstance(examples, list | tuple):
        raise TypeError(f"the wrapped loader yielded a {type(examples).__name__}: wrap one that "
                        "yields lists of examples, or a torch DataLoader")
    return [(length_fn(e), e) for e in examples]


class ExampleFeed:
    """Each rank loads what it sampled; what another rank processes is sent there, encoded by
    `wire`, on a CPU group. source: draws lists of (lengths, example)."""

    knows_all, lookahead = False, 0  # so a step is loaded before the next is drawn

    def __init__(self, source, collator: Collator, rank: int, group: dist.ProcessGroup,
                 config_digest: int) -> None:
        self.source, self.collator, self.config_digest = source, collator, config_digest
        self.rank, self.group = rank, group
        self._examples: list[Any] = []  # of the step last drawn
        self._state: Any = None  # of the source after it
        self._spare: Any = None

    @property
    def num_dropped(self) -> int:
        return self.source.num_dropped

    def draw(self, index: int) -> BatchLayout | None:
        drawn = self.source.draw()
        if drawn is None:
            return None
        measured, numbers = drawn
        layout = batch_layout(numbers, [lengths for lengths, _ in measured], None)
        self._examples = [example for _, example in measured]
        if self._examples:
            self._spare = self._examples[0]
        self._state = self.source.snapshot()
        return layout

    def announce(self, step: Step) -> None:
        step.state = self._state

    def load(self, step: Step) -> tuple[int, int]:
        postponed = Postponed()
        moved = [self._moved(step, micro, postponed) for micro in step.micro]
        if not postponed.everything_came():
            return UNCOUNTED
        for micro, examples in zip(step.micro, moved, strict=True):
            batch = self.collator.collate(examples or [self._filler()])
            self.collator.finish(micro, batch)
        return targets_of(step)

    def close(self) -> None:
        self.source.stop()

    def _moved(self, step: Step, micro: Microbatch, postponed: Postponed) -> list[Any]:
        """The examples that this rank processes."""
        first = int(step.layout.examples_per_rank[: self.rank].sum())
        own = micro.positions[micro.plan.layout.rank_of_example == self.rank] - first
        examples = [self._examples[i] for i in own]
        came = exchange_bytes([lambda x=x: postponed.call(wire.encode, x) for x in examples],
                              micro.plan.llm, self.rank, self.group)
        postponed.incomplete |= any(c is None for c in came)
        return [examples[c] if isinstance(c, int) else c if c is None
                else postponed.call(wire.decode, c) for c in came]

    def _filler(self) -> Any:
        if self._spare is None:
            rank = self.collator.rank  # in the loader's group, of which a shard may be a part
            raise ValueError(f"rank {rank} never had an example and gets none in this step: give "
                             "its stream data, or use larger batches")
        return self._spare
