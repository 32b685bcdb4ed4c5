"""What scripts/count_kernels.py counts: kernels, passes over logits, and what autograd keeps."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from orchmllm.counts.on_a_gpu import fused
from orchmllm.models.whole_flops import part_counts
from scripts.count_kernels import block_of, count_block, count_loss
from tests.lib.recipes import frozen, read

MODEL = read("mllm10b").model  # with Qwen2-7B
ROWS = 4096
# Without the option (torch 2.10 and 2.11) grouped keys and values are repeated for every head.
REPEATS = "enable_gqa" not in inspect.signature(varlen_attn).parameters


def test_a_block_of_qwen2_and_its_loss_run_few_kernels():
    forward, backward = count_block(MODEL, ROWS)
    assert forward.count["_fused_rms_norm"] == 2 and (
        sum(forward.count.values()) <= 25 + 2 * REPEATS)
    assert sum(backward.count.values()) <= 44 + 2 * REPEATS
    kernels = count_loss(MODEL, ROWS, 1024)
    assert kernels.count["log_softmax"] == ROWS // 1024
    assert kernels.passes <= 4 * ROWS // 1024


@pytest.mark.parametrize("parts", [(), ("llm",)])
def test_autograd_keeps_what_the_memory_model_says_on_a_gpu(parts):
    """Of a block that learns, and of a frozen one, whose input has a gradient."""
    model = frozen(*parts, model=MODEL)
    x, block, run = block_of(model, ROWS)
    block.requires_grad_(not parts)
    kept, weights = {}, {p.untyped_storage()._cdata for p in block.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage())._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with fused(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        run()
    total = sum(storage.nbytes() for storage in kept.values())
    llm = part_counts(model)["llm"]
    expected = llm.blocks[0].none
    if REPEATS:
        expected += 2 * 2 * (28 - 4) * llm.width // 28
    assert total / ROWS == pytest.approx(expected, rel=0.01)
