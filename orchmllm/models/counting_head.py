"""Bytes that the chunked loss of a model reads and writes outside of products: counted without
memory, by what runs on a GPU."""

from __future__ import annotations

import numpy as np
import torch

from orchmllm.counts.counted import Counted
from orchmllm.counts.on_a_gpu import fused
from orchmllm.models.loss import LossHead

ROWS = 1024  # of a loss without chunks


def count_head(width: int, vocab: int, chunk_rows: int, dtype: str, learns: bool
               ) -> list[list[float]]:
    """(forward, backward) bytes, each (2,): once, and of a row of logits, by the line through two
    and four chunks."""
    with torch.device("meta"):
        head = LossHead(width, vocab).to(getattr(torch, dtype)).requires_grad_(learns)

    def run(rows: int) -> np.ndarray:
        x = torch.empty(rows, width, dtype=head.weight.dtype, device="meta", requires_grad=True)
        labels = torch.empty(rows, dtype=torch.int64, device="meta")
        with fused(), Counted({}, model=head) as counted:
            loss = head(x, labels, chunk_rows)
            loss.backward(torch.empty_like(loss))
        return sum(np.array([work.forward_bytes, work.backward_bytes])
                   for work in counted.stages.values())

    rows = 2 * (chunk_rows or ROWS)
    few, many = run(rows), run(2 * rows)
    each = (many - few) / rows
    return np.stack([few - each * rows, each], axis=1).tolist()
