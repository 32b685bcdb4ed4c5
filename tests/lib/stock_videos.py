"""The processors of transformers with their part for videos as it is, where torchvision is not
installed: the functions of it that they call are those of torch here."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import image_processing_backends as backends
from transformers import video_processing_utils as videos

from orchmllm.data.media.video_processor import PROCESSORS
from orchmllm.data.text.model_folder import load_processor


def _resize(image: Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> Tensor:
    frames = F.interpolate(image.flatten(0, -4).float(), size, mode=interpolation,
                           antialias=antialias)
    return frames.round().clamp(0, 255).to(image.dtype).reshape(*image.shape[:-2], *size)


def _normalize(image: Tensor, mean: Tensor, std: Tensor, inplace: bool) -> Tensor:
    return (image - mean[:, None, None]) / std[:, None, None]


_FUNCTIONS = SimpleNamespace(
    resize=_resize, normalize=_normalize, grayscale_to_rgb=lambda video: video,
    InterpolationMode=SimpleNamespace(BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos"))


@contextmanager
def stock_processor(folder: Path) -> Iterator[Any]:
    """That of a folder; it can be called with videos within the context."""
    processor, _ = load_processor(folder)
    name, kind = PROCESSORS[type(processor).__name__]
    from orchmllm.data.media.video_processor import _class_of

    _class_of(type(processor).__name__)  # imports the module, which asks for torchvision
    module = importlib.import_module(f"transformers.models.{name}.video_processing_{name}")
    processor.video_processor = getattr(module, kind).from_pretrained(folder)
    modes = {2: "bilinear", 3: "bicubic"}
    with (mock.patch.object(backends, "tvF", _FUNCTIONS, create=True),
          mock.patch.object(videos, "tvF", _FUNCTIONS, create=True),
          mock.patch.object(backends, "pil_torch_interpolation_mapping", modes)):
        yield processor


def called(processor: Any, text: str, images: list, frames: list[Tensor], seconds: list[list],
           lengths_s: list[float]) -> dict[str, Tensor]:
    """What a stock processor makes of one text. frames: (n, 3, H, W) uint8 of each video; seconds,
    lengths_s: when they were read, and how long each video is."""
    given = {} if not frames else {"videos": frames, "videos_kwargs": {
        "do_sample_frames": False, "video_metadata": [
            {"fps": 1.0, "frames_indices": list(s), "total_num_frames": length}
            for s, length in zip(seconds, lengths_s, strict=True)]}}
    out = processor(text=[text], images=[images] if images else None, return_tensors="pt", **given)
    return {k: torch.as_tensor(v) for k, v in out.items() if k != "attention_mask"}
