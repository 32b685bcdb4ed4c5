"""What exists already, with balanced batches: torch's DataLoader; transformers' Trainer, and TRL's
SFTTrainer, DPOTrainer and RewardTrainer."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from operator import length_hint
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from orchmllm.encoders.hook import EncoderHandle, balance_encoders
from orchmllm.encoders.infer import has_encoders
from orchmllm.loader.costs import known_cost
from orchmllm.loader.groups import check_group, data_ranks, refuse_parts, trainer_group
from orchmllm.loader.known_trainers import PAIRS, check_trainer, loss_of_pairs, of_pairs
from orchmllm.loader.lengths import known_lengths
from orchmllm.loader.loader import BalancedDataLoader
from orchmllm.loader.loss import StepInfo, nothing_of, scale
from orchmllm.loader.loss_trial import AGAIN, EXAMPLES, SCALED, SHIFTED, SUM, TARGETS, Trial
from orchmllm.loader.versions import require
from orchmllm.loader.wrapped import plain

log = logging.getLogger("orchmllm.loader")
_STATE = "balanced_loader_{rank}.pt"


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
    encoders: bool = True, **options: Any,
) -> Any:
    """Makes `trainer.train()` run on balanced batches: the same global batches as before, the same
    loss and gradients. Returns the trainer. Call it before train(), on all ranks.

    trainer: transformers' Trainer or Seq2SeqTrainer, TRL's SFTTrainer, DPOTrainer or RewardTrainer,
    or of a subclass. Its data set, sampler, collator, worker processes and accumulation stay; if
    its get_train_dataloader returns a BalancedDataLoader, that is used as it is. lengths,
    length_fn, options: see BalancedDataLoader; without the first two a length is that of the
    column "input_ids", or the positions of the batch that the Trainer's collator makes of a row
    alone, with a black image for each image. Lengths count tokens: the cost of an example is
    cost_of(trainer.model), or its length where that cannot be known, unless phases is given. The
    ranks that share the data are those that the mesh of the model or of accelerate names, unless
    group is given. encoders: whether those of the model are balanced, too, by balance_encoders; the
    log says why where they cannot be. loss: says what the loss is, instead of the try: `mean` over
    the rank's targets of the batch, or `scaled` if it divides by num_items_in_batch.

    What the loss is, is tried in steps 1, 2, 10 and 100, by up to 9 forwards without gradients,
    which leave random numbers, buffers and parameters as they were; a model or a compute_loss that
    changes anything else when it is called needs `loss`. A mean is weighed, so that its gradient is
    that of one process.

    Checkpoints hold the loader's state, and train(resume_from_checkpoint=...) goes on after the
    batch where the checkpoint was saved. Raises ValueError for a Trainer whose loss would be wrong,
    whose ranks that share examples are not known, or whose batches cannot be balanced (in these
    steps, on all ranks, for what the try finds), RuntimeError for an older version than was
    tested."""
    require(*(c.__module__ for c in type(trainer).__mro__))
    base = check_trainer(trainer, loss)
    if options.get("group") is None:
        options["group"] = trainer_group(trainer)
    trainer._balance_encoders = (
        _encoders_balanced(trainer, options["group"]) if encoders else None)
    if "phases" not in options:
        options["phases"] = known_cost(trainer.model)
    kind = type(trainer)
    trainer.__class__ = type(f"Balanced{kind.__name__}", (_Balanced, kind), {})
    if base.__name__ in PAIRS:
        options, loss = of_pairs(trainer, options), loss or loss_of_pairs(kind)
    if loss == "mean":
        refuse_parts(trainer)
    given = {"lengths": lengths, "length_fn": length_fn}
    trainer._balance = options | {k: v for k, v in given.items() if v is not None}
    of = SHIFTED if trainer._loss_shifts_labels else TARGETS
    trainer._balance_loss = {None: None, "scaled": SCALED, "mean": of}[loss]
    trainer._balance_tries, trainer._balance_steps = loss is None, deque()
    return trainer


def _encoders_balanced(trainer: Any, group: Any) -> EncoderHandle | None:
    """balance_encoders for the Trainer's model; the log says why not, of a model that has some."""
    if not has_encoders(trainer.model):
        return None
    try:
        if len(data_ranks(group)) < dist.get_world_size():
            raise ValueError("the ranks of a replica share its media")
        return balance_encoders(trainer.model)
    except ValueError as error:
        log.warning("the encoders of %s are not balanced: %s", type(trainer.model).__name__, error)
        return None


class _Balanced:
    """What balance_trainer puts before the class of a Trainer."""

    _balance: dict[str, Any]
    _balance_loss: str | None  # what the loss is (see Trial), None until a batch has shown it
    _balance_tries: bool  # whether later batches have to show the same
    _balance_steps: deque[StepInfo]  # of batches that were fetched and not trained on
    _balance_step: StepInfo | None = None  # of the batch that is trained on
    _balance_loader: BalancedDataLoader
    _balance_encoders: EncoderHandle | None

    def get_train_dataloader(self) -> BalancedDataLoader:
        loader = super().get_train_dataloader()
        if not isinstance(loader, BalancedDataLoader):
            loader = BalancedDataLoader(loader, check_loss=False, **{
                "accumulation_steps": self.args.gradient_accumulation_steps,
                **known_lengths(loader, self._balance), **self._balance})
        if loader.accumulation_steps != self.args.gradient_accumulation_steps:
            raise ValueError(
                f"the BalancedDataLoader has accumulation_steps={loader.accumulation_steps}, the "
                f"Trainer {self.args.gradient_accumulation_steps}: they have to be equal")
        check_group(loader, self._balance["group"])
        loader.enabled = self._balance.get("enabled", loader.enabled)
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
            if self._balance_loss is None or self._balance_tries and (
                    self.state.global_step in AGAIN and step.microbatch == 0):
                trial = Trial(self, model, lambda some, count: compute(
                    model, some, num_items_in_batch=count), self._balance_loader.num_targets)
                before, self._balance_loss = self._balance_loss, trial.meaning(
                    inputs, step.num_examples, num_items_in_batch, self._balance_loss)
                if self._balance_loss != before:
                    self._balance_says(num_items_in_batch)
            if self._balance_loss == SCALED and num_items_in_batch is None:
                raise ValueError(
                    "loss='scaled', but this Trainer gives the loss no num_items_in_batch, so it "
                    f"is not divided by that ({type(self.model).__name__} has "
                    f"accepts_loss_kwargs={self.model_accepts_loss_kwargs}): leave loss out, and "
                    "what it is a mean of is found out, or say loss='mean'")
            as_it_is = self._balance_loss in (None, SCALED, SUM)  # None: no rank has a target
            out = compute(model, inputs, return_outputs=return_outputs,  # None: it is not scaled
                          num_items_in_batch=num_items_in_batch if as_it_is else None)
        loss, *outputs = out if return_outputs else (out,)
        if not as_it_is:
            info = step if self._balance_loss != EXAMPLES else replace(
                step, num_targets=step.num_global_examples, local_targets=(step.num_examples,) * 2)
            loss = scale(loss, info, mean=True, shifted=self._balance_loss == SHIFTED,
                         divided_by=self._divides_by(num_items_in_batch))
        elif not step.num_examples:  # a filler
            loss = nothing_of(loss)
        return (loss, *outputs) if return_outputs else loss

    def _balance_says(self, num_items_in_batch: Tensor | int | None) -> None:
        """On rank 0, what the trial has found."""
        if self.args.process_index:
            return
        log.info("the loss of %s is: %s", type(self.model).__name__, self._balance_loss)
        if num_items_in_batch is not None and self._balance_loss not in (SCALED, SUM):
            log.warning("the loss of %s ignores num_items_in_batch, for which the Trainer alone "
                        "multiplies the gradient by the number of ranks, %d, and of accumulated "
                        "batches, %d. Balanced, it is that of one process without accumulation: a "
                        "learning rate that was tuned to the other does not fit",
                        type(self.model).__name__, self._balance_loader.num_ranks,
                        self._balance_loader.accumulation_steps)

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
