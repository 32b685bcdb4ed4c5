"""Cost models against counted FLOPs of the real modules."""


import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.flops import cost_model
from orchmllm.models.llm import PackedQwen2
from orchmllm.models.vision import VisionEncoder
from orchmllm.plan.balance import balance
from orchmllm.plan.cost import CostModel
from tests.lib.submodules import logits

CONFIG = ModelConfig(
    vision=VisionConfig(num_layers=3, hidden_size=64, intermediate_size=256, num_heads=4),
    audio=AudioConfig(num_layers=2, hidden_size=64, intermediate_size=192, num_heads=4),
    llm=LLMConfig(vocab_size=300, num_layers=2, hidden_size=128, intermediate_size=320))
MATMULS = ("mm", "addmm", "bmm", "convolution")


def matmul_flop(run) -> int:
    """FLOP of one forward without attention (its cost is analytic: kernels differ in blocks)."""
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    counts = counter.get_flop_counts()["Global"]
    return sum(flop for op, flop in counts.items() if str(op).split(".")[-1] in MATMULS)


def attention_flop(lengths, layers: int, hidden: int, causal: bool) -> int:
    """Analytic: two products of l x l x hidden, 2 FLOP each; causal computes half of it."""
    return sum(4 * layers * hidden * n * n // (2 if causal else 1) for n in lengths)


def check(phase: str, cost_lengths, counted: int, attention: int) -> None:
    cost = int(cost_model(phase, CONFIG)(np.array(cost_lengths)).sum()) * 1000
    assert cost == pytest.approx(3 * (counted + attention), rel=.02)


def test_vision() -> None:
    grid = np.array([[1, 4, 6], [1, 16, 10], [1, 2, 2]])
    rows = grid.prod(axis=1)
    model = VisionEncoder(CONFIG.vision, CONFIG.llm.hidden_size)
    seqlens = SequenceLengths.from_lengths(rows)
    counted = matmul_flop(lambda: model(torch.zeros(rows.sum(), 588), grid, seqlens))
    check("vision", rows, counted, attention_flop(rows.tolist(), 3, 64, False))


def test_audio() -> None:
    frames = np.array([40, 120, 8])  # multiples of 2 * stack: no partly filled group
    model = AudioEncoder(CONFIG.audio, CONFIG.llm.hidden_size)
    seqlens = SequenceLengths.from_lengths(frames)
    counted = matmul_flop(lambda: model(torch.zeros(frames.sum(), 80), seqlens))
    check("audio", frames // 2, counted, attention_flop((frames // 2).tolist(), 2, 64, False))


def test_llm() -> None:
    lengths = np.array([30, 200, 7])
    model = PackedQwen2(CONFIG.llm)
    seqlens = SequenceLengths.from_lengths(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    counted = matmul_flop(
        lambda: logits(model, torch.zeros(int(lengths.sum()), 128), positions, seqlens))
    check("llm", lengths, counted, attention_flop(lengths.tolist(), 2, 128, True))


def test_frames_and_windows_limit_attention() -> None:
    model = CostModel(1000, 3000)
    assert model([12]).tolist() == [12 + 3 * 144]
    assert model([12], frames=np.array([3])).tolist() == [12 + 3 * 12 * 4]
    assert CostModel(1000, 3000, window=5)([12, 4]).tolist() == [12 + 3 * 12 * 5, 4 + 3 * 16]
    assert (model.linear_part([7]) + model.quadratic_part([7])).tolist() == model([7]).tolist()


def test_what_no_length_and_no_cap_can_be() -> None:
    with pytest.raises(ValueError, match="a length is -3: must be >= 0"):
        CostModel(1, 0)(np.array([5, -3]))
    with pytest.raises(ValueError, match="max_rank_tokens must be an integer >= 1 and below 2"):
        balance([1, 2], num_ranks=2, policy="least_move", max_rank_tokens=2**63)
