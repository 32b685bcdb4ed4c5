"""The feed of a data set whose lengths are known by index: a plan is a list of indices, and torch's
DataLoader loads and collates these on the rank that processes them, like any other batch, in worker
processes if there are any.

Indices come from an iterator of (indices, sizes): with sizes (d,), those of all ranks; without,
this rank's share.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import index
from typing import Any

import numpy as np
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from orchmllm.batch import Step
from orchmllm.data.sampler import shuffled
from orchmllm.loader.collator import Collator, targets_of
from orchmllm.loader.process_groups import Links
from orchmllm.plan.layout import TEXT, BatchLayout
from orchmllm.plan.step import StepPlan

NO_LIMIT = np.iinfo(np.int64).max
END = object()  # no batch: the user's may be None
Draws = Iterator[tuple[Sequence[int], np.ndarray | None]]


class Pass:
    """The batches of a generator. Asked for the next one after it has raised, it raises
    RuntimeError once: a loop that skips what raises would take the pass for exhausted. wrong: is
    raised in place of a batch, as Lightning hides what iter() raises."""

    def __init__(self, batches: Generator, wrong: Exception | None) -> None:
        self._batches, self._wrong, self._raised = batches, wrong, ""

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        if self._wrong is not None:
            raise self._wrong
        if self._raised:
            text, self._raised = self._raised, ""
            raise RuntimeError(
                "the pass of this BalancedDataLoader ended with an error, so no batch follows: "
                "loader.load_state_dict(loader.state_dict()) and a new pass go on with the step "
                f"that failed, a new pass alone is the next epoch ({text})")
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._raised = f"{type(error).__name__}: {error}"
            raise

    def close(self) -> None:
        self._batches.close()


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
    indices = (shuffled(num_examples, 0, [order["seed"], epoch]) if order["shuffle"]
               else np.arange(num_examples))[: num_examples - num_left_out]
    ranks = links.shard if whole else range(links.rank, links.rank + 1)
    for first in range(first_step * batch_size, len(indices), batch_size):
        sampled = indices[first: first + batch_size]
        ends = len(sampled) * np.arange(ranks.start, ranks.stop + 1) // links.num_ranks
        yield sampled[ends[0]: ends[-1]], np.diff(ends)


def sampled_indices(batch_sampler: Iterable, accumulation_steps: int, first_step: int) -> Draws:
    """Index lists of the user's batch_sampler on this rank, `accumulation_steps` of them a step.
    The batch_sampler is asked for an iterator at the first draw, where an error reaches all
    ranks."""
    lists = islice(batch_sampler, first_step * accumulation_steps, None)
    while drawn := list(islice(lists, accumulation_steps)):
        yield [_whole(i) for indices in drawn for i in indices], None


def _whole(given: Any) -> int:
    try:
        return index(given)
    except TypeError as error:
        raise TypeError(f"the sampler yielded {given!r} as an index: it has to yield whole "
                        "numbers") from error


def batch_layout(
    example_ids: Sequence[int], lengths: Sequence[Any], examples_per_rank: Sequence[int] | None,
    max_tokens: int = 0,
) -> BatchLayout:
    """The layout of examples of these lengths, each a whole number, at most max_tokens (0: any);
    without examples_per_rank they all sit on one rank. Raises TypeError or ValueError naming the
    example for anything else."""
    n = len(lengths)
    table = np.zeros((n, 7), np.int64)
    table[:, 0] = TEXT
    if getattr(lengths, "dtype", None) != np.int64:
        lengths = np.array([_length(given, k) for given, k in zip(lengths, example_ids,
                                                                  strict=True)], np.int64)
    is_wrong = (lengths < 0) | (lengths > (max_tokens or NO_LIMIT))
    for k in np.flatnonzero(is_wrong)[:1].tolist():
        if lengths[k] < 0:
            raise ValueError(f"example {example_ids[k]} has length {lengths[k]}: must be >= 0")
        raise ValueError(f"example {example_ids[k]} has {lengths[k]} tokens, more than max_tokens "
                         f"= {max_tokens}: leave it out, or raise max_tokens")
    table[:, 3] = lengths
    return BatchLayout.from_table(np.asarray(example_ids, np.int64), np.zeros(n, np.int64),
                                  np.ones(n, np.int64), table, examples_per_rank)


def _length(given: Any, example: int) -> int:
    try:
        return index(given)
    except TypeError as error:
        raise TypeError(f"example {example}: its length is {given!r}; give a whole number (media "
                        "are balanced by orchmllm.balance_encoders)") from error


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

    source: of index lists. lengths: whole numbers, or index -> length. batches: of torch's loader,
    with `indices` as its batch_sampler. lookahead: see Feed; enough for what its workers prefetch.
    spare: an example for a step that has none, of one shard of the ranks; None: it is an error.
    """

    source: Draws
    lengths: np.ndarray | Callable[[int], Any]
    batches: Batches
    indices: PlannedIndices
    collator: Collator
    config_digest: int
    lookahead: int
    knows_all: bool
    num_dropped: int
    max_tokens: int
    spare: int | None = None

    def draw(self, index: int) -> BatchLayout | None:
        drawn = next(self.source, None)
        if drawn is None:
            return None
        sampled, sizes = drawn
        lengths = (self.lengths[sampled] if isinstance(self.lengths, np.ndarray)
                   else [self.lengths(int(i)) for i in sampled])
        return batch_layout(sampled, lengths, sizes, self.max_tokens)

    def announce(self, step: Step) -> None:
        for micro in step.micro:
            filler = filler_of(micro.plan, step.layout, self.spare)
            self.spare = None if self.spare is None else filler
            self.indices.lists.append(micro.rank_plan.example_ids.tolist() or [filler])

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


def filler_of(plan: StepPlan, layout: BatchLayout, spare: int | None) -> int:
    """The shortest example of the microbatch (of the step, if that is empty, else `spare`). Raises
    ValueError."""
    layout = plan.layout if plan.layout.num_examples else layout
    if not layout.num_examples and spare is not None:
        return spare
    if not layout.num_examples:
        raise ValueError("a step has no example on any rank: leave empty batches out")
    return int(layout.example_id[layout.tokens_per_example.argmin()])
