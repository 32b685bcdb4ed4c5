"""Examples made from their index alone: random lengths, media and labels, no files; and a tiny
model that they are for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX, ProcessedExample, joined
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, FsdpConfig, Recipe, RunConfig, TrainConfig
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.media_tensors import KINDS
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION, BatchLayout

VOCAB = 64
TOKENS = {VISION: 64, AUDIO: 65}  # of media, as the model's config.json has them
PATCH = 14  # pixels of its side
MODEL = ModelConfig(config=str(Path(__file__).parent / "model"))


def recipe(**changes) -> Recipe:
    """A float64 recipe of the tiny model; sections are replaced by keyword."""
    base = Recipe(
        run=RunConfig(dir="unused"), data=DataConfig(path="unused", prefetch=0), model=MODEL,
        train=TrainConfig(num_steps=1, batch_size=2), fsdp=FsdpConfig(param_dtype="float64"))
    return replace(base, **changes)


class _Reader:
    """What a feed asks of the reader of a dataset."""

    processor = SimpleNamespace(arithmetic=dict)  # nothing travels as bytes

    def __init__(self, dataset: SyntheticDataset) -> None:
        self.blank = dataset.blank
        self.image_row_bytes = lambda raw: 4 * dataset.patch_values


@dataclass
class SyntheticDataset:
    """Example i has the modalities of kinds[i % len(kinds)], a string of T, V and A segments in
    reading order; `unlabelled` examples have no target. max_side: of images, in pixels; num_mels:
    of clips."""

    kinds: Sequence[str] = ("TVT", "TAT", "T", "TVTAT", "VVT", "AT", "TT", "TVAVT")
    size: int = 24
    unlabelled: frozenset[int] = frozenset()
    max_side: int = 112
    num_mels: int = 8
    patch_values = 3 * PATCH**2

    def __len__(self) -> int:
        return self.size

    @property
    def reader(self) -> _Reader:
        return _Reader(self)

    def split(self, num_validation: int) -> tuple[range, range]:
        return range(self.size - num_validation), range(self.size - num_validation, self.size)

    def fingerprint(self) -> dict:
        return {"rows": self.size}

    def _segments(self, i: int):
        rng = np.random.default_rng([7, i])
        for kind in self.kinds[i % len(self.kinds)]:
            if kind == "V":
                yield VISION, _image(*rng.integers(20, 200, 2).tolist(), self.max_side)
            elif kind == "A":
                yield AUDIO, _frames(int(rng.integers(1000, 12000)))
            else:
                yield TEXT, text_lengths(int(rng.integers(1, 30)))

    def describe(self, i: int, segment: int) -> dict:
        return {"source": "synthetic", "row": i + 1, "data_file": "synthetic", "file": f"{i}"}

    def name(self, i: int) -> str:
        return f"synthetic, row {i + 1}"

    def layout(self, i: int) -> BatchLayout:
        targets = int((self._text(i)[1][1:] != IGNORE_INDEX).sum())
        return BatchLayout.from_segments(i, targets, list(self._segments(i)))

    def load(self, i: int, *, text: bool = True, segments: Collection[int] | None = None,
             encoded: Collection[int] = (), raw: Collection[str] = (),
             row: MeasuredExample | None = None, on_error=None) -> ProcessedExample:
        """See orchmllm.data.processed.ProcessedReader.load."""
        layout = self.layout(i)
        at = np.flatnonzero(layout.modality != TEXT).tolist()
        parts: dict[int, Any] = {k: self._medium(i, k, layout) for k in at if k not in encoded and (
            segments is None or k in segments)}
        media = self._of_example(layout)
        if segments is None:
            for kind in (KINDS[VISION], KINDS[AUDIO]):
                if held := [p[kind.content] for p in parts.values() if kind.content in p]:
                    media[kind.content] = joined(held, 0)
            parts = {}
        parts |= {k: MeasuredExample(layout, None, None, [], None) for k in encoded}
        ids, labels = self._text(i) if text else (None, None)
        return ProcessedExample(i, ids, labels, media, layout, parts, {
            k: KINDS[m].content for k in at if (m := int(layout.modality[k])) in KINDS})

    def blank(self, modality: int) -> dict[str, Tensor]:
        """The tensors of a small black image or a silent clip."""
        if modality == VISION:
            return {"pixel_values": torch.zeros(16, self.patch_values),
                    "image_grid_thw": torch.tensor([[1, 4, 4]])}
        return _clip(torch.zeros(1, self.num_mels, 8))

    def _text(self, i: int) -> tuple[Tensor, Tensor]:
        """Ids and labels (n,), of which the latter are learnt in about 7 of 10 places of text."""
        rng = np.random.default_rng([13, i])
        ids = np.concatenate([
            np.full(n.num_tokens, TOKENS[modality]) if modality != TEXT
            else rng.integers(1, VOCAB, n.num_tokens) for modality, n in self._segments(i)])
        lost = (ids >= VOCAB) | (rng.random(len(ids)) < 0.3) | (i in self.unlabelled)
        return torch.from_numpy(ids), torch.from_numpy(np.where(lost, IGNORE_INDEX, ids))

    @staticmethod
    def _of_example(layout: BatchLayout) -> dict[str, Tensor]:
        """What says how the media of an example divide."""
        of = {m: np.flatnonzero(layout.modality == m) for m in (VISION, AUDIO)}
        out = {}
        if len(of[VISION]):
            out["image_grid_thw"] = torch.from_numpy(layout.grid[of[VISION]])
        if len(of[AUDIO]):
            frames = layout.rows[of[AUDIO]]
            inside = np.arange(frames.max()) < frames[:, None]
            out["feature_attention_mask"] = torch.from_numpy(inside.astype(np.int32))
        return out

    def _medium(self, i: int, k: int, layout: BatchLayout) -> dict[str, Tensor]:
        rng, rows = np.random.default_rng([11, i, k]), int(layout.rows[k])
        if layout.modality[k] == VISION:
            pixels = rng.integers(0, 256, (rows, self.patch_values)) / 127.5 - 1
            return {"pixel_values": torch.from_numpy(pixels.astype(np.float32)),
                    "image_grid_thw": torch.from_numpy(layout.grid[k: k + 1])}
        frames = rng.standard_normal((1, self.num_mels, rows), dtype=np.float32)
        return _clip(torch.from_numpy(frames))


def _image(width: int, height: int, max_side: int) -> SegmentLengths:
    """Of an image of so many pixels that is made smaller where a side is above max_side; 2 x 2
    patches become a token."""
    unit = 2 * PATCH
    scale = min(1.0, max_side / max(width, height))
    w, h = (2 * min(max(1, max_side // unit), max(1, int(side * scale / unit + 0.5)))
            for side in (width, height))
    return SegmentLengths(h * w, h * w, h * w // 4, (1, h, w))


def _frames(samples: int) -> SegmentLengths:
    """Of a clip of 16 kHz: 160 samples are a frame, two frames a position, two positions a token.
    """
    frames = -(-samples // 160)
    positions = (frames + 1) // 2
    return SegmentLengths(frames, positions, -(-positions // 2), (1, 1, frames))


def _clip(frames: Tensor) -> dict[str, Tensor]:
    return {"input_features": frames,
            "feature_attention_mask": torch.ones(1, frames.shape[2], dtype=torch.int32)}
