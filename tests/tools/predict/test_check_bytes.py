"""scripts/check_bytes.py times and counts what the dry run counts without memory."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn

from orchmllm.models.counting_head import count_head
from orchmllm.models.loss import LossHead
from scripts.check_bytes import CHUNK, TARGETS, Timed, timed_loss


def sums(timed: Timed) -> Counter[str]:
    found: Counter[str] = Counter()
    for term, amount, *_ in timed.found:
        found[term] += amount
    return found


def test_the_loss_moves_and_computes_what_the_dry_run_says():
    found = sums(timed_loss(LossHead(16, 64)))
    said = np.array(count_head(16, 64, CHUNK, "float32", learns=True)).sum(0) @ [1, TARGETS]
    assert found == {"loss": pytest.approx(said, rel=1e-4), "products": 3 * 2 * 16 * 64 * TARGETS}


class Norm(nn.LayerNorm):
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm(8)

    def forward(self, x):
        return self.norm(x) * 2.0


def test_a_backward_pass_belongs_to_the_terms_of_the_forward_pass():
    block, timed, x = Block(), Timed("residuals"), torch.ones(4, 8, requires_grad=True)
    hooks, grad = [*timed.watch(block)], torch.ones(4, 8)
    with timed:
        block(x).backward(grad)
    assert len(hooks) == 2 and sums(timed)["residuals"] == 4 * x.nbytes  # times 2 in both passes
    assert sums(timed)["norms"] > 5 * x.nbytes and not sums(timed)["products"]
