"""What is drawn for each step of a pass: global indices, a sampler's own, or a stream's examples.

An index source's draw() -> (indices, sizes): with sizes (d,), the whole global batch, which every
rank knows; without, this rank's share. A stream's draw() -> (measured, ids): the (lengths, example)
pairs of this rank and a number for each. Both return None after the last step. `num_dropped`:
examples left out by this rank (drop_last).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from orchmllm.data.sampler import GlobalSampler

END = object()  # no batch: the user's may be None


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


class GlobalIndices:
    """A seeded order of the whole dataset, cut into global batches: no state but the step.

    num_examples: of the dataset. batch_size: examples per step on all ranks. epoch: with shuffle,
    each has an order of its own. shard: the ranks that are planned together; draw() gives
    theirs."""

    knows_all = True

    def __init__(
        self, num_examples: int, batch_size: int, rank: int, num_ranks: int, *, shuffle: bool,
        seed: int, epoch: int, drop_last: bool, first_step: int, shard: range,
    ) -> None:
        self.order = (np.random.default_rng([seed, epoch]).permutation(num_examples)
                      if shuffle else np.arange(num_examples))
        self.rank, self.num_ranks, self.batch_size = rank, num_ranks, batch_size
        self.shard = shard
        left = num_examples % batch_size if drop_last else 0
        self.num_dropped = left if rank == shard[0] else 0  # summed over the shard
        self.num_examples, self._step = num_examples - left, first_step

    def draw(self) -> tuple[np.ndarray, list[int]] | None:
        first = self._step * self.batch_size
        if first >= self.num_examples:
            return None
        sampled = self.order[first: min(first + self.batch_size, self.num_examples)]
        self._step += 1
        shares = [GlobalSampler.share(len(sampled), r, self.num_ranks) for r in self.shard]
        return sampled[shares[0].start: shares[-1].stop], [s.stop - s.start for s in shares]

    def own(self) -> list[int] | None:
        """This rank's share of the next draw."""
        drawn = self.draw()
        if drawn is None:
            return None
        sampled, sizes = drawn
        first = sum(sizes[: self.rank - self.shard[0]])
        return sampled[first: first + sizes[self.rank - self.shard[0]]].tolist()


class SampledIndices:
    """Index lists of the user's batch_sampler on this rank, `accumulation_steps` of them a step."""

    knows_all = False

    def __init__(self, batch_sampler: Iterable, accumulation_steps: int, first_step: int) -> None:
        # chain asks for an iterator at the first draw, where an error reaches all ranks.
        self._lists = islice(chain.from_iterable([batch_sampler]),
                             first_step * accumulation_steps, None)
        self.accumulation_steps, self.num_dropped = accumulation_steps, 0

    def draw(self) -> tuple[np.ndarray, None] | None:
        own = self.own()
        return None if own is None else (np.asarray(own, np.int64), None)

    def own(self) -> list[int] | None:
        lists = list(islice(self._lists, self.accumulation_steps))
        return [int(i) for indices in lists for i in indices] if lists else None


class SharedIndices:
    """torch's batch_sampler for examples that are loaded where they are sampled."""

    def __init__(self) -> None:
        self.source: GlobalIndices | SampledIndices | None = None
        self.drawn: deque[list[int]] = deque()

    def __iter__(self) -> Iterator[list[int]]:
        self.drawn.clear()
        while (own := self.source.own()) is not None:
            self.drawn.append(own)
            yield own


class IndexedStream:
    """Examples of this rank's indices, loaded before anything is planned.

    loader: torch's, over `indices`, yielding lists of (lengths, example), or of examples where
    `lengths` tells them by index."""

    def __init__(
        self, loader: Iterable, indices: SharedIndices, lengths: Callable[[int], Any] | None
    ) -> None:
        self._indices, self._lengths = indices, lengths
        self._batches = Batches(loader)
        self.stop = self._batches.stop

    @property
    def num_dropped(self) -> int:
        return self._indices.source.num_dropped

    def draw(self) -> tuple[list, list[int]] | None:
        """What is drawn next, None at the end. Raises RuntimeError if the data set raised
        StopIteration."""
        measured = self._batches.next()
        if measured is END:
            if self._indices.drawn:
                raise RuntimeError("the dataset raised StopIteration")
            return None
        ids = self._indices.drawn.popleft()
        if self._lengths is not None:
            measured = [(self._lengths(i), e) for i, e in zip(ids, measured, strict=True)]
        return measured, ids

    def snapshot(self) -> None:
        return None


class ForeignStream:
    """Batches of a loader that is not ours, on this rank; `accumulation_steps` of them a step.

    loader: yields lists of (lengths, example). batch_size: with drop_last, shorter batches are left
    out and counted. first_step: to begin with; state: that the loader loads for it, None where it
    cannot and batches are drawn and thrown away."""

    def __init__(
        self, loader: Iterable, accumulation_steps: int, *, batch_size: int | None, drop_last: bool,
        rank: int, first_step: int = 0, state: Any = None,
    ) -> None:
        self._batches, self._per_step = Batches(loader), accumulation_steps
        self._batch_size = batch_size if drop_last else None
        self._rank, self._first_step, self._state = rank, first_step, state
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
            elif self._batch_size is not None and len(batch) < self._batch_size:
                self.num_dropped += len(batch)
            else:
                measured += batch
                drawn += 1
        if not drawn:
            return None
        first_id = (self._rank << 40) + self._count  # unlike any other rank's
        self._count += len(measured)
        return measured, range(first_id, first_id + len(measured))

    def snapshot(self) -> Any:
        state = getattr(self._batches.loader, "state_dict", None)
        return state() if state is not None else None


class MeasuredLists:
    """An iterable of lists of examples, measured."""

    def __init__(self, lists: Any, measured: Callable[[list], list]) -> None:
        self._lists, self._measured = lists, measured
        if hasattr(lists, "state_dict"):
            self.state_dict, self.load_state_dict = lists.state_dict, lists.load_state_dict

    def __len__(self) -> int:
        return len(self._lists)

    def __iter__(self) -> Iterator[list]:
        for examples in self._lists:
            if not isinstance(examples, list):
                raise TypeError(f"the wrapped loader yielded a {type(examples).__name__}: wrap one "
                                "that yields lists of examples, or a torch DataLoader")
            yield self._measured(examples)
