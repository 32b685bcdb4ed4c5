"""What a BalancedDataLoader reads: from the arguments that it shares with torch's DataLoader to the
feed of a pass over the data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    default_collate,
)

from orchmllm.data.loading.forks import loader_context
from orchmllm.loader.collator import Collator
from orchmllm.loader.indices import (
    Batches,
    IndexFeed,
    PlannedIndices,
    global_indices,
    sampled_indices,
)
from orchmllm.loader.process_groups import Links
from orchmllm.loader.streams import (
    ExampleFeed,
    ForeignStream,
    IndexedStream,
    SharedIndices,
    measured,
)
from orchmllm.loader.wrapped import plain, plan_indices, wrap
from orchmllm.plan.assign import digest64

# Arguments that a wrapped DataLoader has itself, as they are where they were not given.
_WORKERS = {"num_workers": 0, "timeout": 0, "worker_init_fn": None, "multiprocessing_context": None,
            "generator": None, "prefetch_factor": None, "persistent_workers": False,
            "pin_memory_device": "", "in_order": True}
_DRAWING = {"batch_size": 1, "shuffle": False, "sampler": None, "batch_sampler": None,
            "drop_last": False}


@dataclass
class Source:
    """kind: indices (sampled by the loader), sampler (the user's, per rank) or stream. dataset: the
    user's, or for a stream what is iterated. sampler: the one that set_epoch is for. collate: of a
    list of examples. workers: arguments of torch's DataLoader.
    """

    kind: str
    dataset: Any
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    sampler: Any
    batch_sampler: Any
    collate: Callable
    pin_memory: bool
    workers: dict[str, Any]

    @property
    def seen_dataset(self) -> Any:
        """What loader.dataset shows."""
        return self.dataset.dataset if isinstance(self.dataset, DataLoader) else self.dataset

    def set_epoch(self, epoch: int) -> None:
        parts = [self.sampler, self.batch_sampler, self.dataset, self.seen_dataset]
        for _ in range(2):  # accelerate puts its shards around the user's batch sampler
            parts += [getattr(p, name, None) for name in ("batch_sampler", "sampler")
                      for p in parts]
        for part in {id(p): p for p in parts if hasattr(p, "set_epoch")}.values():
            part.set_epoch(epoch)

    def counted(self) -> dict[str, int | None]:
        """What the step of a state per rank counts: batches of this size, of a dataset that has so
        many examples, or of a stream that so many processes read. None: not known, or nothing
        depends on it."""
        readers = (getattr(self.dataset, "num_workers", self.workers["num_workers"])
                   if self.kind == "stream" else None)
        size = getattr(self.batch_sampler, "batch_size", self.batch_size)
        held = length_hint(self.dataset, 0) if self.kind == "sampler" else 0
        return {"batch_size": size if isinstance(size, int) else None,
                "num_examples": held or None,
                "num_workers": max(readers, 1) if isinstance(readers, int) else None}

    def is_undistributed(self) -> bool:
        """Whether the user's sampler gives every rank all the data."""
        return (self.kind == "sampler" and type(self.batch_sampler) is BatchSampler
                and type(self.sampler) in (SequentialSampler, RandomSampler))


def open_source(
    dataset: Any, drawing: dict[str, Any], workers: dict[str, Any], collate_fn: Callable | None,
    pin_memory: bool, lengths: Any,
) -> Source:
    """The source of a loader's arguments. drawing: those that say which examples, workers: those
    that only torch's DataLoader reads. Raises TypeError for an argument that it does not have,
    ValueError for a loader that cannot be wrapped, or with arguments that are its own."""
    for name in workers.keys() - _WORKERS.keys():
        raise TypeError(f"BalancedDataLoader has no argument {name!r}")
    workers, dataset = _WORKERS | workers, plain(dataset)
    known = Source("stream", dataset, **drawing, collate=collate_fn or default_collate,
                   pin_memory=pin_memory, workers=workers)
    if isinstance(dataset, DataLoader):
        _refuse_beside(drawing | workers, (),
                       "the wrapped DataLoader decides that, so give it that argument")
        wrap(known, dataset, collate_fn, lengths)
    elif isinstance(dataset, IterableDataset) or hasattr(dataset, "__getitem__"):
        loader = DataLoader(dataset, **drawing, **workers)  # refuses what excludes each other
        if not isinstance(dataset, IterableDataset):
            has_sampler = drawing["sampler"] is not None or drawing["batch_sampler"] is not None
            plan_indices(known, loader, shared=not has_sampler)
    else:
        used = {"shuffle", "drop_last"}
        if drawing["drop_last"]:
            used.add("batch_size")  # of a batch that is not dropped
        _refuse_beside(drawing | workers, used, "an iterable of lists of examples decides that: "
                       "leave it out, or give a dataset or a DataLoader")
    known.workers = {**known.workers, "multiprocessing_context": loader_context(
        known.workers["multiprocessing_context"], known.workers["num_workers"])}
    return known


def _refuse_beside(arguments: Mapping[str, Any], used: Collection[str], cure: str) -> None:
    """Raises ValueError for an argument that was given and would have no effect beside the data."""
    for name, value in arguments.items():
        if name not in used and value != (_DRAWING | _WORKERS)[name]:
            raise ValueError(f"{name} is {value!r}: {cure}")


def drawn_batches(accumulation_steps: int | str) -> int:
    """Batches of batch_size examples that a rank draws for a step."""
    return 1 if accumulation_steps == "auto" else accumulation_steps


def _looked_up(lengths: Any) -> Any:
    """What IndexFeed takes: an array of what is whole numbers, which costs nothing to look up, else
    a function. lengths: of the loader, None without them."""
    table = lengths
    if isinstance(lengths, Tensor):
        table = lengths if lengths.is_floating_point() else lengths.cpu().numpy()
    elif hasattr(lengths, "__array__"):
        table = lengths = np.asarray(lengths)  # pandas has labels
    elif type(lengths) in (list, tuple):  # another class may compute what it is asked for
        with suppress(ValueError):  # lists of several lengths
            table = np.asarray(lengths)
    if isinstance(table, np.ndarray) and table.dtype.kind in "iu" and table.ndim == 1:
        return table.astype(np.int64, copy=False)
    return lengths.__getitem__ if hasattr(lengths, "__getitem__") else lengths


class Reader:
    """Loads a source's examples, and makes the feed of each pass over them.

    lengths: of an example by index; length_fn: instead, of a loaded one. max_tokens: an example
    that is longer is refused. loader: torch's, over planned indices with `lengths`, else over
    sampled ones; of a stream, the user's."""

    def __init__(
        self, source: Source, lengths: Any, length_fn: Callable | None, collator: Collator,
        links: Links, max_tokens: int,
    ) -> None:
        self._source, self._collator, self._links = source, collator, links
        self._max_tokens = max_tokens
        self._lengths = _looked_up(lengths)
        self._indices = SharedIndices() if lengths is None else PlannedIndices()
        self._measure: Callable = list
        with_lengths = partial(measured, length_fn)
        if lengths is not None:
            self.loader = DataLoader(
                source.dataset, batch_sampler=self._indices, collate_fn=source.collate,
                pin_memory=source.pin_memory, **source.workers)  # pinned in torch's own thread
        elif source.kind != "stream":
            self.loader = DataLoader(source.dataset, batch_sampler=self._indices,
                                     collate_fn=with_lengths, **source.workers)
        elif isinstance(source.dataset, IterableDataset):
            self.loader = DataLoader(source.dataset, source.batch_size, collate_fn=with_lengths,
                                     **source.workers)
        elif isinstance(source.dataset, DataLoader):
            self.loader = copy.copy(source.dataset)  # the user's keeps its collate_fn
            self.loader.collate_fn = with_lengths
            self.loader._iterator = None  # persistent workers, which have the user's
            if self.loader.num_workers:
                self.loader.multiprocessing_context = source.workers["multiprocessing_context"]
        else:
            self.loader, self._measure = source.dataset, with_lengths
        # Of its own, on each rank.
        self.has_state = source.kind == "stream" and hasattr(self.loader, "state_dict")

    def feed(
        self, order: Mapping[str, Any], prefetch: int, epoch: int, first: int, state: Any
    ) -> IndexFeed | ExampleFeed:
        """order, prefetch: of the loader. first: step to begin with; state: of a stream, to load
        instead."""
        source, links = self._source, self._links
        k = drawn_batches(order["accumulation_steps"])
        # Each rank asks a function for its own examples alone: it may read and collate them.
        knows_all = source.kind == "indices" and isinstance(self._lengths, np.ndarray)
        config = digest64(repr((
            order, self._lengths is None, knows_all, epoch, first, prefetch, source.drop_last,
            source.workers["num_workers"], source.workers["prefetch_factor"])).encode())
        if source.kind == "stream":
            examples = ForeignStream(
                self.loader, self._measure, k, rank=links.rank, first_step=first, state=state,
                full_size=source.batch_size or 0 if source.drop_last else 0)
        else:
            loads, num_left_out = self._lengths is not None, 0
            if source.kind == "indices":
                tail = order["num_examples"] % order["global_batch_size"]
                num_left_out = tail * source.drop_last
                self._collator.tail_is_filled = num_left_out < tail < links.num_ranks * k
                drawn = global_indices(order, epoch, first, links, num_left_out, whole=knows_all)
            else:
                drawn = sampled_indices(source.batch_sampler, k, first)
            num_dropped = num_left_out if links.gather.rank == 0 else 0  # summed over the ranks
            if loads:
                fetched = self.loader.num_workers * (self.loader.prefetch_factor or 0)
                return IndexFeed(
                    drawn, self._lengths, Batches(self.loader), self._indices, self._collator,
                    config, lookahead=math.ceil(fetched / k), knows_all=knows_all,
                    num_dropped=num_dropped, max_tokens=self._max_tokens,
                    spare=None if links.everyone is None else 0)
            examples = IndexedStream(self.loader, self._indices, drawn, num_dropped)
        return ExampleFeed(examples, self._collator, links.gather.rank, links.cpu, config,
                           self._max_tokens)
