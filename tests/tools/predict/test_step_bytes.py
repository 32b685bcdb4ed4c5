"""The bytes of kernels that are no products, and the time that is predicted with them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from orchmllm.config.fsdp import COPIED_ROWS
from orchmllm.counts.counted import Counted
from orchmllm.models import loss
from orchmllm.models.counting_parts import count_head
from orchmllm.models.moved import moved_by
from orchmllm.tools.predict import step_time
from orchmllm.tools.predict.phase_runner import shortened
from scripts.count_kernels import count_block
from scripts.gpu import steps
from scripts.gpu.drawn import DrawnDataset, layouts_of, predicted, sized
from scripts.gpu.parts import BLOCKS_7B, TOKENS
from tests.lib.recipes import read

TABLE, PLACES, FEW = torch.ones(100, 8), torch.zeros(5, 8, dtype=torch.int64), torch.ones(5, 8)
INDEX, ROWS = PLACES.nbytes, FEW.nbytes


@pytest.mark.parametrize("run, size", [
    (lambda: TABLE + TABLE, 3 * TABLE.nbytes),
    (lambda: TABLE.clone().copy_(TABLE), 4 * TABLE.nbytes),
    (lambda: TABLE.clone().zero_(), 3 * TABLE.nbytes),
    (lambda: torch.empty_like(TABLE), 0),
    (lambda: TABLE[2:].view(-1), 0),
    (lambda: torch.exp(TABLE, out=TABLE), 2 * TABLE.nbytes),
    (lambda: TABLE.gather(0, PLACES), INDEX + 2 * ROWS),
    (lambda: TABLE.scatter_add_(0, PLACES, FEW), INDEX + 3 * ROWS),
    (lambda: TABLE @ TABLE.T, 0)])
def test_an_operator_moves_what_it_touches(run, size):
    with torch.no_grad(), Counted({}) as counted:
        run()
    assert counted.stages["front"].forward_bytes == size


@pytest.mark.parametrize("phase", ["vision", "audio", "llm"])
def test_a_layer_more_moves_what_its_kernels_do(phase):
    """As scripts/count_kernels.py counts them, which knows another number of each operator."""
    model, rows = read("pretrained_7b").model, 4096
    one, two = (moved_by(shortened(model, n), "bfloat16")[phase] for n in (1, 2))
    for got, kernels in zip((two - one)[:, 2], count_block(model, phase, rows), strict=True):
        wanted = sum(kernels.moved[name] for name in kernels.others()) / rows
        assert got == pytest.approx(wanted, rel=0.02)


def test_the_step_of_an_h200_is_predicted_within_a_tenth(monkeypatch):
    """The part `train-none` of the GPU kit took 0.431 s a step, with an MFU of 42.8%: the median of
    steps 3 to 12, with the loss as it was then, which rounded and added the products of its head
    by kernels of their own. No rate of the prediction is fitted to it: see docs/scale.md."""
    def add(total: torch.Tensor, grad: torch.Tensor, h: torch.Tensor) -> None:
        for rows, columns in zip(total.split(COPIED_ROWS), grad.split(COPIED_ROWS, 1), strict=True):
            rows += columns.T @ h

    monkeypatch.setattr(loss, "_add_product", add)
    monkeypatch.setattr(loss, "_product", lambda h, weight, dtype: F.linear(h, weight).to(dtype))
    monkeypatch.setattr(step_time, "moved_by_head", lambda model, dtype, rows: np.array(count_head(
        model.llm.hidden_size, model.llm.vocab_size, rows, dtype, learns=True)))
    recipe = steps.recipe_of([*BLOCKS_7B, "fsdp.memory_gb=0",
                              "fsdp.activation_checkpointing=none"], 14, True)
    dataset = DrawnDataset(recipe)
    recipe = sized(recipe, dataset, TOKENS)
    found = predicted(recipe, layouts_of(recipe, dataset)[steps.WARM_UP:-1], "NVIDIA H200")
    assert found["predicted_step_s"] == pytest.approx(0.431, rel=0.1)
    assert np.isclose(found["predicted_mfu"], 0.428, rtol=0.1)
