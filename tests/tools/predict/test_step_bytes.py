"""The bytes of kernels that are no products, and the time that is predicted with them."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from orchmllm.config.fsdp import COPIED_ROWS
from orchmllm.counts.counted import Counted
from orchmllm.models import loss
from orchmllm.models.counting_parts import count_head
from orchmllm.models.flops import phase_lengths
from orchmllm.models.moved import moved_by
from orchmllm.models.whole_flops import Attention, Lengths, pairs
from orchmllm.plan.assign import PHASES
from orchmllm.plan.step import plan_step
from orchmllm.tools.predict import step_time
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.phase_runner import shortened
from orchmllm.tools.predict.workload import MODELS, sample_layout
from scripts.count_kernels import count_block
from scripts.gpu import attention, steps
from scripts.gpu.drawn import DrawnDataset, layouts_of, predicted, sized
from scripts.gpu.parts import BLOCKS_7B, TOKENS
from scripts.gpu.setup import ROOT
from tests.lib.recipes import read, small_spec

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


def test_attention_is_as_fast_as_an_h200_computes_it_at_each_length():
    lines = (ROOT / "benchmarks/attention_h200.jsonl").read_text().splitlines()
    rows, h200 = [json.loads(line) for line in lines], cluster("h200")
    found = attention.fit(rows, h200.sheet.bfloat16)
    assert found == pytest.approx((h200.attention_efficiency, h200.attention_half), rel=0.02)
    rows = [r for r in rows if r["length"] >= 1024]
    attended, reached = attention.shares(rows, h200.sheet.bfloat16)
    assert attended.max() > 16_000 and reached.max() / reached.min() > 1.7
    got = h200.rates("llm", "bfloat16", attended)[1] / h200.sheet.bfloat16
    assert got == pytest.approx(reached, rel=0.12)


def test_a_position_attends_to_half_of_a_text_and_all_of_a_medium():
    layout = sample_layout("10b", num_ranks=1, batch_size=12, seed=0)
    work = step_time.work_of(plan_step(layout, small_spec(MODELS["10b"])), MODELS["10b"])
    for phase in PHASES:
        n = phase_lengths(layout, phase).positions.astype(float)
        seen = (n + 1) / 2 if phase == "llm" else n
        assert work.attended[phase] == pytest.approx([(n * seen).sum() / n.sum()])
    n = np.array([1, 4, 12])
    assert list(pairs(Attention("tile", 4), Lengths(n, n, n))) == [1, 16, 48]


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
