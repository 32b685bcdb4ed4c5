"""Which Trainers balance_trainer takes: those whose loss is a sum or a mean over targets, so that
it does not matter which rank holds an example."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from orchmllm.encoders.hook import EncoderHandle

LIBRARIES = ("transformers", "trl")
PAIRS = ("DPOTrainer", "RewardTrainer")  # a target is a pair of answers
KNOWN = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", *PAIRS)


def library_of(kind: type) -> str:
    return kind.__module__.split(".")[0]


def check_trainer(trainer: Any, loss: str | None, group: Any) -> None:
    """Raises ValueError, with the cure, for a Trainer whose loss would change with the ranks that
    hold the examples, and where ranks that share a replica would get different ones. loss, group:
    of balance_trainer."""
    kinds = type(trainer).__mro__
    base = next((c for c in kinds if library_of(c) in LIBRARIES), kinds[0])
    if base.__name__ not in KNOWN:
        raise ValueError(
            f"{base.__name__} is none of {', '.join(KNOWN)}: it may compare the examples of a rank "
            "with each other, and balancing changes which these are. Give a loop of your own a "
            "BalancedDataLoader where the loss does not depend on that")
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()  # of an adapter
    if "return_loss" in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} has a contrastive loss, which depends on the "
                         "other examples of the rank, and balancing changes these: leave it out")
    owner = owner_of_loss(type(trainer))
    if loss not in (None, "mean", "scaled"):
        raise ValueError(f"loss is {loss!r}: use 'mean' or 'scaled'")
    own = trainer.compute_loss_func is not None
    if loss is None and (own or library_of(owner) not in LIBRARIES):
        what = "compute_loss_func is given" if own else f"{owner.__name__} has its own compute_loss"
        raise ValueError(
            f"{what}: say loss='mean' if it returns the mean over the rank's targets of a batch, "
            "or loss='scaled' if it divides by num_items_in_batch as transformers does. A loss "
            "that compares examples with each other cannot be balanced")
    if not trainer.args.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices=False: each rank would divide by its own "
                         "number of targets, which balancing makes unequal; set it to True")
    if isinstance(trainer.train_dataset, IterableDataset):
        raise ValueError("the train_dataset is iterable: return a BalancedDataLoader with "
                         "length_fn from get_train_dataloader of your Trainer instead")
    sizes = {name: getattr(trainer, f"get_{name}_size")() for name in ("tp", "cp", "sp")}
    if group is None and math.prod(sizes.values()) > 1:
        shown = ", ".join(f"{name}_size {size}" for name, size in sizes.items() if size > 1)
        raise ValueError(
            f"{shown}: the ranks of a replica of the model need the same examples. Give group=, "
            "the process group of the ranks that hold one place of each replica, such as "
            "mesh['fsdp'].get_group()")


def owner_of_loss(kind: type) -> type:
    """The class that computes the loss, below what balance_trainer put before it."""
    return next(c for c in kind.__mro__
                if "compute_loss" in vars(c) and library_of(c) != "orchmllm")


def is_plain(trainer: Any) -> bool:
    """Whether its loss is computed by the Trainer of transformers, which passes num_items_in_batch
    on to the model or to compute_loss_func."""
    return library_of(owner_of_loss(type(trainer))) == "transformers"


def is_paired(kind: type) -> bool:
    """Whether the loss is a mean over pairs of answers."""
    return any(c.__name__ in PAIRS and library_of(c) == "trl" for c in kind.__mro__)


def num_pairs(batch: Any) -> int:
    """TRL's collators put the chosen answers before the rejected ones."""
    return len(batch["input_ids"]) // 2


def column_lengths(data: Any) -> list[int] | None:
    """Tokens of each example by the columns of `data`, of a pair those of the longer answer; None
    if it has no column with token ids."""
    columns = set(getattr(data, "column_names", None) or ())
    if "input_ids" in columns:
        return [len(ids) for ids in data["input_ids"]]
    if not {"chosen_ids", "rejected_ids"} <= columns:
        return None
    prompts = data["prompt_ids"] if "prompt_ids" in columns else [()] * len(data)
    return [len(prompt) + max(len(a), len(b)) for prompt, a, b in zip(
        prompts, data["chosen_ids"], data["rejected_ids"], strict=True)]


def undisturbed(model: nn.Module, compute: Callable[[], Tensor]) -> Tensor:
    """compute() in a forward of `model` without gradients, in which encoders are balanced as in
    training; random numbers and buffers are then what they were."""
    hooks = [hook for m in model.modules() for hook in m._forward_pre_hooks.values()]
    handles = {h for h in (getattr(hook, "__self__", None) for hook in hooks)
               if isinstance(h, EncoderHandle)}
    when = {h: h._when for h in handles}
    buffers = [(b, b.clone()) for b in model.buffers()]
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.no_grad(), torch.random.fork_rng(devices):
        for handle in handles:
            handle._when = "always"
        loss = compute()
        for handle in handles:
            handle._when = when[handle]
        for buffer, before in buffers:
            buffer.copy_(before)
    return loss


def check_scaled(trainer: Any, loss: Tensor, of_twice: Tensor) -> bool:
    """Whether a loss (), with its value `of_twice` () for twice the num_items_in_batch, depends on
    that number; False if no rank can tell, because its batch has no targets. Raises ValueError, on
    all ranks alike, if it does not."""
    a, b = float(loss.detach()), float(of_twice)
    told = 0 if not a or not math.isfinite(a) else 1 if abs(a - b) > 0.01 * abs(a) else -1
    everyone = trainer.accelerator.gather(torch.tensor([told], device=trainer.args.device))
    if everyone.min() < 0 and everyone.max() < 1:
        raise ValueError(
            f"the loss of {type(trainer.model).__name__} is the same for twice the "
            "num_items_in_batch: it is a mean over the rank's own targets, whose number balancing "
            "makes unequal. Say loss='mean', so that it is weighed by their number")
    return bool(everyone.max() > 0)
