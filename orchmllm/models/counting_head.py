"""Bytes that the chunked loss of a model reads and writes outside of products: counted without
memory, by what runs on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from orchmllm.counts.counted import Counted
from orchmllm.counts.on_a_gpu import fused
from orchmllm.models.loss import LossHead

SIZES = (1, 2)  # items, or chunks of the loss, of which two counts make a line
ITEM = 1024  # rows


def count_head(width: int, vocab: int, chunk_rows: int, dtype: str, learns: bool
               ) -> list[list[float]]:
    """(forward, backward) bytes, each (2,): once, and of a row of logits."""
    with torch.device("meta"):
        head = LossHead(width, vocab).to(getattr(torch, dtype)).requires_grad_(learns)

    def run(count: int) -> tuple[int, np.ndarray]:
        rows = 2 * count * (chunk_rows or ITEM)
        x = torch.empty(rows, width, dtype=head.weight.dtype, device="meta", requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        return rows, _bytes(head, lambda: head(x, labels, chunk_rows))

    return _line(run)


def _line(run: Callable[[int], tuple[int, np.ndarray]]) -> list[list[float]]:
    """Of two sizes (n, (2,) bytes): what is once, and what each of n takes."""
    (short, few), (long, many) = map(run, SIZES)
    each = (many - few) / (long - short)
    return np.stack([few - each * short, each], axis=1).tolist()


def _bytes(module: torch.nn.Module, run: Callable[[], Tensor]) -> np.ndarray:
    """(2,) of the forward and of the backward pass."""
    with fused(), Counted({}, model=module) as counted:
        out = run()
        if out.requires_grad:
            out.backward(torch.empty_like(out))
    return sum(np.array([work.forward_bytes, work.backward_bytes])
               for work in counted.stages.values())
