"""Predictions for a whole model of transformers, without weights, pixels or samples: its parts and
parameters, and what media of given sizes become in it. Of a known model and known sizes it was kept,
so that no torch is imported."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchmllm.config.model import ModelConfig
from orchmllm.counts.kept import kept, kept_each
from orchmllm.models.shapes import description, placed
from orchmllm.plan.geometry import AudioGeometry, SegmentLengths
from orchmllm.plan.layout import ENCODERS

if TYPE_CHECKING:
    from orchmllm.tools.predict.media import Clips, Pictures

SETTINGS = ("preprocessor_config.json", "processor_config.json")


def absent(model: ModelConfig) -> frozenset[str]:
    """Encoder phases that the model has not."""
    return frozenset(ENCODERS.keys() - {p.part for p in placed(model.folder)})


def parameters(model: ModelConfig) -> dict[str, int]:
    """Part of the model -> its parameters."""
    counts: Counter[str] = Counter()
    rest = {"vision": "vision front", "audio": "audio front", "llm": "llm embedding and head",
            "connector": "connector"}
    for p in placed(model.folder):
        counts[f"{p.part} layers" if p.role == "block" else rest[p.part]] += math.prod(p.shape)
    return dict(counts)


def geometry(model: ModelConfig, phase: str, sizes: Sequence[tuple[int, int]]
             ) -> list[SegmentLengths]:
    """What media of an encoder phase become, each by itself in an example. sizes: width and height
    in pixels, or samples and their rate. Raises ValueError, saying what is missing in the
    folder."""
    def opened() -> Pictures | Clips:
        from orchmllm.tools.predict import media  # with torch

        return media.of(model.folder, phase)

    def count(asked: Sequence[str]) -> list[SegmentLengths]:
        lengths_of = opened().segment_lengths
        return [lengths_of(*map(int, size.split())) for size in asked]

    paths = [Path(model.folder, name) for name in SETTINGS]
    key = [phase, description(model.folder),
           *(path.read_text(encoding="utf-8") if path.is_file() else "" for path in paths)]
    if phase == "audio":  # hardly two clips have as many samples, and many as many frames
        rate = AudioGeometry(*kept(["rate", *key], lambda: opened().rate))
        sizes = [(-(-rate.resampled(*size) // rate.hop_length),) for size in sizes]
    found = kept_each(key, [" ".join(map(str, size)) for size in sizes], count)
    return [SegmentLengths(*lengths[:3], tuple(lengths[3])) for lengths in found]
