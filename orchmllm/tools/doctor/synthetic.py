"""Examples made from their index alone: random lengths, rows and labels, no files."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from orchmllm.batch import IGNORE_INDEX, Example
from orchmllm.config.model import AudioConfig, LLMConfig, ModelConfig, VisionConfig
from orchmllm.config.recipe import DataConfig, FsdpConfig, Recipe, RunConfig, TrainConfig
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout

VOCAB = 64
MODEL = ModelConfig(
    vision=VisionConfig(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2,
                        max_side=112),
    audio=AudioConfig(num_layers=2, hidden_size=16, intermediate_size=32, num_heads=2,
                      num_mels=8),
    llm=LLMConfig(vocab_size=VOCAB, num_layers=2, hidden_size=32, intermediate_size=48,
                  num_heads=4, num_kv_heads=2),
)


def recipe(**changes) -> Recipe:
    """A float64 recipe of the tiny model; sections are replaced by keyword."""
    base = Recipe(
        run=RunConfig(dir="unused"), data=DataConfig(path="unused", prefetch=0), model=MODEL,
        train=TrainConfig(num_steps=1, batch_size=2), fsdp=FsdpConfig(param_dtype="float64"))
    return replace(base, **changes)


@dataclass
class SyntheticDataset:
    """Example i has the modalities of kinds[i % len(kinds)], a string of T, V and A segments in
    reading order; `unlabelled` examples have no target."""

    kinds: Sequence[str] = ("TVT", "TAT", "T", "TVTAT", "VVT", "AT", "TT", "TVAVT")
    size: int = 24
    unlabelled: frozenset[int] = frozenset()
    vision: VisionGeometry = field(default_factory=lambda: MODEL.vision.geometry)
    audio: AudioGeometry = field(default_factory=lambda: MODEL.audio.geometry)

    def __len__(self) -> int:
        return self.size

    def split(self, num_validation: int) -> tuple[range, range]:
        return range(self.size - num_validation), range(self.size - num_validation, self.size)

    def fingerprint(self) -> dict:
        return {"rows": self.size}

    def _segments(self, i: int):
        rng = np.random.default_rng([7, i])
        for kind in self.kinds[i % len(self.kinds)]:
            if kind == "V":
                yield VISION, self.vision.segment_lengths(*rng.integers(20, 200, 2).tolist())
            elif kind == "A":
                samples = int(rng.integers(1000, 12000))
                yield AUDIO, self.audio.segment_lengths(samples, 16000)
            else:
                yield TEXT, text_lengths(int(rng.integers(1, 30)))

    def describe(self, i: int, segment: int) -> dict:
        return {"source": "synthetic", "row": i + 1, "data_file": "synthetic", "file": f"{i}"}

    def name(self, i: int) -> str:
        return f"synthetic, row {i + 1}"

    def layout(self, i: int) -> BatchLayout:
        targets = int((self.load(i, segments=()).labels != IGNORE_INDEX).sum())
        return BatchLayout.from_segments(i, targets, list(self._segments(i)))

    def load(self, i: int, *, text: bool = True, segments: Sequence[int] | None = None,
             encoded: Sequence[int] = (), on_error=None) -> Example:
        parts = list(self._segments(i))
        media = {}
        for k, (modality, lengths) in enumerate(parts):
            if modality == TEXT or (segments is not None and k not in segments):
                continue
            if k in encoded:
                media[k] = torch.frombuffer(bytearray(self.read(i, k)), dtype=torch.uint8)
                continue
            rng = np.random.default_rng([11, i, k])
            media[k] = torch.from_numpy(
                rng.integers(0, 256, (lengths.rows, self.vision.row_size), dtype=np.uint8)
                if modality == VISION
                else rng.standard_normal((lengths.rows, self.audio.row_size), dtype=np.float32))
        if not text:
            return Example(i, None, None, media)
        rng = np.random.default_rng([13, i])
        n = sum(lengths.num_tokens for _, lengths in parts)
        token_ids = torch.from_numpy(rng.integers(1, VOCAB, n).astype(np.int32))
        is_text = np.concatenate(
            [np.full(lengths.num_tokens, m == TEXT) for m, lengths in parts])
        labels = rng.integers(1, VOCAB, n).astype(np.int32)
        labels[~is_text | (rng.random(n) < 0.3) | (i in self.unlabelled)] = IGNORE_INDEX
        return Example(i, torch.where(torch.from_numpy(is_text), token_ids, 0),
                       torch.from_numpy(labels), media)

    def read(self, i: int, segment: int, *, on_error=None) -> bytes:
        """A medium as it would be stored: compressed rows."""
        rows = self.load(i, text=False, segments=[segment]).media[segment]
        return zlib.compress(rows.numpy().tobytes(), 1)

    def decode(self, modality: int, data: bytes, rows: int, *, segment: int,
               on_error=None) -> torch.Tensor:
        dtype, size = ((torch.uint8, self.vision.row_size) if modality == VISION
                       else (torch.float32, self.audio.row_size))
        out = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=dtype)
        return out.reshape(rows, size)
