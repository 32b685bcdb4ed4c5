"""cost_of: what an example costs a model by its length, against torch's FlopCounterMode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from orchmllm import CostModel, cost_of

pytest.importorskip("transformers")
SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             vocab_size=128)
GROUPED = dict(SIZES, num_key_value_heads=2, head_dim=8)


def made(name: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(0)
    configs = {
        "Llama": lambda: hf.LlamaConfig(**SIZES),
        "Qwen2": lambda: hf.Qwen2Config(**SIZES, num_key_value_heads=2),
        "Qwen3Moe": lambda: hf.Qwen3MoeConfig(**GROUPED, num_experts=8, num_experts_per_tok=2,
                                              moe_intermediate_size=16),
        "Bert": lambda: hf.BertConfig(**SIZES),
        "Mistral": lambda: hf.MistralConfig(**GROUPED, sliding_window=32),
        "GptOss": lambda: hf.GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2,
                                          sliding_window=32)}
    config = configs[name]()
    config._attn_implementation = "eager"
    config._experts_implementation = "batched_mm"
    kind = "MaskedLM" if name == "Bert" else "CausalLM"
    return getattr(hf, f"{name}For{kind}")(config)


def counted(model: nn.Module, length: int) -> int:
    """FLOP of forward and backward with every pair of positions, as FlopCounterMode counts it."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.long)).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", [
    "Llama", "Bert", *(pytest.param(n, marks=pytest.mark.slow) for n in ("Qwen2", "Qwen3Moe"))])
def test_the_counted_flops_with_half_of_a_causal_square(name):
    model = made(name)
    before = torch.random.get_rng_state()
    cost = cost_of(model)
    assert torch.equal(torch.random.get_rng_state(), before)
    for length in (40, 200):
        pairs = cost.quadratic * length**2 * (1 if name == "Bert" else 2)
        assert cost.linear * length + pairs == pytest.approx(counted(model, length), rel=0.02)


def test_a_window_is_seen_as_far_as_it_reaches():
    """A causal window of w positions has l * w - w * w / 2 pairs."""
    whole, far, short = (made(n) for n in ("Mistral", "Mistral", "GptOss"))
    whole.config.sliding_window = None
    cost, windowed = cost_of(whole), cost_of(far)
    assert (windowed.linear, windowed.quadratic, cost.window) == (cost.linear, cost.quadratic, 0)
    pair = 2 * cost.quadratic  # FLOP
    for length in (16, 500):
        seen = length * min(length, 32) - min(length, 32) ** 2 / 2
        got = int(CostModel(0, windowed.quadratic, window=windowed.window, unit=1)([length])[0])
        assert got == pytest.approx(seen * pair, rel=0.05)
    assert cost_of(short).quadratic == cost.quadratic // 2  # one of two layers sees everything
    assert cost_of(short).window == 0


def test_frozen_weights_have_no_gradients():
    cost, frozen = (made("Llama") for _ in range(2))
    frozen.requires_grad_(False)
    assert cost_of(frozen).linear == pytest.approx(2 / 3 * cost_of(cost).linear)
    assert cost_of(frozen).quadratic == cost_of(cost).quadratic


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(9, 8), nn.Linear(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(input_ids))


def test_other_models_are_copied_without_their_numbers():
    model = Tokens()
    assert cost_of(model) == CostModel(3 * 2 * 8 * 4, 0)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


class Reads(nn.Linear):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return super().forward(input_ids.float()) * (2 if input_ids.sum() > 0 else 3)


class Moves(nn.Module):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return input_ids.flip(1)


class Cubic(nn.Linear):
    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        n = input_ids.shape[1]
        return torch.zeros(n * n, n) @ torch.zeros(n, 1)


@pytest.mark.parametrize(("model", "reason"), [
    (lambda: nn.Linear(8, 4), "FLOPs of Linear cannot be counted by its input_ids alone"),
    (lambda: Reads(64, 4), "cannot be counted.*phases="),
    (lambda: Moves(), "Moves has no product"),
    (lambda: Cubic(8, 4), "not linear and quadratic in the length"),
])
def test_what_cannot_be_known_is_refused_with_the_reason(model, reason):
    with pytest.raises(ValueError, match=reason):
        cost_of(model())


@pytest.mark.slow
def test_an_encoder_and_a_decoder_have_two_lengths():
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2,
                                                num_heads=4, vocab_size=128))
    with pytest.raises(ValueError, match="cannot be counted by its input_ids alone"):
        cost_of(model)
