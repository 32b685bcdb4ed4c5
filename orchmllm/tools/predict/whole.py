"""Predictions for a whole model of transformers, without weights, pixels or samples: its parts and
parameters, and what media of given sizes become in it. What is kept of a known model and of known
sizes is read without torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orchmllm.config.model import ModelConfig
from orchmllm.counts.kept import kept, kept_each
from orchmllm.models.shapes import description, placed
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import ENCODERS

if TYPE_CHECKING:
    from orchmllm.data.made import Made
    from orchmllm.tools.predict.media import Clips, Pictures

SETTINGS = ("preprocessor_config.json", "processor_config.json")


def parts(model: ModelConfig) -> frozenset[str]:
    """What the model is made of: its phases, and `connector`."""
    return frozenset(p.part for p in placed(model.folder))


def absent(model: ModelConfig) -> frozenset[str]:
    """Encoder phases that the model has not."""
    return frozenset(ENCODERS.keys() - parts(model))


def parameters(model: ModelConfig) -> dict[str, int]:
    """Part of the model -> its parameters."""
    counts: Counter[str] = Counter()
    rest = {"vision": "vision front", "audio": "audio front", "llm": "llm embedding and head",
            "connector": "connector", "generator": "generator front"}
    for p in placed(model.folder):
        counts[f"{p.part} layers" if p.role == "block" else rest[p.part]] += math.prod(p.shape)
    return dict(counts)


def geometry(model: ModelConfig, phase: str, sizes: np.ndarray) -> np.ndarray:
    """(n, 6) int64: rows, positions, tokens and grid of media of a phase, each by itself in an
    example. sizes (n, 2) int64: width and height in pixels, or samples and their rate. Raises
    ValueError, saying what is missing in the folder."""
    def opened() -> Pictures | Clips | Made:
        from orchmllm.tools.predict import media  # with torch

        return media.of(model.folder, phase)

    def count(asked: Sequence[str]) -> list[list[int]]:
        found = (opened().segment_lengths(*map(int, size.split())) for size in asked)
        return [[*map(int, (*lengths[:3], *lengths.grid))] for lengths in found]

    paths = [Path(model.folder, name) for name in SETTINGS]
    key = [phase, description(model.folder),
           *(path.read_text(encoding="utf-8") if path.is_file() else "" for path in paths)]
    if phase == "audio":  # hardly two clips have as many samples, and many as many frames
        rate = AudioGeometry(*kept(["rate", *key], lambda: opened().rate))
        sizes = -(-rate.resampled(*sizes.T) // rate.hop_length)[:, None]
    distinct, which = distinct_rows(sizes)
    asked = [" ".join(map(str, size)) for size in distinct.tolist()]
    return np.array(kept_each(key, asked, count), np.int64).reshape(-1, 6)[which]


def distinct_rows(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(Distinct rows of (n, 1 or 2) numbers from 0 to 2**31 - 1, which of them each row is), as
    numpy's unique finds it, but by one number a row."""
    joined = table[:, 0] << 31 | table[:, -1]
    _, first, which = np.unique(joined, return_index=True, return_inverse=True)
    return table[first], which
