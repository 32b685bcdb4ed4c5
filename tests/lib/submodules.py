"""The small submodules whose properties the tests of models check, and rows for them."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from orchmllm.batch import SequenceLengths
from orchmllm.config.model import AudioConfig, LLMConfig, VisionConfig
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.llm import PackedQwen2
from orchmllm.models.vision import VisionEncoder

VISION = VisionConfig(num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, patch_size=4)
AUDIO = AudioConfig(
    num_layers=2, hidden_size=32, intermediate_size=64, num_heads=2, num_mels=8, stack=3
)
LLM = LLMConfig(vocab_size=97, num_layers=2, hidden_size=32, intermediate_size=48)
OUT = 24
RELATIVE = {torch.float64: 1e-10, torch.float32: 1e-5}
MODULES = ("vision", "audio", "llm")

# Three sequences per module: (grid t, h, w), mel frames (odd and shorter than a stack), tokens.
GRIDS = np.array([[1, 4, 6], [1, 2, 2], [1, 2, 8]])
FRAMES = np.array([13, 1, 6])
TOKENS = np.array([7, 1, 5])


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    if name == "llm":
        return PackedQwen2(LLM).to(dtype)
    if name == "audio":
        return AudioEncoder(AUDIO, OUT).to(dtype)
    return VisionEncoder(VISION, OUT).to(dtype)


def rows_of(name: str, sequences: list[int]) -> np.ndarray:
    return {"audio": FRAMES, "llm": TOKENS}.get(name, GRIDS.prod(axis=1))[sequences]


def inputs(name: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of the three sequences, floating point for all modules."""
    width = {"audio": AUDIO.num_mels, "llm": LLM.hidden_size}.get(name, VISION.geometry.row_size)
    generator = torch.Generator().manual_seed(1)
    rows = int(rows_of(name, [0, 1, 2]).sum())
    return torch.randn(rows, width, generator=generator, dtype=torch.float64).to(dtype)


def positions(lengths: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, np.int64), *map(np.arange, lengths)]))


def logits(llm: PackedQwen2, x: torch.Tensor, position_ids: torch.Tensor,
           seqlens: SequenceLengths) -> torch.Tensor:
    return F.linear(llm.hidden(x, position_ids, seqlens), llm.lm_head.weight)


def run(name: str, module: nn.Module, x: torch.Tensor, sequences: list[int]) -> torch.Tensor:
    """Features of the encoders, logits of the LLM, for rows x of these sequences."""
    lengths = rows_of(name, sequences)
    seqlens = SequenceLengths.from_lengths(lengths)
    if name == "vision":
        return module(x, GRIDS[sequences], seqlens)
    if name == "audio":
        return module(x, seqlens)
    return logits(module, x, positions(lengths), seqlens)


def loss_of(name: str, module: nn.Module, x: torch.Tensor, sequences: list[int]) -> torch.Tensor:
    """A scalar through everything; 0 for no rows."""
    if name != "llm":
        return run(name, module, x, sequences).float().square().sum()
    lengths = rows_of(name, sequences)
    labels = torch.arange(lengths.sum()) % LLM.vocab_size
    seqlens = SequenceLengths.from_lengths(lengths)
    return module(x, positions(lengths), seqlens, labels.int())


def out_rows(name: str) -> list[int]:
    if name == "vision":
        return [int(n) // VISION.merge_size**2 for n in GRIDS.prod(axis=1)]
    if name == "audio":
        return [-(-((n + 1) // 2) // AUDIO.stack) for n in FRAMES.tolist()]
    return TOKENS.tolist()


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(((a - b).abs().max() / b.abs().max()).detach())
