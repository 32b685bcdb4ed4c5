"""orchmllm.models.flops against counted matrix products: torch's FlopCounterMode on the real model,
which leaves CPU attention out; attention is added from the definition, pair by pair."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.models.flops import (
    Lengths,
    cost_model,
    mfu,
    peak_flops,
    phase_lengths,
    phase_work,
    step_flops,
)
from orchmllm.models.mllm import MultimodalModel
from orchmllm.tools.predict.workload import sample_layout
from tests.lib.recipes import frozen

MODEL = ModelConfig(
    VisionConfig(2, 32, 96, 2, merge_size=2), AudioConfig(2, 48, 128, 3, num_mels=20, stack=4),
    LLMConfig(320, 3, 64, 160, 4, 1))
PARTS = ("vision", "audio", "connector", "llm")
FROZEN = [parts for n in range(4) for parts in combinations(PARTS, n)]
GRIDS = np.array([[1, 4, 6], [1, 2, 2], [1, 8, 10]])
FRAMES = np.array([37, 8, 120])
TOKENS = np.array([50, 3, 81])


def attention_flops(config, lengths, causal: bool, backward: int) -> float:
    """Pairs of positions times two products of the head size each, all heads and layers."""
    pairs = sum(n * (n + 1) // 2 if causal else n * n for n in lengths.tolist())
    return pairs * 2 * 2 * config.hidden_size * config.num_layers * (1 + backward)


def counted(run) -> float:
    """FLOP of matrix products in run(), forward and backward; torch counts none in place."""
    def added(_: tuple, a: tuple, b: tuple, **options: object) -> int:
        return 2 * a[0] * a[1] * b[1]

    in_place = {torch.ops.aten.addmm_: added}
    with FlopCounterMode(display=False, custom_mapping=in_place) as counter:
        out = run().sum()
        if out.requires_grad:
            out.backward()
    by_op = counter.get_flop_counts()["Global"]
    return float(sum(n for op, n in by_op.items() if "attention" not in str(op)))


def run_phase(model: MultimodalModel, phase: str, frames=FRAMES):
    if phase == "vision":
        rows = GRIDS.prod(1)
        return model.vision(torch.rand(rows.sum(), 588), GRIDS, SequenceLengths.from_lengths(rows))
    if phase == "audio":
        return model.audio(torch.rand(frames.sum(), 20), SequenceLengths.from_lengths(frames))
    x = torch.rand(TOKENS.sum(), 64, requires_grad=True)  # gradients go on to the connectors
    position = torch.cat([torch.arange(n) for n in TOKENS])
    labels = torch.randint(0, 320, (len(x),))
    return model.llm(x, position, SequenceLengths.from_lengths(TOKENS), labels)


def lengths_of(phase: str, frames=FRAMES) -> Lengths:
    if phase == "vision":
        rows = GRIDS.prod(1)
        return Lengths(rows, rows, rows // 4)
    if phase == "audio":
        positions = (frames + 1) // 2
        return Lengths(frames, positions, -(-positions // 4))
    return Lengths(TOKENS, TOKENS, TOKENS)


@pytest.mark.parametrize("phase", ["vision", "audio", "llm"])
def test_flops_equal_what_is_counted(phase):
    """Whatever is frozen."""
    lengths, seen = lengths_of(phase), set()
    for parts in FROZEN:
        config = frozen(*parts, model=MODEL)
        backward = 2 if phase == "llm" or phase not in parts else 0
        want = counted(lambda config=config: run_phase(MultimodalModel(config), phase)
                       ) + attention_flops(getattr(config, phase), lengths.positions,
                                           phase == "llm", backward)
        got = phase_work(phase, config, lengths).useful.sum()
        assert got == pytest.approx(want, rel=1e-9), parts
        seen.add(want)
    assert len(seen) == (2 if phase == "llm" else 4)


@pytest.mark.parametrize("chunk_rows", [0, 40])
def test_a_chunked_loss_computes_no_product_twice(chunk_rows):
    model = MultimodalModel(MODEL)
    model.llm.loss_chunk_rows = chunk_rows
    want = counted(lambda: run_phase(model, "llm")) + attention_flops(MODEL.llm, TOKENS, True, 2)
    assert phase_work("llm", MODEL, lengths_of("llm")).useful.sum() == pytest.approx(want)


def test_padding_is_work_but_not_useful():
    """Clips padded to the longest cost what the accounting says of their padded lengths, and the
    useful FLOPs stay those of the real ones."""
    padded = np.full(3, FRAMES.max())
    want = counted(lambda: run_phase(MultimodalModel(MODEL), "audio", padded)) + attention_flops(
        MODEL.audio, lengths_of("audio", padded).positions, False, 2)
    got = phase_work("audio", MODEL, lengths_of("audio", padded)).useful.sum()
    assert got == pytest.approx(want, rel=0.02)
    assert phase_work("audio", MODEL, lengths_of("audio")).useful.sum() < 0.6 * got


@pytest.mark.parametrize("parts", [FROZEN[0], *FROZEN[-4:]])
def test_the_balancing_cost_is_the_flops(parts):
    config = frozen(*parts, model=MODEL)
    layout = sample_layout("10b", num_ranks=4, batch_size=50, seed=0)
    for phase in ("vision", "audio", "llm"):
        lengths = phase_lengths(layout, phase)
        if phase == "vision":
            lengths = replace(lengths, tokens=lengths.rows / 4)
        if phase == "audio":
            lengths = replace(lengths, tokens=lengths.positions / 4)
            lengths = replace(lengths, rows=2 * lengths.positions)
        cost = cost_model(phase, config)(lengths.positions) * 1e3
        assert cost == pytest.approx(phase_work(phase, config, lengths).useful, rel=1e-4, abs=1e3)


def test_checkpointing_adds_the_blocks_forward_once():
    for phase in ("vision", "audio", "llm"):
        lengths = lengths_of(phase)
        full, none = (phase_work(phase, MODEL, lengths, c) for c in ("full", "none"))
        assert (none.recompute == 0).all() and (full.useful == none.useful).all()
        assert (full.recompute[1] == none.forward[1]).all()
        assert (full.recompute[0] < none.forward[0]).all()


def test_mfu():
    layout = sample_layout("84b", num_ranks=8, batch_size=2, seed=0)
    model = replace(MODEL, vision=replace(MODEL.vision, merge_size=2))
    flops = step_flops(model, layout)
    assert set(flops) == {"vision", "audio", "llm"}
    for phase, flop in flops.items():
        items = phase_work(phase, model, phase_lengths(layout, phase)).useful
        assert flop == pytest.approx(items.sum(), rel=1e-12)
    assert mfu(8 * 989e12, 2.0, 8, 989e12) == 0.5
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12 and peak_flops("cpu") is None
