"""An existing DataLoader whose work a BalancedDataLoader takes over: torch's, accelerate's, or that
in a WebLoader. `known` is the Source (orchmllm.loader.source) that is being filled in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from orchmllm.loader.versions import require


def plain(dataset: Any) -> Any:
    """The DataLoader within what accelerate prepared, or in a WebLoader; any other as it is. Raises
    ValueError where that would give every rank all the data, or leave stages out."""
    if type(dataset).__name__ == "WebLoader":
        loader, *stages = dataset.pipeline
        if stages:
            raise ValueError("the WebLoader has stages behind its DataLoader, as .shuffle() and "
                             ".batched() are: move them into the WebDataset")
        return loader
    loader = getattr(dataset, "base_dataloader", dataset)
    if loader is not dataset and type(dataset).__name__ == "DataLoaderDispatcher" and isinstance(
            loader.dataset, IterableDataset):
        raise ValueError(
            "accelerate reads this stream on one rank and sends batches to the others: say "
            "DataLoaderConfiguration(dispatch_batches=False), or "
            'accelerator_config={"dispatch_batches": False} of TrainingArguments')
    return loader


def wrap(known: Any, loader: DataLoader, collate_fn: Callable | None, lengths: Any) -> None:
    """Takes over a plain DataLoader: its indices are planned, its functions used. One with a
    state, or over a stream, is iterated as it is. Raises ValueError for a BalancedDataLoader, for
    lengths beside a state, and for a loader of single examples."""
    require(*(c.__module__ for c in type(loader).__mro__))
    if hasattr(type(loader), "scale_mean"):
        raise ValueError("the data set is a BalancedDataLoader already: iterate it as it is")
    known.collate = collate_fn or loader.collate_fn
    known.pin_memory = known.pin_memory or loader.pin_memory
    known.batch_size, known.drop_last = loader.batch_size, loader.drop_last
    known.workers = {name: getattr(loader, name) for name in known.workers}
    keeps_state = hasattr(loader, "state_dict")
    if keeps_state and lengths is not None:
        raise ValueError("a loader with a state of its own takes length_fn, not lengths")
    if keeps_state or isinstance(loader.dataset, IterableDataset):
        return
    plan_indices(known, loader, shared=_takes_all(loader))


def plan_indices(known: Any, loader: DataLoader, shared: bool) -> None:
    """Plans what the loader would draw. shared: by indices that are shared out over the ranks, in
    place of samplers that torch made. Raises ValueError for a loader of single examples."""
    known.dataset, drawn = loader.dataset, loader.batch_sampler
    if drawn is None:
        raise ValueError("batch_size is None: give the DataLoader a batch size")
    if shared:
        # accelerate's loader of one process has these there alone.
        known.kind, known.shuffle = "indices", isinstance(drawn.sampler, RandomSampler)
        known.batch_size, known.drop_last = drawn.batch_size, drawn.drop_last
    else:
        known.kind, known.batch_sampler = "sampler", drawn
        known.sampler = getattr(drawn, "sampler", loader.sampler)


def _takes_all(loader: DataLoader) -> bool:
    """Whether torch made the samplers: every rank would draw the whole dataset, so the loader
    shares it out instead, as accelerate does."""
    sampler = getattr(loader.batch_sampler, "sampler", None)
    return type(loader.batch_sampler) is BatchSampler and (
        type(sampler) is SequentialSampler or type(sampler) is RandomSampler
        and not sampler.replacement and sampler._num_samples is None and sampler.generator is None)
