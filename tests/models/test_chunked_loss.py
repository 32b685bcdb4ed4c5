"""fsdp.loss_chunk_rows: the loss and its gradients are those of whole logits, in a fraction of the
memory."""

from __future__ import annotations

import pytest
import torch

from orchmllm.batch import IGNORE_INDEX
from orchmllm.models.loss import LossHead


def loss_and_gradients(rows: int, vocab: int, chunk: int, hidden_size: int = 64,
                       dtype: torch.dtype = torch.float32) -> list:
    """[loss, gradient of hidden (rows, D), gradient of the head's weight (vocab, D)]."""
    generator = torch.Generator().manual_seed(0)
    head = LossHead(hidden_size, vocab).to(dtype)
    with torch.no_grad():
        head.weight.normal_(std=0.2, generator=generator)
    hidden = torch.randn(rows, hidden_size, dtype=dtype, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocab, (rows,), generator=generator)
    labels[::3] = IGNORE_INDEX
    loss = head(hidden, labels, chunk)
    with torch.no_grad():
        assert torch.equal(head(hidden, labels, chunk), loss)
    (loss / rows).backward()
    return [loss.detach(), hidden.grad, head.weight.grad]


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 2e-15)])
@pytest.mark.parametrize("chunk", [1, 100, 128, 511])
def test_chunked_equals_plain(chunk, dtype, tolerance):
    """The plain one is torch's cross entropy of whole logits, and what autograd makes of it."""
    want, got = (loss_and_gradients(512, 3000, c, dtype=dtype) for c in (0, chunk))
    for a, b in zip(got, want, strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm())


def test_nothing_learnt_has_no_gradient():
    """Also where the rows that are ignored hold what is not finite."""
    head, hidden = LossHead(8, 50), torch.full((6, 8), torch.inf, requires_grad=True)
    loss = head(hidden, torch.full((6,), IGNORE_INDEX), 4)
    loss.backward()
    assert loss == 0 and not hidden.grad.any() and not head.weight.grad.any()
