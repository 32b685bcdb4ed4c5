"""Attention: packed sequences apart from each other, and which kernel computes it."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from orchmllm.batch import SequenceLengths
from orchmllm.models import attention
from orchmllm.models.attention import (
    attention_backend,
    packed_attention,
)
from orchmllm.models.whole_model import describe_attention
from tests.lib.synthetic import MODEL

TRY_OUT = attention._try_out


@pytest.mark.parametrize("causal", [True, False])
def test_packed_attention_equals_masked_softmax(causal):
    torch.manual_seed(0)
    lengths = [3, 3, 0, 1, 1, 5]
    q, k, v = (torch.randn(13, h, 8, dtype=torch.float64) for h in (4, 2, 2))
    out = packed_attention(q, k, v, SequenceLengths.from_lengths(lengths), causal=causal)
    owner = np.repeat(np.arange(len(lengths)), lengths)
    allowed = torch.from_numpy(owner[:, None] == owner[None])
    if causal:
        allowed = allowed.tril()
    for head in range(4):
        score = (q[:, head] @ k[:, head // 2].T / 8**0.5).masked_fill(~allowed, -math.inf)
        assert torch.allclose(out[:, head], score.softmax(-1) @ v[:, head // 2], atol=1e-12)


def test_packed_attention_refuses_wrong_lengths_and_describes_itself():
    x = torch.zeros(4, 2, 8)
    with pytest.raises(ValueError, match="covers 3 rows"):
        packed_attention(x, x, x, SequenceLengths.from_lengths([1, 2]), causal=False)
    assert "per sequence" in attention_backend("cpu", torch.float32, 8).description


def test_the_log_says_what_attends_and_why():
    what, *kernels = describe_attention(MODEL, "cpu", torch.float32).splitlines()
    assert what.startswith("attention of causal texts") and len(what) <= 100
    assert kernels == [f"  {part}: scaled_dot_product_attention per sequence (device is cpu)"
                       for part in ("vision", "audio", "llm")]


@pytest.fixture
def hopper(monkeypatch):
    """attention_backend as on a GPU; the errors of trying the kernel out (none: it runs)."""
    fails: list[Exception] = []

    def try_out(backend, dtype, head_dim, device):
        if fails:
            raise fails[0]

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(attention, "_try_out", try_out)
    yield fails
    attention_backend.cache_clear()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_a_kernel_is_tried_out_beside_a_block_that_is_computed_again(kind, hopper, monkeypatch):
    """Where the block is the first that attends, and the second time the kernel is known."""
    tried = []

    def on_cpu(backend, dtype, head_dim, device):
        tried.append(device)
        TRY_OUT(backend, dtype, head_dim, torch.device("cpu"))

    monkeypatch.setattr(attention, "_try_out", on_cpu)
    monkeypatch.setattr(attention, "_varlen_backend", lambda: attention.AttentionBackend(
        "tried", attention.sdpa_per_sequence))
    kept = [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
    how = {} if kind == "full" else {"context_fn": partial(
        create_selective_checkpoint_contexts, kept)}
    x, lengths = torch.randn(5, 2, 8, requires_grad=True), SequenceLengths.from_lengths([2, 3])

    def block(x: torch.Tensor) -> torch.Tensor:
        backend = attention_backend("cuda", torch.bfloat16, 8)
        assert backend.description == "tried"
        return backend.run(2 * x, 3 * x, x.sin(), lengths, True)

    attention_backend.cache_clear()
    checkpoint(block, x, use_reentrant=False, **how).square().sum().backward()
    [wanted] = torch.autograd.grad(block(x).square().sum(), x)
    assert tried == [torch.device("cuda", 0)] and torch.equal(x.grad, wanted)


def test_the_kernel_is_chosen_where_it_runs(hopper, monkeypatch):
    def chosen(dtype=torch.bfloat16, head_dim=64) -> str:
        attention_backend.cache_clear()
        return attention_backend("cuda", dtype, head_dim).description

    assert chosen() == "torch.nn.attention.varlen.varlen_attn"
    assert "not torch.float32, 64" in chosen(torch.float32) and "not" in chosen(head_dim=20)
    hopper.append(RuntimeError("no kernel image\nis available"))
    said = chosen()
    assert said.startswith("scaled_dot_product_attention per sequence (torch.nn.attention.varlen "
                           "fails: no kernel image)")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    assert "flash kernels need sm_80, this GPU is sm_75" in chosen()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_attention_is_close_to_the_cpu(causal):
    torch.manual_seed(0)
    q, k, v = (torch.randn(40, h, 64) for h in (4, 2, 2))
    lengths = [17, 1, 0, 22]
    exact = packed_attention(q, k, v, SequenceLengths.from_lengths(lengths), causal=causal)
    on_gpu = [x.to("cuda", torch.bfloat16).requires_grad_() for x in (q, k, v)]
    seqlens = SequenceLengths.from_lengths(lengths, "cuda")
    out = packed_attention(*on_gpu, seqlens, causal=causal)
    assert float((out.float().cpu() - exact).abs().max() / exact.abs().max()) < 0.02
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in on_gpu)
