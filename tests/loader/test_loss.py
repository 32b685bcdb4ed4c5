"""The loss of a batch without targets: 0, and so is its gradient, however its mean was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from orchmllm.loader.loss import StepInfo, scale

FILLER = StepInfo(
    num_examples=0, example_ids=[], step=0, epoch=0, microbatch=0, num_microbatches=1,
    imbalance=(1.0, 1.0), wait_s=0.0, num_ranks=2, num_targets=8, num_shifted_targets=6,
    local_targets=(0, 0))
MEANS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "divided": lambda ce, mask: (ce * mask).sum() / mask.sum(),
    "multiplied": lambda ce, mask: (ce * mask).sum() * mask.sum().reciprocal(),
    "by row": lambda ce, mask: ((ce * mask).sum(-1) / mask.sum(-1)).mean(),
    "chosen": lambda ce, mask: ce[mask.bool()].mean(),
}


class Model(nn.Module):
    def __init__(self, mean: str, sparse: bool = False) -> None:
        super().__init__()
        self.embed, self.head, self.mean = nn.Embedding(8, 4, sparse=sparse), nn.Linear(4, 8), mean

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(the mean over no targets, another loss of the same logits)"""
        logits = self.head(self.embed(ids))
        ce = nn.functional.cross_entropy(logits.transpose(1, 2), ids, reduction="none")
        return MEANS[self.mean](ce, torch.zeros(ids.shape)), logits.square().mean()

    def gradients(self) -> list[Tensor]:
        return [p.grad.to_dense() for p in self.parameters()]


@pytest.mark.parametrize("info", [FILLER, dataclasses.replace(FILLER, num_examples=1)],
                         ids=["filler", "no target"])
@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("how", ["plain", "sparse", "compiled"])
def test_a_loss_of_nothing_has_a_gradient_of_zero(info, mean, how):
    model = Model(mean, how == "sparse")
    called = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    loss, _ = called(torch.arange(8).view(2, 4))
    assert loss.isnan()
    scaled = scale(loss, info, mean=True, shifted=False)
    scaled.backward()
    assert scaled == 0 and all((g == 0).all() for g in model.gradients())
    assert scale(torch.tensor(torch.nan), info, mean=True, shifted=False) == 0  # an evaluation's


@pytest.mark.parametrize("divided_by, want", [(1, 2 * 3 / 8), (4, 2 * 4 * 3 / 8)])
def test_what_the_caller_divides_the_loss_by_is_multiplied_in(divided_by, want):
    """A mean over 3 of 8 targets, of which two ranks' gradients are averaged."""
    info = dataclasses.replace(FILLER, num_examples=1, num_microbatches=4, local_targets=(3, 2))
    assert scale(torch.tensor(1.0), info, mean=True, shifted=False, divided_by=divided_by) == want


def test_another_loss_of_the_same_batch_keeps_its_gradient():
    got, want = Model("divided"), Model("divided")
    want.load_state_dict(got.state_dict())
    loss, other = got(torch.arange(8).view(2, 4))
    (scale(loss, FILLER, mean=True, shifted=False) + other).backward()
    want(torch.arange(8).view(2, 4))[1].backward()
    assert all(map(torch.equal, got.gradients(), want.gradients()))
