"""The feed of examples whose lengths are known once they are loaded: each rank loads what it
sampled, and what another rank processes moves there.

A source's draw() -> (measured, ids): the (length, example) pairs of this rank and a number for
each, or None after the last step; its `num_dropped`: examples left out by this rank (drop_last).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch.distributed as dist

from orchmllm.batch import UNCOUNTED, Microbatch, Step
from orchmllm.comm import value_bytes as wire
from orchmllm.comm.exchange_bytes import Postponed, exchange_bytes
from orchmllm.loader.collator import Collator, targets_of
from orchmllm.loader.indices import END, Batches, Draws, batch_layout
from orchmllm.plan.layout import BatchLayout


class SharedIndices:
    """torch's batch_sampler for examples that are loaded where they are sampled."""

    def __init__(self) -> None:
        self.source: Draws = iter(())
        self.drawn: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn.clear()
        for indices, _ in self.source:
            self.drawn.append([int(i) for i in indices])
            yield self.drawn[-1]


class IndexedStream:
    """Examples of this rank's indices, loaded before anything is planned.

    loader: torch's, over `indices`, which are those `drawn` in this pass; it yields lists of
    (length, example)."""

    def __init__(
        self, loader: Iterable, indices: SharedIndices, drawn: Draws, num_dropped: int
    ) -> None:
        self._indices, self._batches = indices, Batches(loader)
        indices.source, self.num_dropped = drawn, num_dropped
        self.stop = self._batches.stop

    def draw(self) -> tuple[list, list[int]] | None:
        """What is drawn next, None at the end. Raises RuntimeError if the data set raised
        StopIteration."""
        measured = self._batches.next()
        if measured is END:
            if self._indices.drawn:
                raise RuntimeError("the dataset raised StopIteration")
            return None
        return measured, self._indices.drawn.popleft()

    def snapshot(self) -> None:
        return None


class ForeignStream:
    """Batches of a loader that is not ours, on this rank; `accumulation_steps` of them a step.

    measure: what a batch of the loader becomes, a list of (lengths, example). full_size: shorter
    batches are left out and counted (0: none is). first_step: to begin with; state: that the loader
    loads for it, None where it cannot and batches are drawn and thrown away."""

    def __init__(
        self, loader: Iterable, measure: Callable[[Any], list], accumulation_steps: int, *,
        full_size: int, rank: int, first_step: int, state: Any,
    ) -> None:
        self._batches, self._measure, self._per_step = Batches(loader), measure, accumulation_steps
        self._full_size, self._rank = full_size, rank
        self._first_step, self._state = first_step, state
        self._count, self.num_dropped, self._ended = 0, 0, False
        self.stop = self._batches.stop

    def draw(self) -> tuple[list, range] | None:
        if self._state is not None:
            self._batches.loader.load_state_dict(self._state)
        else:
            for _ in self._full_batches(self._first_step * self._per_step):
                pass
        self._first_step, self._state = 0, None
        batches = list(self._full_batches(self._per_step))
        if not batches:
            return None
        measured = list(chain.from_iterable(batches))
        first_id = (self._rank << 40) + self._count  # unlike any other rank's
        self._count += len(measured)
        return measured, range(first_id, first_id + len(measured))

    def _full_batches(self, count: int) -> Iterator[list]:
        """The next `count` batches that are not left out, measured; fewer at the end."""
        while count and not self._ended:
            batch = self._batches.next()
            if batch is END:
                self._ended = True
            elif len(pairs := self._measure(batch)) < self._full_size:
                self.num_dropped += len(pairs)
            else:
                count -= 1
                yield pairs

    def snapshot(self) -> Any:
        state = getattr(self._batches.loader, "state_dict", None)
        return state() if state is not None else None


def measured(length_fn: Callable[[Any], Any], examples: list[Any]) -> list[tuple[Any, Any]]:
    """Examples with their lengths: collate_fn of worker processes. Raises TypeError where a batch
    is no list of examples."""
    if not isinstance(examples, list):  # a tuple may be one example, of ids and labels
        raise TypeError(f"the wrapped loader yielded a {type(examples).__name__}: wrap one that "
                        "yields lists of examples, or a torch DataLoader; a dataset that yields "
                        "single examples needs a batch_size")
    return [(length_fn(e), e) for e in examples]


class ExampleFeed:
    """Each rank loads what it sampled; what another rank processes is sent there, encoded by
    `wire`, on a CPU group. source: draws lists of (lengths, example)."""

    knows_all, lookahead = False, 0  # so a step is loaded before the next is drawn

    def __init__(self, source, collator: Collator, rank: int, group: dist.ProcessGroup,
                 config_digest: int, max_tokens: int) -> None:
        self.source, self.collator, self.config_digest = source, collator, config_digest
        self.max_tokens = max_tokens
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
        layout = batch_layout(numbers, [lengths for lengths, _ in measured], None, self.max_tokens)
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
