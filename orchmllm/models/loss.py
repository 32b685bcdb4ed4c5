"""The summed cross entropy of a head: with all logits at once, or a chunk of rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.fsdp import COPIED_ROWS


class _ChunkedLoss(torch.autograd.Function):
    """Summed cross entropy of hidden (R, D) through weight (V, D), a chunk of rows at a time.

    The gradients are made in the forward pass, while a chunk's logits exist: no logits are kept
    and none are computed twice. The weight's gradient is summed over chunks in at least float32.
    """

    @staticmethod
    def forward(ctx, hidden, weight, labels, rows, with_grad):
        dtype = torch.promote_types(torch.float32, hidden.dtype)
        need_hidden, need_weight = (with_grad and need for need in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=dtype) if need_weight else None
        total = torch.zeros((), dtype=dtype, device=hidden.device)
        ignored = (labels == IGNORE_INDEX).unsqueeze(1)  # (R, 1)
        for at in range(0, len(hidden), rows):
            part = slice(at, at + rows)
            target = labels[part].clamp(min=0).unsqueeze(1)  # (r, 1)
            # Zeros: an ignored row then adds nothing to the weight's gradient.
            h = hidden[part].masked_fill(ignored[part], 0.0)
            logits = _product(h, weight, dtype)  # (r, V)
            # In place, like all that follows: a pass reads and writes the only tensor of this size.
            torch.log_softmax(logits, 1, out=logits)
            total -= logits.gather(1, target).masked_fill_(ignored[part], 0.0).sum()
            if not (need_hidden or need_weight):
                del logits
                continue
            # d loss / d logits: softmax - one-hot
            logits.exp_().scatter_add_(1, target, logits.new_full(target.shape, -1.0))
            grad = logits.to(hidden.dtype)
            del logits
            if need_hidden:
                torch.mm(grad, weight, out=grad_hidden[part])
            if need_weight:
                _add_product(grad_weight, grad, h)
            del grad  # or it would stay beside the logits of the next chunk
        if need_hidden:
            grad_hidden.masked_fill_(ignored, 0.0)
        ctx.save_for_backward(grad_hidden, None if grad_weight is None
                              else grad_weight.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        return (*(g if g is None else _scale(g, grad) for g in ctx.saved_tensors),
                None, None, None)


def _product(h: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """h (r, D) times weight (V, D) transposed, (r, V) in dtype. A GPU sums products of half
    precision in float32 and writes that; elsewhere they are rounded to h's dtype before."""
    if h.device.type != "cpu" and h.dtype != dtype:
        return torch.mm(h, weight.T, out_dtype=dtype)
    return F.linear(h, weight).to(dtype)


def _add_product(total: Tensor, grad: Tensor, h: Tensor) -> None:
    """Adds grad (r, V) transposed times h (r, D) to total (V, D). Where total has a higher
    precision than the product, a GPU adds in total's; elsewhere COPIED_ROWS of the product exist
    at a time beside it."""
    if total.dtype == h.dtype:
        total.addmm_(grad.T, h)
        return
    if total.is_meta:  # the product alone: torch 2.11 cannot add it there
        torch.mm(grad.T, h, out_dtype=total.dtype)
        return
    if total.device.type != "cpu":
        torch.addmm(total, grad.T, h, out_dtype=total.dtype, out=total)
        return
    for rows, columns in zip(total.split(COPIED_ROWS), grad.split(COPIED_ROWS, 1), strict=True):
        rows += columns.T @ h


def _scale(x: Tensor, factor: Tensor) -> Tensor:
    """x (n, D) times a scalar, in place: a copy of the weight's gradient takes 2.5 GB at 84B.
    (autograd sees the change and refuses a second backward pass.) It is computed in the factor's
    precision and rounded once to x's dtype: a factor rounded first, such as 1 / number of targets
    in bfloat16, would scale all gradients alike."""
    for part in x.split(COPIED_ROWS):
        part.copy_(part.to(factor.dtype).mul_(factor))
    return x


@contextmanager
def answers_with_loss(head: nn.Linear, targets: Tensor, rows: int) -> Iterator[list[Tensor]]:
    """Within it the head of a model that someone else wrote answers (1, k, D) with the summed loss
    of the targets (k,), (1, 1, 1), of which `rows` logits exist at a time; the list gets what it
    answered. The model may do nothing more with it."""
    answered = []

    def forward(x: Tensor) -> Tensor:
        if head.bias is not None or len(x[0]) != len(targets):
            raise RuntimeError(
                f"{type(head).__name__} with {len(x[0])} rows for {len(targets)} targets"
                f"{' and a bias' * (head.bias is not None)} cannot answer with the loss: set "
                "fsdp.loss_chunk_rows to 0")
        loss = _ChunkedLoss.apply(x[0], head.weight, targets, rows, torch.is_grad_enabled())
        answered.append(loss.reshape(1, 1, 1).clone())  # FSDP2 warns of views
        return answered[0]

    head.forward = forward
    try:
        yield answered
    finally:
        del head.forward


class LossHead(nn.Linear):
    """A head with the summed loss, of which bytes and time are counted."""

    def __init__(self, hidden_size: int, vocab_size: int) -> None:
        super().__init__(hidden_size, vocab_size, bias=False)

    def forward(self, x: Tensor, labels: Tensor, chunk_rows: int) -> Tensor:
        """x: (R, D), labels (R,) -> a scalar in max(float32, x's dtype). chunk_rows: rows whose
        logits exist at a time; 0 or at least R: all at once."""
        if 0 < chunk_rows < len(x):
            return _ChunkedLoss.apply(x, self.weight, labels, chunk_rows, torch.is_grad_enabled())
        logits = super().forward(x)
        logits = logits.to(torch.promote_types(torch.float32, logits.dtype))
        return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum")
