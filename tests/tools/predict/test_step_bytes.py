"""The bytes of kernels that are no products, and the time that is predicted with them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from orchmllm.config.fsdp import COPIED_ROWS
from orchmllm.config.recipe import Recipe
from orchmllm.counts.counted import Counted
from orchmllm.models import loss
from orchmllm.models.counted_parts import Attention, pairs
from orchmllm.models.counting_head import count_head
from orchmllm.models.flops import phase_lengths
from orchmllm.models.loss import LossHead
from orchmllm.models.whole_flops import Lengths, moved_by
from orchmllm.papers.mixes import MODELS
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.tools.predict import step_time
from orchmllm.tools.predict.hardware import cluster
from orchmllm.tools.predict.workload import batch_layout, sample_headers, sample_layout
from scripts.check_bytes import CHUNK, TARGETS, Timed, timed_loss
from scripts.count_kernels import count_block
from scripts.gpu import attention, steps
from scripts.gpu.drawn import COMPOSITIONS, layouts_of, predicted, sized, write_composition
from scripts.gpu.parts import TOKENS
from scripts.gpu.setup import ROOT
from tests.lib.commands import python
from tests.lib.drawn import model_of
from tests.lib.recipes import small_spec
from tests.lib.tokenizers import write_byte_tokenizer

TABLE, PLACES, FEW = torch.ones(100, 8), torch.zeros(5, 8, dtype=torch.int64), torch.ones(5, 8)
INDEX, ROWS = PLACES.nbytes, FEW.nbytes


@pytest.mark.parametrize("run, size", [
    (lambda: TABLE + TABLE, 3 * TABLE.nbytes),
    (lambda: TABLE.clone().copy_(TABLE), 4 * TABLE.nbytes),
    (lambda: TABLE.clone().zero_(), 3 * TABLE.nbytes),
    (lambda: torch.empty_like(TABLE), 0),
    (lambda: torch.zeros_like(TABLE), TABLE.nbytes),
    (lambda: TABLE[2:].view(-1), 0),
    (lambda: torch.exp(TABLE, out=TABLE), 2 * TABLE.nbytes),
    (lambda: TABLE.gather(0, PLACES), INDEX + 2 * ROWS),
    (lambda: TABLE.scatter_add_(0, PLACES, FEW), INDEX + 3 * ROWS),
    (lambda: TABLE @ TABLE.T, 0),
    (lambda: torch.empty(100, 100).addmm_(TABLE, TABLE.T), 0)])
def test_an_operator_moves_what_it_touches(run, size):
    with torch.no_grad(), Counted({}) as counted:
        run()
    assert counted.stages["front"].forward_bytes == size


def test_a_layer_more_moves_what_its_kernels_do():
    """As scripts/count_kernels.py counts them, which knows another number of each operator."""
    wide, rows = {"vocab_size": 512, "hidden_size": 3584, "intermediate_size": 18944,
                  "num_attention_heads": 28, "num_key_value_heads": 4}, 4096
    one, two = (model_of(text=wide, num_layers=n) for n in (1, 2))
    more = moved_by(two, "bfloat16")["llm"] - moved_by(one, "bfloat16")["llm"]
    for got, kernels in zip(more[:, 2], count_block(one, rows), strict=True):
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
    layout = sample_layout(MODELS["10b"], num_ranks=1, batch_size=12, seed=0)
    work = step_time.work_of(plan_step(layout, small_spec(MODELS["10b"])), MODELS["10b"])
    for phase in PHASES:
        n = phase_lengths(layout, phase).positions.astype(float)
        seen = (n + 1) / 2 if phase == "llm" else n
        assert work.attended[phase] == pytest.approx([(n * seen).sum() / n.sum()])
    n = np.array([1, 4, 12])
    assert list(pairs(Attention("tile", 4), Lengths(n, n, n))) == [1, 16, 48]


class Headers:
    """The examples of the mix that the GPU trained on, with a logit for each position."""

    def __init__(self, recipe: Recipe, size: int = 4096) -> None:
        layout = batch_layout(sample_headers("natural", size, recipe.run.seed), recipe.model, size)
        self.parts = [replace(one, num_targets=one.tokens_per_example)
                      for one in layout.split_ranks(1)]

    def __len__(self) -> int:
        return len(self.parts)

    def layout(self, i: int) -> BatchLayout:
        return self.parts[i]


def test_the_step_of_an_h200_is_predicted_within_a_tenth(monkeypatch, tmp_path):
    """The part `train-none` of the GPU kit took 0.431 s a step, with an MFU of 42.8%: the median of
    steps 3 to 12 of the same blocks by code that is gone, with the loss as it was then: of every
    position, it rounded and added the products of its head by kernels of their own. No rate of the
    prediction is fitted to it: see docs/scale.md."""
    def add(total: torch.Tensor, grad: torch.Tensor, h: torch.Tensor) -> None:
        for rows, columns in zip(total.split(COPIED_ROWS), grad.split(COPIED_ROWS, 1), strict=True):
            rows += columns.T @ h

    monkeypatch.setattr(loss, "_add_product", add)
    monkeypatch.setattr(loss, "_product", lambda h, weight, dtype: F.linear(h, weight).to(dtype))
    *_, vocab_size, _ = COMPOSITIONS["7b"]
    monkeypatch.setattr(step_time, "moved_by_head", lambda model, dtype, rows: np.array(count_head(
        3584, vocab_size, rows, dtype, learns=True)))
    write_composition(tmp_path / "model", "7b", write_byte_tokenizer(tmp_path))
    recipe = steps.recipe_of(["fsdp.memory_gb=0", "fsdp.activation_checkpointing=none",
                              "fsdp.loss_chunk_rows=2048"], 14, True, tmp_path / "model",
                             tmp_path / "none")
    dataset = Headers(recipe)
    recipe = sized(recipe, dataset, TOKENS)
    found = predicted(recipe, layouts_of(recipe, dataset)[steps.WARM_UP:-1], "NVIDIA H200")
    assert found["predicted_step_s"] == pytest.approx(0.431, rel=0.1)
    assert np.isclose(found["predicted_mfu"], 0.428, rtol=0.1)


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


@pytest.mark.slow
def test_predicted_ratios_and_order_are_the_measured_ones(tmp_path):
    found = tmp_path / "found.json"
    done = python("scripts/check_prediction.py", "--ranks", "2", "--steps", "8", "--json", found)
    assert done.returncode == 0, done.stdout + done.stderr
    two = json.loads(found.read_text())["2"]
    assert len(two["predicted_order"]) == len(two["measured_order"]) == 5 and not two["swapped"]
    assert all(abs(r["predicted"] / r["measured"] - 1) < 0.1 for r in two["ratios"])
