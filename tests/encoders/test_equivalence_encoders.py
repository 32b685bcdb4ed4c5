"""check_equivalence for balanced encoders, alone and with a balanced loader."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from orchmllm import BalancedDataLoader, CostModel, balance_encoders, check_equivalence
from tests.lib.examples import load
from tests.lib.ranks import each_in_one_world

pytestmark = pytest.mark.dist


def checked(world, balance_loader: bool, wrong: float) -> tuple[float, str, bool]:
    """wrong: what is added to a gradient of the vision tower while the encoders are balanced."""
    e = load("qwen2_vl")
    torch.manual_seed(0)
    inner = e.tiny_model().train()
    handle = balance_encoders(inner)
    model = DistributedDataParallel(inner, find_unused_parameters=True)
    loader = BalancedDataLoader(
        e.Pictures(24), batch_size=6, collate_fn=e.collate, policy="greedy",
        length_fn=lambda x: len(x["input_ids"]), enabled=balance_loader,
        phases=CostModel(linear=100_000, quadratic=400))
    moved = set()

    def step(batch) -> None:
        loader.scale_sum(e.sum_loss(model, batch)).backward()
        moved.add(handle.shadow)
        if not handle.shadow:
            next(inner.model.visual.parameters()).grad += wrong

    try:
        worst = check_equivalence(step, model.named_parameters, loader, encoders=[handle],
                                  num_steps=2, tolerance=1e-9)
    except AssertionError as error:
        return 1.0, str(error), handle.shadow
    assert moved == {False, True}
    return worst, "", handle.shadow


def idle(world) -> str:
    """Encoders are balanced in train mode alone."""
    e = load("qwen2_vl")
    inner = e.tiny_model().eval()
    handle = balance_encoders(inner)
    loader = BalancedDataLoader(e.Pictures(24), batch_size=6, collate_fn=e.collate,
                                length_fn=lambda x: len(x["input_ids"]))
    with pytest.raises(ValueError, match="the encoders were not balanced: .* train mode") as told:
        check_equivalence(lambda batch: e.sum_loss(inner, batch).backward(),
                          inner.named_parameters, loader, encoders=[handle], num_steps=1)
    return str(told.value)


def right(world) -> tuple[float, str, bool]:
    return checked(world, False, 0.0)


def wrong(world) -> tuple[float, str, bool]:
    return checked(world, True, 1e-3)


@pytest.fixture(scope="module")
def two() -> dict[str, list]:
    return each_in_one_world(2, (idle, right, wrong))


def test_encoders_that_are_not_balanced_pass_no_check(two):
    assert len(set(two["idle"])) == 1


def test_balanced_encoders_are_compared(two):
    assert all(worst < 1e-9 and not shadow for worst, _, shadow in two["right"])


def test_a_wrong_gradient_of_an_encoder_is_found(two):
    assert all("visual" in text and "differs" in text and not shadow
               for _, text, shadow in two["wrong"])
