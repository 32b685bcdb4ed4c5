"""Videos for models of transformers that have tokens for them: what becomes of the frames that were
read is decided by the video processor of the model, and Pillow resizes them. Each item of the
encoder is made by itself, so that a rank reads those that it encodes.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.video_processing_utils import BaseVideoProcessor

from orchmllm.data.formats.conversation import Conversation, media_of
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.media.raw import (
    AS_BYTES,
    NOTHING,
    Arithmetic,
    sample_images,
    table_of,
    with_bytes,
)
from orchmllm.data.media.shapes import Size
from orchmllm.data.media_tensors import VIDEOS

# Class of a processor, which several families share -> folder and name of the class that cuts its
# videos. Attention of these encoders stays inside the frames that are merged in time, so each such
# slice of a video is an item of its own.
PROCESSORS = {"Qwen2VLProcessor": ("qwen2_vl", "Qwen2VLVideoProcessor"),
              "Qwen2_5_VLProcessor": ("qwen2_vl", "Qwen2VLVideoProcessor"),
              "Qwen3VLProcessor": ("qwen3_vl", "Qwen3VLVideoProcessor")}
_GIVEN = {"do_sample_frames": False, "input_data_format": "channels_first"}
_TORCHVISION = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2",
                "torchvision.transforms.v2.functional")


class _Steps(BaseVideoProcessor):
    """The steps that need torchvision. In the order of classes it stands between the class of a
    family, whose decisions stay its own, and BaseVideoProcessor. Videos are (batch, n, 3, H, W);
    they are resized on the meta device alone."""

    def convert_to_rgb(self, video: Tensor) -> Tensor:
        return video

    def resize(self, image: Tensor, size: Any, **_: Any) -> Tensor:
        return image.new_empty((*image.shape[:-2], size.height, size.width))

    def normalize(self, image: Tensor, mean: Any, std: Any, **_: Any) -> Tensor:
        mean, std = (torch.as_tensor(value, device=image.device)[:, None, None]
                     for value in (mean, std))
        return (image - mean) / std


@lru_cache
def _class_of(processor: str) -> type[BaseVideoProcessor]:
    folder, name = PROCESSORS[processor]
    # transformers imports some of them with torchvision alone, of which nothing is used here.
    missing = () if importlib.util.find_spec("torchvision") else _TORCHVISION
    sys.modules.update({module: ModuleType(module) for module in missing})
    try:
        module = importlib.import_module(f"transformers.models.{folder}.video_processing_{folder}")
    finally:
        for stand_in in missing:
            del sys.modules[stand_in]
    return type(name, (getattr(module, name), _Steps), {})


class Videos:
    """The part for videos of a processor of the class `of`. processor: None where the folder has no
    settings for it that can be read. merged: frames that become one item of the vision encoder; the
    last is repeated where some are missing."""

    def __init__(self, folder: Path, of: str) -> None:
        self.folder, self.merged, self._problem = folder, 1, ""
        try:
            self.processor = _class_of(of).from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, TypeError) as error:
            self.processor, self._problem = None, " ".join(str(error).split())
            return
        self.merged = self.processor.temporal_patch_size
        if self.processor.cap_pixels_per_frame is None:
            self.processor.cap_pixels_per_frame = False  # as it does, with a warning

    def check(self, is_written: bool) -> None:
        """is_written: whether the chat template has a placeholder for a video. Raises RowError
        where the model cannot be given one."""
        if self.processor is None:
            raise RowError(f"{self.folder} has no settings for videos: copy the "
                           "video_preprocessor_config.json of the model into it "
                           f"({self._problem:.200})")
        if not is_written:
            raise RowError(f"the chat template of {self.folder} writes no token for a video: put "
                           "that of a version with videos into it")

    @property
    def identity(self) -> list:
        return [] if self.processor is None else [self.processor.to_dict()]

    def arguments(self, sizes: Sequence[Size], options: Mapping[str, Any]) -> dict[str, Any]:
        """What the whole processor is called with for videos of these sizes."""
        if not sizes:
            return {}
        videos, metadata = [], []
        for height, width, sampled in sizes:
            # Some processors refuse less frames than they merge.
            missing = max(0, self.merged - len(sampled.seconds))
            seconds = [*sampled.seconds, *sampled.seconds[-1:] * missing]
            videos.append(torch.empty(len(seconds), 3, height, width, dtype=torch.uint8,
                                      device="meta"))
            # With the second as the unit: what is written for a frame is when it was read, and not
            # its number by a mean rate.
            metadata.append({"fps": 1.0, "total_num_frames": sampled.length_s,
                             "frames_indices": seconds})
        return {"videos": videos, "videos_kwargs": {**_GIVEN, **options,
                                                    "video_metadata": metadata}}

    def pixels(self, frames: Sequence[Image.Image], h: int, w: int,
               options: Mapping[str, Any] = NOTHING) -> Tensor:
        """(h * w, values) float32: what the encoder reads of an item, which has h x w patches.
        options: of the call of the processor."""
        size = w * self.processor.patch_size, h * self.processor.patch_size
        video = torch.from_numpy(np.stack([
            np.asarray(frame.resize(size, self.processor.resample)) for frame in frames]))
        return self.processor([video.permute(0, 3, 1, 2)], **_GIVEN, do_resize=False, **options,
                              return_tensors="pt")[VIDEOS]

    def arithmetic(self) -> Arithmetic:
        """Of the pixels of frames."""
        one = self.processor

        def made(image: np.ndarray) -> Tensor:
            return one.rescale_and_normalize(
                torch.from_numpy(image)[None, None], one.do_rescale, one.rescale_factor,
                one.do_normalize, one.image_mean, one.image_std)

        def samples() -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
            side = 2 * one.merge_size
            grid = {"video_grid_thw": torch.tensor([[1, side, side]])}
            for images in sample_images():
                for frames in (*([image] * self.merged for image in images),
                               [*images, *images][-self.merged:]):
                    bare, full = ({**grid, VIDEOS: self.pixels(frames, side, side, options)}
                                  for options in (AS_BYTES, NOTHING))
                    yield with_bytes(bare, {VIDEOS}, one.patch_size), full

        return Arithmetic(table_of(made), self.merged, samples())

    @staticmethod
    def grids(out: Mapping[str, Any]) -> Iterator[tuple[tuple[int, int, int], ...]]:
        """Of each video (1, h, w) for each of its items. out: the processor's tensors."""
        for t, h, w in np.asarray(out.get("video_grid_thw", ())).tolist():
            yield ((1, h, w),) * t


def items_of(turns: Conversation, videos: Videos | None) -> list[list[list[Medium]]]:
    """Of each medium of a conversation the items of the encoder that it becomes, each of them an
    image, a clip, or frames of a video. videos: of the model; None: it takes each frame as an
    image."""
    if videos is None:
        return [[[medium._replace(sampled=None)]] for medium in media_of(turns)]
    out: list[list[list[Medium]]] = []
    for medium in media_of(turns):
        number = 0 if medium.sampled is None else medium.sampled.number
        if number % videos.merged:
            out[-1][-1].append(medium)
        elif number:
            out[-1].append([medium])
        else:
            out.append([[medium]])
    return out


def with_videos(turns: Conversation) -> Conversation:
    """With one medium for each video: its first frame, as VIDEO."""
    def shown(part: str | Medium) -> list[str | Medium]:
        if isinstance(part, str) or part.sampled is None:
            return [part]
        return [] if part.sampled.number else [part._replace(modality=VIDEO)]

    return tuple(turn._replace(parts=tuple(p for part in turn.parts for p in shown(part)))
                 for turn in turns)
