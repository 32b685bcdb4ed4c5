"""What scripts/count_kernels.py counts: kernels, passes over logits, and what autograd keeps."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from orchmllm.counts.on_a_gpu import fused
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.activations import block_bytes
from scripts.count_kernels import block_of, count_block, count_loss
from tests.lib.recipes import read

MODEL = read("pretrained_7b").model
ROWS = 4096
# Without the option (torch 2.10 and 2.11) grouped keys and values are repeated for every head.
REPEATS = "enable_gqa" not in inspect.signature(varlen_attn).parameters


def test_a_block_of_qwen2_and_its_loss_run_few_kernels():
    forward, backward = count_block(MODEL, "llm", ROWS)
    assert forward.count["_fused_rms_norm"] == 2 and (
        sum(forward.count.values()) <= 24 + 2 * REPEATS)
    assert sum(backward.count.values()) <= 44 + 2 * REPEATS
    kernels = count_loss(MODEL, ROWS, 1024)
    assert kernels.count["log_softmax"] == ROWS // 1024
    assert kernels.passes <= 4 * ROWS // 1024


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("phase", PHASES)
def test_autograd_keeps_what_the_memory_model_says_on_a_gpu(phase, frozen):
    config = replace(getattr(MODEL, phase), frozen=frozen)
    x, block, run = block_of(replace(MODEL, **{phase: config}), phase, ROWS)
    block.requires_grad_(not frozen)
    x.requires_grad_(phase == "llm" or not frozen)  # only the LLM's input then has a gradient
    kept, weights = {}, {p.untyped_storage()._cdata for p in block.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with fused(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    total = sum(storage.nbytes() for storage in kept.values())
    expected = block_bytes(phase, config, 2).kept["none"]
    if phase == "llm" and REPEATS:
        more = config.num_heads - config.num_kv_heads
        expected += 2 * 2 * more * config.hidden_size // config.num_heads
    assert total / ROWS == pytest.approx(expected, rel=0.01)
