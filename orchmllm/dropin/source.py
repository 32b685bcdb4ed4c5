"""What a BalancedDataLoader reads: from the arguments that it shares with torch's DataLoader to the
feed of a pass over the data.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from orchmllm.data.loading.forks import loader_context
from orchmllm.dropin.draws import (
    ForeignStream,
    GlobalIndices,
    IndexedStream,
    MeasuredLists,
    SampledIndices,
    SharedIndices,
)
from orchmllm.dropin.feeds import Collator, ExampleFeed, IndexFeed, PlannedIndices, measured
from orchmllm.dropin.versions import require

# Arguments that a wrapped DataLoader has itself, as they are where they were not given.
_WORKERS = {"num_workers": 0, "timeout": 0, "worker_init_fn": None, "multiprocessing_context": None,
            "generator": None, "prefetch_factor": None, "persistent_workers": False,
            "pin_memory_device": "", "in_order": True}
_DRAWING = {"batch_size": 1, "shuffle": None, "sampler": None, "batch_sampler": None,
            "drop_last": False}


@dataclass
class Source:
    """kind: indices (sampled by the loader), sampler (the user's, per rank) or stream. dataset: the
    user's, or for a stream what is iterated. batches: the user's batch sampler. sampler: the one
    that set_epoch is for. collate: of a list of examples. workers: arguments of torch's DataLoader.
    """

    kind: str
    dataset: Any
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    sampler: Any
    batches: Any
    collate: Callable
    pin_memory: bool
    workers: dict[str, Any]

    @property
    def seen_dataset(self) -> Any:
        """What loader.dataset shows."""
        return self.dataset.dataset if isinstance(self.dataset, DataLoader) else self.dataset

    def set_epoch(self, epoch: int) -> None:
        parts = [self.sampler, self.batches, self.dataset, self.seen_dataset]
        for _ in range(2):  # accelerate puts its shards around the user's batch sampler
            parts += [getattr(p, name, None) for name in ("batch_sampler", "sampler")
                      for p in parts]
        for part in {id(p): p for p in parts if hasattr(p, "set_epoch")}.values():
            part.set_epoch(epoch)

    def is_undistributed(self) -> bool:
        """Whether the user's sampler gives every rank all the data."""
        return (self.kind == "sampler" and type(self.batches) is BatchSampler
                and type(self.sampler) in (SequentialSampler, RandomSampler))


def open_source(
    dataset: Any, batch_size: int | None, shuffle: bool | None, sampler: Sampler | None,
    batch_sampler: Sampler | None, drop_last: bool, collate_fn: Callable | None, pin_memory: bool,
    lengths: Any, workers: dict[str, Any],
) -> Source:
    """The source of a loader's arguments. Raises ValueError for a loader that cannot be wrapped, or
    with arguments that are its own."""
    known = Source("stream", dataset, batch_size, bool(shuffle), drop_last, sampler, batch_sampler,
                   collate_fn or default_collate, pin_memory, workers)
    if isinstance(dataset, DataLoader):
        drawing = dict(zip(_DRAWING, (batch_size, shuffle, sampler, batch_sampler, drop_last),
                           strict=True))
        for name, value in (drawing | workers).items():
            if value != (_DRAWING | _WORKERS)[name]:
                raise ValueError(f"{name} is {value!r}: the wrapped DataLoader decides that, so "
                                 "give it that argument")
        _wrap(known, dataset, collate_fn, lengths)
    elif not isinstance(dataset, IterableDataset) and hasattr(dataset, "__getitem__"):
        known.kind = "indices" if sampler is batch_sampler is None else "sampler"
        if known.kind == "sampler":
            known.batches = batch_sampler or BatchSampler(sampler, batch_size, drop_last)
            known.sampler = sampler or getattr(batch_sampler, "sampler", None)
    known.workers = {**known.workers, "multiprocessing_context": loader_context(
        known.workers["multiprocessing_context"], known.workers["num_workers"])}
    return known


def _wrap(known: Source, loader: DataLoader, collate_fn: Callable | None, lengths: Any) -> None:
    """Takes over a plain DataLoader: its indices are planned, its functions used. One with a
    state, or over a stream, is iterated as it is."""
    require(*(c.__module__ for c in type(loader).__mro__))
    if hasattr(loader, "scale_mean"):
        raise ValueError("the data set is a BalancedDataLoader already: iterate it as it is")
    known.collate = collate_fn or loader.collate_fn
    known.pin_memory = known.pin_memory or loader.pin_memory
    known.batch_size, known.drop_last = loader.batch_size, loader.drop_last
    known.workers = {name: getattr(loader, name) for name in _WORKERS}
    keeps_state = hasattr(loader, "state_dict")
    if keeps_state and lengths is not None:
        raise ValueError("a loader with a state of its own takes length_fn, not lengths")
    if keeps_state or isinstance(loader.dataset, IterableDataset):
        return
    if loader.batch_sampler is None:
        raise ValueError("the wrapped DataLoader has batch_size=None: give it a batch size")
    known.dataset, known.batches, known.sampler = loader.dataset, loader.batch_sampler, (
        getattr(loader.batch_sampler, "sampler", loader.sampler))
    known.kind = "indices" if _takes_all(loader) else "sampler"
    if known.kind == "indices":
        known.shuffle, known.batches = isinstance(loader.sampler, RandomSampler), None
        known.sampler = None


def _takes_all(loader: DataLoader) -> bool:
    """Whether torch made the samplers: every rank would draw the whole dataset, so the loader
    shares it out instead, as accelerate does."""
    sampler = loader.sampler
    return type(loader.batch_sampler) is BatchSampler and (
        type(sampler) is SequentialSampler or type(sampler) is RandomSampler
        and not sampler.replacement and sampler._num_samples is None and sampler.generator is None)


def tail_is_filled(source: Source, batches: int, *, has_media: bool) -> bool:
    """Whether the last step of an epoch is known to have fewer examples than its `batches` on all
    ranks. Raises ValueError if that cannot be: the media of a filler would belong to no rank."""
    if source.kind != "indices" or source.drop_last:
        return False
    tail = len(source.dataset) % (source.batch_size * batches)
    if has_media and 0 < tail < batches:
        raise ValueError(
            f"the last step of an epoch has {tail} examples for {batches} batches on all ranks, "
            "and with media of a Phase a batch cannot be empty: use drop_last=True or another "
            "batch_size")
    return 0 < tail < batches


def make_loader(source: Source, dispatch: str, indices: Any, length_fn: Any) -> Any:
    """What loads: torch's loader over planned indices, over sampled ones, or the user's."""
    if dispatch == "load":
        return DataLoader(source.dataset, batch_sampler=indices, collate_fn=source.collate,
                          pin_memory=source.pin_memory, **source.workers)
    with_lengths = list if length_fn is None else partial(measured, length_fn)
    if source.kind != "stream":
        return DataLoader(source.dataset, batch_sampler=indices, collate_fn=with_lengths,
                          **source.workers)
    if isinstance(source.dataset, DataLoader):
        inner = copy.copy(source.dataset)  # the user's keeps its collate_fn
        inner.collate_fn = with_lengths
        if inner.num_workers:
            inner.multiprocessing_context = loader_context(
                inner.multiprocessing_context, inner.num_workers)
        return inner
    if isinstance(source.dataset, IterableDataset):
        return DataLoader(source.dataset, batch_size=source.batch_size, collate_fn=with_lengths,
                          **source.workers)
    return MeasuredLists(source.dataset, with_lengths)


def make_feed(
    source: Source, inner: Any, indices: PlannedIndices | SharedIndices, collator: Collator,
    lengths: Callable | None, drawn: GlobalIndices | None, *, accumulation_steps: int, first: int,
    state: Any, rank: int, links: Any, config_digest: int,
) -> IndexFeed | ExampleFeed:
    """The feed of one pass. inner: of make_loader. drawn: indices that the loader samples. first:
    step to begin with; state: of a stream, to load instead. rank: among all. links: of links.py."""
    k = accumulation_steps
    in_shard = links.gather.rank
    if source.kind == "stream":
        stream = ForeignStream(
            inner, k, batch_size=source.batch_size, drop_last=source.drop_last, rank=rank,
            first_step=first, state=state)
        return ExampleFeed(stream, collator, in_shard, links.cpu, config_digest)
    draws = drawn or SampledIndices(source.batches, k, first)
    if isinstance(indices, PlannedIndices):
        fetched = inner.num_workers * (inner.prefetch_factor or 0)
        return IndexFeed(draws, lengths, inner, indices, collator, config_digest,
                         lookahead=math.ceil(fetched / k))
    indices.source = draws
    return ExampleFeed(IndexedStream(inner, indices, lengths), collator, in_shard, links.cpu,
                       config_digest)


class PlannedSampler(DistributedSampler):
    """What loader.sampler shows: a distributed sampler, so that trainers do not put one of theirs
    in its place. The loader alone can iterate what it plans; a copy of the loader cannot.

    set_epoch reaches the user's sampler. Without one the loader counts epochs itself, and keeps
    them in its state: trainers count from 0 after a resume."""

    def __init__(self, source: Source, num_samples: int, rank: int, num_ranks: int) -> None:
        self.dataset, self.num_replicas, self.rank = source.seen_dataset, num_ranks, rank
        self.shuffle, self.drop_last, self.seed, self.epoch = source.shuffle, source.drop_last, 0, 0
        self.num_samples, self.total_size = num_samples, num_samples * num_ranks
        self._source = source

    def set_epoch(self, epoch: int) -> None:
        self._source.set_epoch(epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError(REBUILT)


REBUILT = (
    "a DataLoader was made of the parts of a BalancedDataLoader; it would load unbalanced batches. "
    "accelerate's skip_first_batches, with which transformers' Trainer resumes, does that: use "
    "orchmllm.balance_trainer(trainer, ...), or loader.load_state_dict in a loop of your own. Give "
    "other libraries the BalancedDataLoader as it is")


def refuse_ahead(caller: str, loader: DataLoader) -> None:
    """Raises TypeError if Lightning's Trainer (the module that iterates) would fetch each batch
    before it trained on the last: then loader.step is that of another batch. RuntimeError if the
    caller is of an older version than was tested."""
    require(caller)
    if caller.startswith(("lightning.pytorch.", "pytorch_lightning.")):
        try:
            len(loader)
        except TypeError as error:
            raise TypeError(
                "Lightning's Trainer fetches a batch ahead of a loader without a length, and "
                "loader.step would be that of the wrong batch: give the stream a __len__"
            ) from error


def refuse(examples: list) -> Any:
    """collate_fn that a loader over a stream shows. It raises RuntimeError."""
    raise RuntimeError(REBUILT)
