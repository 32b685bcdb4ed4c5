"""What exists already, with balanced batches: torch's DataLoader; transformers' Trainer, and TRL's
SFTTrainer, DPOTrainer and RewardTrainer."""

from __future__ import annotations

import inspect
import math
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from orchmllm.loader.costs import known_cost
from orchmllm.loader.groups import check_group, trainer_group
from orchmllm.loader.loader import BalancedDataLoader
from orchmllm.loader.loss import StepInfo, scale
from orchmllm.loader.trial import SCALED, SHIFTED, SUM, TARGETS, Trial
from orchmllm.loader.versions import require
from orchmllm.loader.wrapped import plain

_STATE = "balanced_loader_{rank}.pt"
_LIBRARIES = ("transformers", "trl")
_PAIRS = ("DPOTrainer", "RewardTrainer")  # whose loss is a mean over pairs of answers
_KNOWN = ("Trainer", "Seq2SeqTrainer", "SFTTrainer", *_PAIRS)
_GROUPS = ("it compares the answers to one prompt with each other, and balancing would take them "
           'apart: make the group the example ("What varies per rank" in docs/loader.md)')
_REFUSED = {
    "GRPOTrainer": _GROUPS, "RLOOTrainer": _GROUPS,
    "KTOTrainer": "it estimates the divergence from the other examples of the batch",
    "DistillationTrainer": "its batches are generated within the step"}
_OF_A_BATCH = {"aot", "aot_unpaired", "sft"}  # losses of DPO that are no mean over pairs


def balance(loader: DataLoader, **options: Any) -> BalancedDataLoader:
    """A BalancedDataLoader over an existing DataLoader, with its data set, batch size, collate_fn
    and workers: balance(loader, lengths=...) or balance(loader, length_fn=...). options: those of
    BalancedDataLoader from lengths on.

    The loader's own sampler decides what this rank draws. If it has none (shuffle=True or False
    alone), every rank would draw the whole data set; it is shared out over the ranks instead. A
    loader with a state (torchdata's StatefulDataLoader) is iterated, and its state kept.
    Raises ValueError for what cannot be wrapped or honoured, TypeError for what is no DataLoader.
    """
    if not isinstance(plain(loader), DataLoader):
        raise TypeError(f"balance takes a torch DataLoader, not a {type(loader).__name__}; "
                        "BalancedDataLoader takes data sets and iterables of lists of examples")
    return BalancedDataLoader(loader, **options)


def balance_trainer(
    trainer: Any, *, lengths: Any = None, length_fn: Any = None, loss: str | None = None,
    **options: Any,
) -> Any:
    """Makes `trainer.train()` run on balanced batches: the same global batches as before, the same
    loss and gradients. Returns the trainer. Call it before train(), on all ranks.

    trainer: transformers' Trainer or Seq2SeqTrainer, TRL's SFTTrainer, DPOTrainer or RewardTrainer,
    or of a subclass. Its data set, sampler, collator, worker processes and accumulation stay; if
    its get_train_dataloader returns a BalancedDataLoader, that is used as it is. lengths,
    length_fn, options: see BalancedDataLoader; without the first two the lengths of the column
    "input_ids", or of TRL's pairs, are taken. Lengths count tokens: the cost of an example is
    cost_of(trainer.model), or its length where that cannot be known, unless phases is given. The
    ranks that share the data are those that the mesh of the model or of accelerate names, unless
    group is given. loss: says what the loss is, instead of the try: `mean` over the rank's targets
    of the batch, or `scaled` if it divides by num_items_in_batch.

    What the loss is, is tried in the first step: it is computed for num_items_in_batch and for
    twice as many; if that changes nothing, for parts of the batch, to find the sum or the mean over
    targets or examples that it is. A mean is weighed, so that its gradient is that of one process
    (the Trainer alone multiplies it by the number of ranks where a model accepts
    num_items_in_batch and ignores it). The try needs up to 7 forwards without gradients, which
    leave random numbers, buffers and parameters as they were; a model or a compute_loss that
    changes anything else when it is called needs `loss`.

    Checkpoints hold the loader's state, and train(resume_from_checkpoint=...) goes on after the
    batch where the checkpoint was saved. Raises ValueError for a Trainer whose loss would be wrong,
    whose ranks that share examples are not known, or whose batches cannot be balanced (in the first
    step, on all ranks, for what the try finds), RuntimeError for an older version than was
    tested."""
    require(*(c.__module__ for c in type(trainer).__mro__))
    base = _check(trainer, loss)
    if options.get("group") is None:
        options["group"] = trainer_group(trainer, loss)
    if "phases" not in options:
        options["phases"] = known_cost(trainer.model)
    kind = type(trainer)
    trainer.__class__ = type(f"Balanced{kind.__name__}", (_Balanced, kind), {})
    if lengths is None and length_fn is None:
        lengths = _known_lengths(trainer)
    if base.__name__ in _PAIRS:  # chosen answers, then rejected ones
        options.setdefault("num_targets", lambda batch: len(batch["input_ids"]) // 2)
        if not {"tolerance", "max_rank_tokens"} & options.keys() and not getattr(
                trainer.args, "padding_free", False):
            options.setdefault("policy", "padded")  # a pair has two rows, which hides the padding
        owner = next(c for c in kind.__mro__ if "compute_loss" in vars(c))
        if loss is None and _library(owner) in _LIBRARIES:
            loss = "mean"
    trainer._balance = dict(options, lengths=lengths, length_fn=length_fn)
    of = SHIFTED if trainer._loss_shifts_labels else TARGETS
    trainer._balance_loss = {None: None, "scaled": SCALED, "mean": of}[loss]
    trainer._balance_steps = deque()
    return trainer


class _Balanced:
    """What balance_trainer puts before the class of a Trainer."""

    _balance: dict[str, Any]
    _balance_loss: str | None  # what the loss is (see Trial), None until a batch has shown it
    _balance_steps: deque[StepInfo]  # of batches that were fetched and not trained on
    _balance_step: StepInfo | None = None  # of the batch that is trained on
    _balance_loader: BalancedDataLoader

    def get_train_dataloader(self) -> BalancedDataLoader:
        loader = super().get_train_dataloader()
        if not isinstance(loader, BalancedDataLoader):
            loader = BalancedDataLoader(loader, check_loss=False, **{
                "accumulation_steps": self.args.gradient_accumulation_steps, **self._balance})
        if loader.accumulation_steps != self.args.gradient_accumulation_steps:
            raise ValueError(
                f"the BalancedDataLoader has accumulation_steps={loader.accumulation_steps}, the "
                f"Trainer {self.args.gradient_accumulation_steps}: they have to be equal")
        check_group(loader, self._balance["group"])
        self._balance_loader = loader
        return loader

    def get_batch_samples(self, epoch_iterator: Iterator, *args: Any, **kwargs: Any) -> Any:
        def noted() -> Iterator[Any]:
            for batch in epoch_iterator:
                self._balance_steps.append(self._balance_loader.step)
                yield batch

        self._balance_steps.clear()
        return super().get_batch_samples(noted(), *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self._balance_step = self._balance_steps.popleft()
        try:
            return super().training_step(*args, **kwargs)
        finally:
            self._balance_step = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        compute, step = super().compute_loss, self._balance_step
        if step is None:  # an evaluation
            return compute(model, inputs, return_outputs, num_items_in_batch)
        with _unequal_lengths(self.accelerator):
            if self._balance_loss is None:
                trial = Trial(self, model, lambda some, count: compute(
                    model, some, num_items_in_batch=count), self._balance_loader.num_targets)
                self._balance_loss = trial.meaning(inputs, step.num_examples, num_items_in_batch)
            as_it_is = self._balance_loss in (None, SCALED, SUM)  # None: no rank has a target
            out = compute(model, inputs, return_outputs=return_outputs,  # None: it is not scaled
                          num_items_in_batch=num_items_in_batch if as_it_is else None)
        loss, *outputs = out if return_outputs else (out,)
        if not as_it_is or (self._balance_loss == SUM and not step.num_examples):  # a filler: 0
            info = step if self._balance_loss in (TARGETS, SHIFTED) else step.by_examples()
            loss = scale(loss, info, mean=True, shifted=self._balance_loss == SHIFTED,
                         divided_by=self._divides_by(num_items_in_batch))
        return (loss, *outputs) if return_outputs else loss

    def _divides_by(self, num_items_in_batch: Tensor | int | None) -> int:
        """What Trainer.training_step divides the loss by."""
        does_not = getattr(self, "loss_is_scaled_for_ga", None)  # since 5.20
        if does_not is None:
            does_not = self.compute_loss_func is not None or (
                self.model_accepts_loss_kwargs and num_items_in_batch is not None)
        return 1 if does_not else self.current_gradient_accumulation_steps

    def _save_rng_state(self, output_dir: str) -> None:  # called on all ranks for a checkpoint
        super()._save_rng_state(output_dir)
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        torch.save(self._balance_loader.state_dict(),
                   Path(output_dir) / _STATE.format(rank=self.args.process_index))

    def _run_epoch(self, **how: Any) -> Any:
        loader, folder, epoch = (how[name] for name in (
            "train_dataloader", "resume_from_checkpoint", "epoch"))
        if folder is not None and epoch == how["epochs_trained"] and not self.args.ignore_data_skip:
            _go_on(loader, Path(folder), self.args.process_index, epoch,
                   how["steps_trained_in_current_epoch"])
        with _nothing_skipped():
            return super()._run_epoch(**how)


def _library(kind: type) -> str:
    return kind.__module__.split(".")[0]


def _check(trainer: Any, loss: str | None) -> type:
    """The class of transformers or TRL that the Trainer is of. Raises ValueError, with the cure,
    for one whose loss would change with the ranks that hold the examples."""
    kinds = type(trainer).__mro__
    base = next((c for c in kinds if _library(c) in _LIBRARIES), kinds[0])
    if base.__name__ not in _KNOWN:
        reason = _REFUSED.get(base.__name__, "its loss may compare the examples of a rank with "
                              "each other, and balancing changes these")
        raise ValueError(f"{base.__name__} is none of {', '.join(_KNOWN)}: {reason}")
    model = getattr(trainer.model, "get_base_model", lambda: trainer.model)()  # of an adapter
    if "return_loss" in inspect.signature(model.forward).parameters:
        raise ValueError(f"{type(model).__name__} has a contrastive loss, which compares the "
                         "examples of a rank with each other, and balancing changes these: in a "
                         "loop of your own compute it over all ranks (\"What varies per rank\" in "
                         "docs/loader.md)")
    if loss not in (None, "mean", "scaled"):
        raise ValueError(f"loss is {loss!r}: use 'mean' or 'scaled'")
    of_batch = sorted(_OF_A_BATCH & {*getattr(trainer, "loss_types", ())})
    if base.__name__ in _PAIRS and (of_batch or getattr(trainer, "aux_loss_enabled", False)):
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


def _known_lengths(trainer: Any) -> list[int] | None:
    """Of the examples of a data set that is tokenised: input_ids, or TRL's pairs, of which the
    longer answer is what both are padded to. None for any other."""
    data = trainer.train_dataset
    columns = getattr(data, "column_names", None) or ()
    if isinstance(data, IterableDataset):
        return None
    if "input_ids" in columns:
        return [len(ids) for ids in data["input_ids"]]
    if not {"chosen_ids", "rejected_ids"} <= set(columns):
        return None
    prompts = data["prompt_ids"] if "prompt_ids" in columns else [()] * len(data)
    longest = getattr(trainer.args, "max_length", None) or math.inf
    return [min(len(prompt) + max(len(chosen), len(rejected)), longest) for prompt, chosen, rejected
            in zip(prompts, data["chosen_ids"], data["rejected_ids"], strict=True)]


def _go_on(loader: BalancedDataLoader, folder: Path, rank: int, epoch: int, batches: int) -> None:
    """Puts the loader where the checkpoint was saved: after `batches` of the epoch. rank: of this
    process. Raises ValueError if its state says otherwise. A checkpoint without one was saved
    before balancing."""
    files = [folder / _STATE.format(rank=r) for r in (rank, 0)]  # 0: more ranks now
    path = next((file for file in files if file.exists()), None)
    if path is not None:
        state = torch.load(path, weights_only=True)
    else:
        state = {**loader.state_dict(), "epoch": epoch,
                 "step": batches // loader.accumulation_steps}
    batch_size = getattr(loader, "global_batch_size", None)
    loader.load_state_dict(state)
    done = state["step"] * loader.accumulation_steps
    at_end = (state["epoch"], done) == (epoch - 1, length_hint(loader, -1)) and not batches
    if getattr(loader, "global_batch_size", None) != batch_size or not (
            at_end or (state["epoch"], done) == (epoch, batches)):
        raise ValueError(
            f"{folder}: the loader stands after {done} batches of epoch {state['epoch']}, the "
            f"Trainer after {batches} of epoch {epoch}: resume with the batch size, accumulation "
            "and number of ranks of the checkpoint")


@contextmanager
def _unequal_lengths(accelerator: Any) -> Iterator[None]:
    """Within it accelerator.gather joins tensors of unequally many rows: TRL gathers a value of
    each pair for its metrics, and balancing gives ranks unequally many pairs."""
    gather = accelerator.gather

    def joined(values: Any) -> Any:
        if not isinstance(values, Tensor) or not values.dim():
            return gather(values)
        sizes = gather(torch.tensor([len(values)], device=values.device)).tolist()
        padded = values.new_zeros(max(sizes), *values.shape[1:])
        padded[: len(values)] = values
        parts = gather(padded).split(max(sizes))
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    accelerator.gather = joined
    try:
        yield
    finally:
        del accelerator.gather


@contextmanager
def _nothing_skipped() -> Iterator[None]:
    """Within it the Trainer goes on with a BalancedDataLoader as it stands; otherwise it would
    build a plain DataLoader that leaves out the first batches."""
    from transformers import trainer

    original = trainer.skip_first_batches
    trainer.skip_first_batches = lambda loader, num_batches=0: (
        loader if isinstance(loader, BalancedDataLoader) else original(loader, num_batches))
    try:
        yield
    finally:
        trainer.skip_first_batches = original
