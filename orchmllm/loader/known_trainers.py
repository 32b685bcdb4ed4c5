"""Which Trainers balance_trainer takes, and the options that their data has."""

from __future__ import annotations

import inspect
from typing import Any

_LIBRARIES = ("transformers", "trl")
PAIRS = ("DPOTrainer", "RewardTrainer")  # whose loss is a mean over pairs of answers
_KNOWN = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", *PAIRS)
_GENERATED = ("its batches are generated within the step, after the loader gave the prompts, so no "
              "length is known when a step is planned; ")
_ENCODERS = "balance_encoders(model) still balances the encoders of a model that has some"
_GROUPS = (f"{_GENERATED}in a loop of your own, over answers that exist, make the answers to one "
           'prompt the example ("Losses over several examples" in '
           "docs/loader_cases.md)")
_OWN_LOOP = ('; BalancedDataLoader balances it in a loop of your own, if its loss is a sum over '
             'examples or targets ("Which model, which way" in docs/loader.md)')
_REFUSED = {
    "GRPOTrainer": _GROUPS, "RLOOTrainer": _GROUPS,
    "KTOTrainer": f"it estimates the divergence from the other examples of the batch; {_ENCODERS}",
    "DistillationTrainer": _GENERATED + _ENCODERS}
_OF_A_BATCH = {"aot", "aot_unpaired", "sft"}  # losses of DPO that are no mean over pairs


def _library(kind: type) -> str:
    return kind.__module__.split(".")[0]


def check_trainer(trainer: Any, loss: str | None) -> type:
    """The class of transformers or TRL that the Trainer is of. Raises ValueError, with the cure,
    for one whose loss would change with the ranks that hold the examples."""
    kinds = type(trainer).__mro__
    base = next((c for c in kinds if _library(c) in _LIBRARIES), kinds[0])
    if base.__name__ not in _KNOWN:
        reason = _REFUSED.get(base.__name__, "its loss may compare the examples of a rank with "
                              f"each other, and balancing changes these{_OWN_LOOP}")
        raise ValueError(f"{base.__name__} is none of {', '.join(_KNOWN)}: {reason}")
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()  # of an adapter
    if "return_loss" in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} has a contrastive loss, which compares the "
                         "examples of a rank with each other, and balancing changes these: in a "
                         "loop of your own compute it over all ranks (\"Losses over several "
                         "examples\" in docs/loader_cases.md)")
    if loss not in (None, "mean", "scaled"):
        raise ValueError(f"loss is {loss!r}: use 'mean' or 'scaled'")
    of_batch = sorted(_OF_A_BATCH & {*getattr(trainer, "loss_types", ())})
    if base.__name__ in PAIRS and (of_batch or getattr(trainer, "aux_loss_enabled", False)):
        raise ValueError(f"{base.__name__}: {', '.join(of_batch) or 'the auxiliary loss'} is no "
                         "mean over pairs; balancing changes which pairs a rank has")
    if not trainer.args.average_tokens_across_devices:
        raise ValueError("average_tokens_across_devices=False: each rank would divide by its own "
                         "number of targets, which balancing makes unequal; set it to True")
    strategy = getattr(trainer.args, "train_sampling_strategy", "random")
    if strategy in ("group_by_length", "batch_rebalance"):
        raise ValueError(f"train_sampling_strategy={strategy!r} draws from random numbers that "
                         "ranks do not share while batches are fetched ahead, so they would get "
                         "other examples: leave it out; balancing evens out the lengths")
    return base


def loss_of_pairs(kind: type) -> str | None:
    """The loss of a Trainer of pairs is a mean, unless compute_loss is not TRL's own."""
    owner = next(c for c in kind.__mro__ if "compute_loss" in vars(c))
    return "mean" if _library(owner) in _LIBRARIES else None


def of_pairs(trainer: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The options for batches of chosen answers, then rejected ones."""
    options = {"num_targets": lambda batch: len(batch["input_ids"]) // 2, **given}
    if not {"tolerance", "max_tokens"} & given.keys() and not getattr(
            trainer.args, "padding_free", False):
        options.setdefault("policy", "padded")  # a pair has two rows, which hides the padding
    return options
