"""What a BalancedDataLoader reads: from the arguments that it shares with torch's DataLoader to the
feed of a pass over the data.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from operator import length_hint
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
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
from orchmllm.loader.versions import require
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


def tail_is_filled(source: Source, batches: int) -> bool:
    """Whether the last step of an epoch is known to have fewer examples than its `batches` on all
    ranks."""
    if source.kind != "indices" or source.drop_last:
        return False
    return 0 < len(source.dataset) % (source.batch_size * batches) < batches


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
        if hasattr(lengths, "__array__") and not isinstance(lengths, Tensor):  # pandas has labels
            lengths = np.asarray(lengths)
        self._lengths = lengths.__getitem__ if hasattr(lengths, "__getitem__") else lengths
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
        config = digest64(repr((
            order, self._lengths is None, epoch, first, prefetch, source.drop_last,
            source.workers["num_workers"], source.workers["prefetch_factor"])).encode())
        if source.kind == "stream":
            examples = ForeignStream(
                self.loader, self._measure, k, rank=links.rank, first_step=first, state=state,
                full_size=source.batch_size or 0 if source.drop_last else 0)
        else:
            loads, num_left_out = self._lengths is not None, 0
            if source.kind == "indices":
                if source.drop_last:
                    num_left_out = order["num_examples"] % order["global_batch_size"]
                drawn = global_indices(order, epoch, first, links, num_left_out, whole=loads)
            else:
                drawn = sampled_indices(source.batch_sampler, k, first)
            num_dropped = num_left_out if links.gather.rank == 0 else 0  # summed over the ranks
            if loads:
                fetched = self.loader.num_workers * (self.loader.prefetch_factor or 0)
                return IndexFeed(
                    drawn, self._lengths, Batches(self.loader), self._indices, self._collator,
                    config, lookahead=math.ceil(fetched / k), knows_all=source.kind == "indices",
                    num_dropped=num_dropped, max_tokens=self._max_tokens)
            examples = IndexedStream(self.loader, self._indices, drawn, num_dropped)
        return ExampleFeed(examples, self._collator, links.gather.rank, links.cpu, config,
                           self._max_tokens)


class PlannedSampler(DistributedSampler):
    """What loader.sampler shows: a distributed sampler, so that trainers do not put one of theirs
    in its place. The loader alone can iterate what it plans; a copy of the loader cannot.

    set_epoch reaches the loader, if it still lives, and the user's sampler."""

    def __init__(self, source: Source, num_samples: int, rank: int, num_ranks: int,
                 reach: weakref.WeakMethod) -> None:
        self.dataset, self.num_replicas, self.rank = source.seen_dataset, num_ranks, rank
        self.shuffle, self.drop_last, self.seed, self.epoch = source.shuffle, source.drop_last, 0, 0
        self.num_samples, self.total_size = num_samples, num_samples * num_ranks
        self._reach = reach

    def set_epoch(self, epoch: int) -> None:
        if reach := self._reach():
            reach(epoch)
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError(REBUILT)


REBUILT = (
    "a DataLoader was made of the parts of a BalancedDataLoader; it would load unbalanced batches. "
    "accelerate's skip_first_batches, with which transformers' Trainer resumes, does that: use "
    "orchmllm.balance_trainer(trainer, ...), or loader.load_state_dict in a loop of your own. "
    "Lightning's predict does it, too: give it torch's DataLoader. Give other libraries the "
    "BalancedDataLoader as it is")


def refusal(frame: Any, loader: DataLoader) -> Exception | None:
    """Why Lightning's Trainer, if that iterates in this frame, would train wrongly: it would fetch
    each batch before it trained on the last, so that loader.step is that of another batch, or its
    steps are of fewer or more batches. Raises RuntimeError if the caller is of an older version
    than was tested."""
    require(caller := frame.f_globals.get("__name__", ""))
    if not caller.startswith(("lightning.pytorch.", "pytorch_lightning.")):
        return None
    try:
        len(loader)
    except TypeError:
        return TypeError(
            "Lightning's Trainer fetches a batch ahead of a loader without a length, and "
            "loader.step would be that of the wrong batch: give the stream a __len__")
    trainer = _lightning_trainer(frame) if loader.accumulation_steps > 1 else None
    if trainer is not None and trainer.lightning_module.automatic_optimization and (
            loader.accumulation_steps != trainer.accumulate_grad_batches):
        return ValueError(
            f"Lightning's Trainer(accumulate_grad_batches={trainer.accumulate_grad_batches}), "
            f"but the loader plans steps of {loader.accumulation_steps} batches "
            "(accumulation_steps): give both the same number, without a schedule")
    return None


def _lightning_trainer(frame: Any) -> Any:
    """That whose loop iterates in this frame or above it; None if there is none."""
    while frame is not None:
        # Not by getattr: some of its objects raise for what they have not.
        trainer = getattr(frame.f_locals.get("self"), "__dict__", {}).get("trainer")
        if hasattr(trainer, "accumulate_grad_batches"):
            return trainer
        frame = frame.f_back
    return None


def follow(frame: Any, loader: DataLoader) -> bool:
    """Makes `step`, `scale_sum` and `scale_mean` known to an object that took the loader's
    attributes for its own and iterates it in this frame, as those of Fabric and of Ray do. Returns
    whether it may fetch batches before it hands them out; the loader's step and state are then
    those of the batch that was handed out."""
    if frame.f_code.co_name != "__iter__":  # locals that were read stay alive until their call ends
        return False
    wrapper = frame.f_locals.get("self")
    if wrapper is loader or getattr(wrapper, "_original", None) is not loader._original:
        return False
    kind = type(wrapper)
    if not hasattr(kind, "scale_mean"):
        wrapper.__class__ = type(kind.__name__, (kind,), _followed(kind))
    return hasattr(kind, "__next__")


def _followed(kind: type) -> dict[str, Any]:
    """What the class of such an object becomes."""
    def handed_out(self: Any) -> Any:
        batch, loader = kind.__next__(self), self._original()
        loader._step, loader._done = loader._ahead.popleft()
        return batch

    known = {name: property(lambda self, name=name: getattr(self._original(), name))
             for name in ("step", "scale_sum", "scale_mean")}
    return known | ({"__next__": handed_out} if hasattr(kind, "__next__") else {})


def refuse(examples: list) -> Any:
    """collate_fn that a loader over a stream shows. It raises RuntimeError."""
    raise RuntimeError(REBUILT)
