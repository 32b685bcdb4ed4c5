"""What other programs see of a loader that they take for torch's, and what they have to know."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler

from orchmllm.loader.source import Source
from orchmllm.loader.versions import require


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
    if trainer is not None and trainer.training and (
            trainer.lightning_module.automatic_optimization
            and loader.accumulation_steps != trainer.accumulate_grad_batches):
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
