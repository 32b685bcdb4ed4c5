"""Predictions for a whole model of transformers, without weights or pixels: its parameters, and
what its image processor makes of the size of an image."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from transformers import PROCESSOR_MAPPING, AutoImageProcessor

from orchmllm.config.model import ModelConfig
from orchmllm.data.media.shapes import Shapes, Size, adapted, sized
from orchmllm.models.families import read_config
from orchmllm.models.hf import meta_model
from orchmllm.plan.geometry import SegmentLengths


def parameters(model: ModelConfig) -> dict[str, int]:
    """Part of the model -> its parameters."""
    whole, counts = meta_model(model.folder), {}
    layers = {id(p) for stack in whole.blocks().values() for p in stack.parameters()}
    rest = {"vision": "vision front", "audio": "audio front", "llm": "llm embedding and head",
            "connector": "connector"}
    for name, p in whole.hf.named_parameters():
        part = whole.part_of(name)
        place = f"{part} layers" if id(p) in layers else rest[part]
        counts[place] = counts.get(place, 0) + p.numel()
    return counts


class Pictures:
    """What the image processor of a folder makes of the size of an image, by the settings of
    preprocessor_config.json or processor_config.json alone: an image of an example by itself.
    Raises ValueError, saying what is missing."""

    def __init__(self, folder: str) -> None:
        config = read_config(Path(folder))
        merge = getattr(getattr(config, "vision_config", None), "spatial_merge_size", None)
        ratio = getattr(config, "downsample_ratio", None)
        cure = "run `orchmllm data index RECIPE` first, so that lengths are those of its own rows"
        if hasattr(config, "audio_config") or merge is None and ratio is None or (
                config.model_type == "mistral3"):
            raise ValueError(f"{folder}: sizes of media cannot be drawn for {config.model_type}, "
                             f"whose tokens its whole processor decides: {cure}")
        try:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil",
                                                           local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"{folder} has no settings of an image processor that can be read "
                f"(preprocessor_config.json), which say how many patches an image has: copy them "
                f"from the model, or {cure}") from error
        self._processor = adapted(processor, Shapes)
        self._options = getattr(PROCESSOR_MAPPING[type(config)], "images_kwargs", {})
        self._patches = merge**2 if merge else round(1 / ratio**2)  # of a token
        self._patch = int(np.max(config.vision_config.patch_size))
        self.segment_lengths = lru_cache(maxsize=100_000)(self._segment_lengths)

    def _segment_lengths(self, width: int, height: int) -> SegmentLengths:
        """Of an image of so many pixels."""
        out = self._processor([sized(Size(height, width))], return_tensors="np", **self._options)
        if "image_grid_thw" in out:
            t, h, w = out["image_grid_thw"][0].tolist()
        else:
            tiles, _, high, wide = out["pixel_values"].shape
            t, h, w = tiles, high // self._patch, wide // self._patch
        return SegmentLengths(t * h * w, t * h * w, t * h * w // self._patches, (t, h, w))


pictures = lru_cache(maxsize=4)(Pictures)


def geometry(model: ModelConfig, phase: str) -> Pictures:
    """Raises ValueError for clips."""
    if phase != "vision":
        raise ValueError(f"{model.folder}: lengths of clips are only those of its own rows: run "
                         "`orchmllm data index RECIPE`, or leave audio_s out")
    return pictures(model.folder)
