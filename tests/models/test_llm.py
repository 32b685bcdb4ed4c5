"""The LLM: equal to transformers' where that is the reference, causal, and its loss a sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Qwen2ForCausalLM

from orchmllm.batch import IGNORE_INDEX, SequenceLengths
from orchmllm.config.model import LLMConfig
from orchmllm.models.llm import PackedQwen2, RMSNorm, RotaryEmbedding
from orchmllm.models.parts import rotate
from tests.lib.submodules import LLM, TOKENS, build, inputs, logits, positions, relative, run


def with_gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """The result of a function of tensors and their gradients for a drawn one of the result."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    out = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator).to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_is_bit_equal_to_hf(dtype):
    """With its gradients. In float64 the reference is the formula: transformers rounds to float32.
    """
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    torch.manual_seed(0)
    ours, stock = RMSNorm(64, 1e-6), Qwen2RMSNorm(64, 1e-6)

    def formula(x, weight):
        return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))

    def of(module):
        return lambda x, weight: torch.func.functional_call(module, {"weight": weight}, x)

    x, weight = torch.randn(50, 64, dtype=dtype), torch.randn(64, dtype=dtype)
    want = formula if dtype == torch.float64 else of(stock)
    for a, b in zip(with_gradients(of(ours), x, weight), with_gradients(want, x, weight),
                    strict=True):
        assert torch.equal(a, b)


def test_rotation_equals_hf():
    """In float64, with its gradient, from the tables that the LLM and the vision encoder share."""
    from transformers.models.qwen2.modeling_qwen2 import apply_rotary_pos_emb

    x = torch.randn(30, 4, 16, dtype=torch.float64)
    cos, sin = RotaryEmbedding(16, 1e4)(x, torch.arange(30)[None])  # (1, 30, 16)

    def stock(x):
        heads_first = x.transpose(0, 1)[None]
        return apply_rotary_pos_emb(heads_first, heads_first, cos, sin)[0][0].transpose(0, 1)

    ours = with_gradients(lambda x: rotate(x, cos[0, :, None], sin[0, :, None]), x)
    for a, b in zip(ours, with_gradients(stock, x), strict=True):
        assert relative(a, b) < 1e-15


def test_llm_equals_stock_transformers_on_one_sequence():
    from transformers import Qwen2Config

    module = build("llm")
    config = {**module.hf.config.to_dict(), "rope_theta": LLM.rope_theta}
    stock = Qwen2ForCausalLM(Qwen2Config(**config, attn_implementation="sdpa")).eval()
    stock.load_state_dict(module.hf.state_dict())
    assert stock.config._attn_implementation == "sdpa"
    ids = torch.randint(0, LLM.vocab_size, (40,))
    lengths = np.array([40])
    ours = logits(module, module.embed_tokens(ids), positions(lengths),
                  SequenceLengths.from_lengths([40]))
    assert relative(ours, stock(ids[None]).logits[0]) < 1e-5
    angle = torch.arange(3000)[None]
    for a, b in zip(
        module.hf.model.rotary_emb(ours, angle), stock.model.rotary_emb(ours, angle), strict=True
    ):
        assert torch.equal(a, b)


def test_rotary_angles_of_a_bfloat16_model_are_not_rounded():
    """Against NumPy in float64: an angle of 2,999 in bfloat16 would be off by whole radians, what
    rounds here is its cosine and sine alone."""
    tables = RotaryEmbedding(64, 1e6)(torch.zeros(1, dtype=torch.bfloat16),
                                      torch.arange(3000)[None])
    angle = np.arange(3000)[:, None] / 1e6 ** (np.arange(0, 64, 2) / 64)
    for table, wave in zip(tables, (np.cos, np.sin), strict=True):
        assert table.dtype == torch.bfloat16
        want = torch.from_numpy(wave(np.concatenate([angle, angle], 1)))
        assert float((table[0].double() - want).abs().max()) < 2**-8


@pytest.mark.parametrize("sequences", [[0], [0, 1, 2]])
def test_llm_is_causal(sequences):
    module = build("llm", torch.float64)
    x = inputs("llm", torch.float64)[: TOKENS[sequences].sum()]
    before = run("llm", module, x, sequences)
    x = x.clone()
    x[4] += 1.0
    change = (run("llm", module, x, sequences) - before).abs().amax(dim=1)
    assert not change[:4].any() and not change[TOKENS[0] :].any()
    assert (change[4 : TOKENS[0]] > 0).all()


def test_llm_loss_is_the_sum_over_targets():
    module, x = build("llm"), inputs("llm")
    labels = torch.randint(0, LLM.vocab_size, (len(x),))
    labels[::3] = IGNORE_INDEX
    seqlens = SequenceLengths.from_lengths(TOKENS)
    loss = module(x, positions(TOKENS), seqlens, labels)
    keep = labels != IGNORE_INDEX
    log_p = logits(module, x, positions(TOKENS), seqlens).log_softmax(-1)
    expected = -log_p[keep].gather(1, labels[keep][:, None]).sum()
    assert loss.shape == () and torch.allclose(loss, expected, rtol=1e-6)


def test_one_token_examples_have_no_loss():
    module = build("llm")
    x = module.embed_tokens(torch.tensor([3, 4]))
    labels = torch.full((2,), IGNORE_INDEX)
    lengths = np.array([1, 1])
    loss = module(x, positions(lengths), SequenceLengths.from_lengths(lengths), labels)
    assert loss.item() == 0.0
    loss.backward()
    for key, parameter in module.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), key


@pytest.mark.parametrize(
    "config", [LLMConfig(), LLMConfig(num_layers=1, hidden_size=2048, intermediate_size=64)]
)
def test_untrained_loss_is_ln_vocab_size(config):
    torch.manual_seed(0)
    module = PackedQwen2(config)
    ids = torch.randint(0, config.vocab_size, (400,))
    seqlens = SequenceLengths.from_lengths([100] * 4)
    with torch.no_grad():
        loss = module(module.embed_tokens(ids), positions(seqlens.lengths), seqlens, ids.roll(-1))
    assert abs(loss.item() / 400 / math.log(config.vocab_size) - 1) < 0.05
