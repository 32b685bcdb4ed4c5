"""What the loss of a Trainer is, found by computing it on its first batch: divided by
num_items_in_batch, a mean over targets or examples, a sum, or something that balancing changes.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX
from orchmllm.encoders.hook import EncoderHandle
from orchmllm.loader.collator import count_labels, labels_of
from orchmllm.loader.groups import refuse_parts

SCALED, SUM, TARGETS, SHIFTED, EXAMPLES = "scaled", "sum", "targets", "shifted", "examples"
AGAIN = (1, 9, 99)  # optimizer steps done when the trial is repeated: one batch may not show it


class Trial:
    """Computes the loss of a batch several times, without gradients, equally often on all ranks.
    Random numbers, buffers and TRL's metrics are then what they were.

    compute: (inputs, num_items_in_batch) -> the loss, (). num_targets: the loader's function, or
    None."""

    def __init__(self, trainer: Any, model: nn.Module, compute: Callable[[dict, Any], Tensor],
                 num_targets: Callable[[Any], int] | None) -> None:
        self._trainer, self._model, self._compute = trainer, model, compute
        self._num_targets, self._name = num_targets, type(trainer.model).__name__

    def meaning(
        self, inputs: Mapping[str, Any], num_examples: int, num_items: Tensor | int | None,
        before: str | None = None,
    ) -> str | None:
        """SCALED if the loss halves with twice the num_items_in_batch, SUM, or what it is a mean
        over: TARGETS, SHIFTED (without the first label of each row) or EXAMPLES. None if it is 0
        or not finite on all ranks. before: what the trial of another batch found, which stays if
        this one shows it, too. Raises ValueError, on all ranks alike, for any other loss;
        RuntimeError where computing it failed on a rank."""
        def respond() -> tuple[list[float], list[bool]]:
            if num_items is None:
                return self._losses([(inputs, None)])[0], []
            losses, eps = self._losses([(inputs, n) for n in (num_items, num_items, 2 * num_items)])
            return losses, _response(*losses, eps)

        told = self._told(respond)
        if not len(told):
            return before
        if num_items is not None:
            if told[:, 0].all() and not told[:, 1].any() and before in (None, SCALED):
                return SCALED
            if told[:, 0].any() or not told[:, 1].all():
                raise ValueError(
                    f"the loss of {self._name} is divided by num_items_in_batch only in part, or "
                    "it is not the same when it is computed twice. Such a part, as the auxiliary "
                    "loss of routed experts, is computed on the examples of one rank, which "
                    "balancing changes: switch it off (model.config.output_router_logits = False), "
                    'compute it over all ranks ("Losses over several examples" in '
                    "docs/loader_cases.md), or say loss='scaled' to let it depend on the plan")
        return self._count(inputs, num_examples, before)

    def _count(self, inputs: Mapping[str, Any], num_examples: int, before: str | None) -> str:
        """Of a loss that is not divided by num_items_in_batch: SUM, or what it is a mean over."""
        def fit() -> tuple[list[float], list[bool]]:
            parts = _parts(inputs, num_examples)
            losses, eps = self._losses([(part, None) for part in parts or [inputs] * 4],
                                       training=False)
            if parts is None:
                return [0.0], [False] * 4
            # Small losses of a later batch are rounded more; what matters is larger.
            return losses, self._fits(parts, *losses, max(1e-3 if before else 1e-5, 4 * eps))

        def narrow() -> tuple[list[float], list[bool]]:
            cut = _cut(inputs)
            losses, _ = self._losses([(part, None) for part in cut or [inputs] * 2],
                                     training=False)
            return losses if cut else [0.0], [abs(losses[0] - losses[1]) <= 0.02 * abs(losses[0])]

        refuse_parts(self._trainer)
        told = self._told(fit)
        names = (SUM, TARGETS, SHIFTED, EXAMPLES)
        found = {name for k, name in enumerate(names) if len(told) and told[:, k].all()}
        first = [SHIFTED, TARGETS] if self._trainer._loss_shifts_labels else [TARGETS, SHIFTED]
        labels = labels_of(inputs)
        if found == {EXAMPLES} and labels is not None and labels.dim() > 1 and (
                not self._told(narrow).all()):
            found = set()  # a mean over padding looks like it in rows of one width
        if before in found or before and not len(told):
            return before
        unclear = (self._num_targets is None and EXAMPLES in found and len(found) > 1
                   and labels.dim() > 1 and not labels.is_floating_point())
        if not found or unclear:
            raise ValueError(
                f"the loss of {self._name} is not divided by num_items_in_batch, and the parts of "
                f"{'a later' if before else 'the first'} batch do not show it to be " + (
                    "a mean over labels that are not -100 or over examples: no label is -100"
                    if unclear else "what was tried: a sum, or a mean over num_targets, labels "
                    "that are not -100 (with and without the first of each row) or examples") +
                ". Give num_targets=, what a batch counts as in that mean, and loss='mean' if its "
                "tensors do not have a row for each example. A loss that compares examples with "
                "each other cannot be balanced")
        return next(name for name in (SUM, *first, EXAMPLES) if name in found)

    def _fits(self, parts: list[dict], twice_x: float, twice_y: float, together: float, x: float,
              tolerance: float) -> list[bool]:
        """Whether the losses of `parts` are those of a SUM, or of a mean over TARGETS, SHIFTED or
        EXAMPLES."""
        size = tolerance * max(abs(twice_x), abs(twice_y), abs(together))
        fits = [abs(2 * x - twice_x) <= 0.05 * abs(twice_x)
                and abs(together - (twice_x + twice_y) / 2) <= size]
        is_mean = abs(x - twice_x) <= 0.05 * abs(twice_x)
        for of_x, of_y in zip(*(self._counts(part) for part in parts[:2]), strict=True):
            mean = (of_x * twice_x + of_y * twice_y) / max(of_x + of_y, 1)
            fits.append(is_mean and of_x + of_y > 0 and abs(together - mean) <= size)
        return fits

    def _counts(self, batch: dict) -> tuple[int, int, int]:
        """What a batch counts as: targets, those without the first of each row, examples."""
        size = next(len(v) for v in batch.values() if isinstance(v, Tensor) and v.dim())
        labels = labels_of(batch)
        if self._num_targets is not None:
            return int(self._num_targets(batch)), 0, size
        return (*((0, 0) if labels is None else count_labels(labels)), size)

    def _losses(self, calls: list[tuple], training: bool = True) -> tuple[list[float], float]:
        """(the loss of each call of compute, with the same random numbers; the rounding of its
        type)."""
        losses = []
        for inputs, num_items in calls:
            with _undisturbed(self._trainer, self._model, training):
                losses.append(self._compute({**inputs}, num_items).detach())
        return [float(loss) for loss in losses], torch.finfo(losses[0].dtype).eps

    def _told(self, look: Callable[[], tuple[list[float], list[bool]]]) -> Tensor:
        """What look found, (losses, findings), on the ranks whose losses are finite and not 0: a
        row each. Raises RuntimeError on all ranks if it failed on one of them. They meet after it:
        under FSDP2 a rank that fails within a forward stops the others there, as in training."""
        error = None
        try:
            losses, found = look()
        except Exception as e:  # raised below, on all ranks
            error = e
        failed = self._gathered([error is not None])[:, 0].nonzero().flatten().tolist()
        if failed:
            raise RuntimeError(f"computing the loss of a batch without gradients failed on "
                               f"rank {failed[0]}; say loss='mean' or loss='scaled' if it cannot "
                               "be tried") from error
        tells = all(map(math.isfinite, losses)) and any(losses)
        table = self._gathered([tells, *found])
        return table[table[:, 0] == 1, 1:] == 1

    def _gathered(self, row: list[float]) -> Tensor:
        """(ranks, n), the same on all ranks."""
        own = torch.tensor([row], dtype=torch.float32, device=self._trainer.args.device)
        return self._trainer.accelerator.gather(own).cpu()


def _response(once: float, again: float, of_twice: float, eps: float) -> list[bool]:
    """[whether the loss is divided by num_items, whether it does not change]: of_twice is for twice
    as many. Both where it is not the same twice, neither where a part of it is divided."""
    close = 4 * abs(once - again) + 16 * eps * abs(once)
    return [abs(once - 2 * of_twice) <= 2 * close, abs(once - of_twice) <= close]


def _cut(inputs: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The same text in rows of their width and in shorter ones: what is beyond half of the targets
    is ignored, and then cut off. None where that would tell nothing, or cut more than text."""
    rows = {k: v for k, v in inputs.items() if isinstance(v, Tensor)}
    if rows.keys() != {"input_ids", "attention_mask", "labels"} or (
            len({v.shape for v in rows.values()}) > 1):
        return None
    held = rows["labels"] != IGNORE_INDEX
    until = held.sum(0).cumsum(0)
    width, kept = held.shape[1], int((until < until[-1] / 2).sum()) + 2
    if held.all() or kept > 0.9 * width:
        return None
    beyond = torch.arange(width, device=held.device) >= kept
    wide = {"labels": rows["labels"].masked_fill(beyond, IGNORE_INDEX),
            "attention_mask": rows["attention_mask"].masked_fill(beyond, 0)}
    return [{**inputs, **wide},
            {**inputs, **{k: v[:, :kept].contiguous() for k, v in rows.items()}}]


def _parts(inputs: Mapping[str, Any], num_examples: int) -> list[dict] | None:
    """[x + x, y + y, x + y, x], where x and y are halves of the batch, equal in size, and every
    second target of y is ignored: what counts examples and what counts targets then differ, also in
    a batch of one. x + x and x + y are of one shape, so rounding is the same in both. Where rows of
    a tensor are no examples (patches of images), the batch stays and its labels are divided: [x, y,
    x + y, x]. None for a batch that cannot be divided, as a filler."""
    tensors = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.dim()}
    labels = labels_of(inputs)
    if num_examples and labels is not None and labels.dim() > 1 and any(
            len(v) != num_examples for v in tensors.values()):
        target = labels != IGNORE_INDEX
        third = target & (target.cumsum(-1) % 3 == 0)
        x, y = labels.masked_fill(third, IGNORE_INDEX), labels.masked_fill(
            target & ~third, IGNORE_INDEX)
        return [{**inputs, "labels": v} for v in (x, y, labels, x)]
    if not num_examples or not tensors or any(len(v) != num_examples for v in tensors.values()):
        return None
    half = max(num_examples // 2, 1)
    x = {k: v[:half] for k, v in tensors.items()}
    y = {k: v[-half:] for k, v in tensors.items()}
    labels = labels_of(y)
    # Only where -100 is known as a label: another value may be what the loss ignores.
    if labels is not None and labels.dim() > 1 and (inputs["labels"] == IGNORE_INDEX).any():
        target = labels != IGNORE_INDEX
        y["labels"] = labels.masked_fill(target & (target.cumsum(-1) % 2 == 0), IGNORE_INDEX)
    joined = [{k: torch.cat([a[k], b[k]]) for k in tensors} for a, b in ((x, x), (y, y), (x, y))]
    return [{**inputs, **part} for part in (*joined, x)]


@contextmanager
def _undisturbed(trainer: Any, model: nn.Module, training: bool) -> Iterator[None]:
    """A forward without gradients, in which encoders are balanced as in training; random numbers,
    buffers and TRL's metrics are then what they were. Not training: without dropout, for batches of
    other shapes."""
    buffers = [(b, b.clone()) for b in model.buffers()]
    modes = [(module, module.training) for module in model.modules()]
    counted = {name: copy.deepcopy(value) for name, value in vars(trainer).items()
               if name in ("_metrics", "_total_train_tokens")}
    of_python, of_numpy, device = random.getstate(), np.random.get_state(), trainer.args.device
    devices = [] if device.type == "cpu" else [device]
    EncoderHandle.without_gradients = True
    try:
        with torch.no_grad(), torch.random.fork_rng(
                devices, device_type=device.type if devices else "cuda"):
            if not training:
                model.eval()
            yield
    finally:
        EncoderHandle.without_gradients = False
        for module, mode in modes:
            module.training = mode
        for buffer, before in buffers:
            buffer.data.copy_(before)
        vars(trainer).update(counted)
        random.setstate(of_python)
        np.random.set_state(of_numpy)
