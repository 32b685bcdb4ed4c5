"""What images and clips become in a model of transformers, by their sizes alone: as its image
processor resizes and cuts them, and as its audio tower says how many rows frames become. The
settings of its processor are enough; its tokenizer is not needed."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from transformers import (
    CONFIG_MAPPING,
    PROCESSOR_MAPPING,
    AutoFeatureExtractor,
    AutoImageProcessor,
)

from orchmllm.data.made import Made
from orchmllm.data.media.shapes import Shapes, Size, adapted, sized
from orchmllm.data.text.clips import FEWEST, fills_windows
from orchmllm.models.families import read_config
from orchmllm.models.whole_model import meta_model
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.plan.layout import GENERATOR

CURE = "run `orchmllm data index RECIPE` first, so that lengths are those of its own rows"


def _settings(folder: str, what: str, read: Callable[..., Any], **options: Any) -> Any:
    try:
        return read(folder, local_files_only=True, **options)
    except (OSError, ValueError, ImportError) as error:
        raise ValueError(
            f"{folder} has no settings of {what} that can be read (preprocessor_config.json): copy "
            f"them from the model, or {CURE}") from error


def _refusal(folder: str, model_type: str) -> ValueError:
    return ValueError(f"{folder}: sizes of media cannot be drawn for {model_type}, whose tokens "
                      f"its whole processor decides: {CURE}")


def _processor(config: Any) -> type:
    """The class of a model's processor; of an omni model that of the whole."""
    return PROCESSOR_MAPPING[CONFIG_MAPPING[config.model_type.removesuffix("_thinker")]]


class Pictures:
    """What the image processor of a folder makes of the size of an image, by the settings of
    preprocessor_config.json or processor_config.json alone: an image of an example by itself.
    Raises ValueError, saying what is missing."""

    def __init__(self, folder: str) -> None:
        config = read_config(Path(folder))
        vision = getattr(config, "vision_config", None)
        merges = [n for at in (vision, config) if (n := getattr(at, "spatial_merge_size", None))]
        merges += [round(1 / r) for r in [getattr(config, "downsample_ratio", None)] if r]
        if not merges or config.model_type == "mistral3":
            raise _refusal(folder, config.model_type)
        self._processor = adapted(_settings(folder, "an image processor", AutoImageProcessor
                                            .from_pretrained, backend="pil"), Shapes)
        self._options = getattr(_processor(config), "images_kwargs", {})
        self._merge = int(np.prod(merges))  # patches of the side of a token
        self._patch = int(np.max(vision.patch_size))

    def segment_lengths(self, width: int, height: int) -> SegmentLengths:
        """Of an image of so many pixels."""
        out = self._processor([sized(Size(height, width))], return_tensors="np", **self._options)
        if "image_grid_thw" in out:
            t, h, w = out["image_grid_thw"][0].tolist()
        else:
            t, _, high, wide = out["pixel_values"].shape
            h, w = high // self._patch, wide // self._patch
        tokens = t * (h // self._merge) * (w // self._merge)
        return SegmentLengths(t * h * w, t * h * w, tokens, (t, h, w))


class Clips:
    """What a clip becomes in the audio tower of a folder's model. rate: samples a second, and of a
    frame. Raises ValueError, saying what is missing."""

    def __init__(self, folder: str) -> None:
        config = read_config(Path(folder))
        extractor = _settings(folder, "a feature extractor", AutoFeatureExtractor.from_pretrained)
        # The whole model comes before its tower, which may be another's.
        asked = [found for module in meta_model(folder).modules() if (found := getattr(
            module, "_get_feat_extract_output_lengths", None))]
        if not asked:
            raise _refusal(folder, config.model_type)
        self._positions_and_tokens = asked[0]
        self.rate = extractor.sampling_rate, extractor.hop_length
        self._window = extractor.nb_max_frames if fills_windows(config) else 0
        longest = inspect.signature(_processor(config).__init__).parameters.get("max_audio_len")
        self._most_s = longest.default if longest else extractor.chunk_length

    def segment_lengths(self, frames: int) -> SegmentLengths:
        """Of a clip of so many frames. Raises ValueError for one that is too long, or too short for
        the model."""
        seconds = frames * self.rate[1] / self.rate[0]
        if seconds > self._most_s:
            raise ValueError(f"a clip of {seconds:.6g} s is too long: the model takes at most "
                             f"{self._most_s} s; cut it, or, where it was drawn, {CURE}")
        tokens = self._positions_and_tokens(frames)[-1]
        if tokens < FEWEST:
            raise ValueError(f"a clip of {seconds:.6g} s is too short: it has fewer than {FEWEST} "
                             "rows of features")
        if self._window:  # silence fills the last one
            frames = -(-frames // self._window) * self._window
        return SegmentLengths(frames, (frames + 1) // 2, tokens, (1, 1, frames))


def _made(folder: str) -> Made:
    """What images become that a folder's model makes. Raises ValueError for one that makes none."""
    given = getattr(read_config(Path(folder)), "generator_config", None)
    if given is None:
        raise ValueError(f"{folder}: the model makes no images, and examples have some to make")
    return Made("", given["token_id"], given["side"], given["max_pixels"])


@lru_cache(maxsize=4)
def of(folder: str, phase: str) -> Pictures | Clips | Made:
    """For the media of a phase. Raises ValueError, saying what is missing."""
    return {"vision": Pictures, "audio": Clips, GENERATOR: _made}[phase](folder)
