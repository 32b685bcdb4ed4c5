"""What is drawn for each step of a pass: global indices, a sampler's own, or a stream's examples.

Indices come from an iterator of (indices, sizes): with sizes (d,), those of all ranks; without,
this rank's share. A stream's draw() -> (measured, ids): the (length, example) pairs of this rank
and a number for each, or None after the last step; its `num_dropped`: examples left out by this
rank (drop_last).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from orchmllm.data.sampler import GlobalSampler
from orchmllm.loader.links import Links

END = object()  # no batch: the user's may be None
Draws = Iterator[tuple[Sequence[int], list[int] | None]]


class Batches:
    """Batches of a loader, one after the other. Worker processes start with the first one."""

    def __init__(self, loader: Iterable) -> None:
        self.loader = loader
        self._iterator: Iterator | None = None

    def next(self) -> Any:
        """The next batch, END after the last one. RuntimeError where a worker process of torch's
        loader died while its batch was fetched from it, of which torch only says `connection
        reset`."""
        if self._iterator is None:
            self._iterator = iter(self.loader)
        try:
            return next(self._iterator, END)
        except (ConnectionError, EOFError) as error:
            if isinstance(self._iterator, _MultiProcessingDataLoaderIter):
                raise RuntimeError("a DataLoader worker exited unexpectedly (killed, or out of "
                                   f"memory): {error!r}") from error
            raise

    def stop(self) -> None:
        """Ends worker processes now. Dropping torch's iterator would not: an exception that came
        from a worker keeps it alive until the next garbage collection."""
        if (isinstance(self._iterator, _MultiProcessingDataLoaderIter)
                and not self.loader.persistent_workers):
            self._iterator._shutdown_workers()
        self._iterator = None


def global_indices(
    order: Mapping[str, Any], epoch: int, first_step: int, links: Links, num_left_out: int,
    whole: bool,
) -> Draws:
    """A seeded order of the whole dataset, cut into global batches: no state but the step.

    order: of the loader: global_batch_size, seed, shuffle, num_examples; the last num_left_out
    examples are in no batch. epoch: with shuffle, each has an order of its own. whole: yields the
    shares of all ranks that are planned together, else this rank's alone."""
    num_examples, batch_size = order["num_examples"], order["global_batch_size"]
    indices = (np.random.default_rng([order["seed"], epoch]).permutation(num_examples)
               if order["shuffle"] else np.arange(num_examples))[: num_examples - num_left_out]
    for first in range(first_step * batch_size, len(indices), batch_size):
        sampled = indices[first: first + batch_size]
        shares = [GlobalSampler.share(len(sampled), rank, links.num_ranks)
                  for rank in (links.shard if whole else [links.rank])]
        yield sampled[shares[0].start: shares[-1].stop], [s.stop - s.start for s in shares]


def sampled_indices(batch_sampler: Iterable, accumulation_steps: int, first_step: int) -> Draws:
    """Index lists of the user's batch_sampler on this rank, `accumulation_steps` of them a step.
    The batch_sampler is asked for an iterator at the first draw, where an error reaches all
    ranks."""
    lists = islice(batch_sampler, first_step * accumulation_steps, None)
    while drawn := list(islice(lists, accumulation_steps)):
        yield [int(i) for indices in drawn for i in indices], None


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
            for _ in range(self._first_step * self._per_step):
                self._batches.next()
        self._first_step, self._state = 0, None
        measured, drawn = [], 0
        while drawn < self._per_step and not self._ended:
            batch = self._batches.next()
            if batch is END:
                self._ended = True
            elif len(pairs := self._measure(batch)) < self._full_size:
                self.num_dropped += len(pairs)
            else:
                measured += pairs
                drawn += 1
        if not drawn:
            return None
        first_id = (self._rank << 40) + self._count  # unlike any other rank's
        self._count += len(measured)
        return measured, range(first_id, first_id + len(measured))

    def snapshot(self) -> Any:
        state = getattr(self._batches.loader, "state_dict", None)
        return state() if state is not None else None
