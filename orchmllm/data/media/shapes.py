"""Processors of transformers that are told the sizes of images and clips and read no pixels and
samples, or only those of some: which shapes their results have is decided by their own code."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import NamedTuple

import numpy as np
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers import image_processing_backends as backends
from transformers.image_processing_backends import PilBackend

from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Sampled
from orchmllm.plan.layout import AUDIO, VISION


class Size(NamedTuple):
    """Of an image or a video in pixels as displayed; of a clip 0 and its samples, at the rate of
    the processor. sampled: the frames of a video."""

    height: int
    width: int
    sampled: Sampled | None = None


# A medium as a processor is given it: an image, which may be an array (height, width, 3); a clip
# (n,); or the size of a video, whose pixels are made by themselves.
Content = Image.Image | np.ndarray | Size


def kind_of(content: Content) -> int:
    """VISION, VIDEO or AUDIO; of any size, too."""
    if isinstance(content, Size):
        return VIDEO if content.sampled else VISION if content.height else AUDIO
    return AUDIO if getattr(content, "ndim", 0) == 1 else VISION


def blank(size: Size) -> Content:
    """A black image, a silent clip, or a video."""
    kind = kind_of(size)
    if kind == VISION:
        return Image.new("RGB", (size.width, size.height))
    return np.zeros(size.width, np.float32) if kind == AUDIO else size


def sized(size: Size) -> Content:
    """The same without memory: an array for an image, and a clip of samples that are not known,
    NaN."""
    kind = kind_of(size)
    if kind == VISION:
        return np.broadcast_to(np.zeros((), np.uint8), (size.height, size.width, 3))
    return np.broadcast_to(np.float32(np.nan), size.width) if kind == AUDIO else size


def _resized(image: np.ndarray, size: tuple[int, int], **options) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.uint8), (len(image), *size))


class Shapes(PilBackend):
    """What the steps that read pixels do to shapes, of images as `sized` makes them. Images are
    (3, H, W) uint8."""

    def process_image(self, image: np.ndarray, *args, **options) -> np.ndarray:
        return np.moveaxis(image, -1, 0)

    # PilBackend's own choice of the size, with another function that resizes.
    resize = FunctionType(PilBackend.resize.__code__, {**vars(backends), "np_resize": _resized},
                          "resize", PilBackend.resize.__defaults__)

    def center_crop(self, image: np.ndarray, size, **options) -> np.ndarray:
        return _resized(image, (size.height, size.width))

    def rescale(self, image: np.ndarray, scale: float, **options) -> np.ndarray:
        return image

    def normalize(self, image: np.ndarray, mean, std, **options) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.float32), image.shape)


class Some(Shapes):
    """Steps that read the pixels of an image, unless `sized` made it: of such an image they compute
    the shape alone, as Shapes does."""


def _step(name: str) -> FunctionType:
    def run(self, image, *args, **options):
        made_up = isinstance(image, np.ndarray) and not any(image.strides)
        return getattr(Shapes if made_up else PilBackend, name)(self, image, *args, **options)

    return run


for _name in ("process_image", "resize", "center_crop", "rescale", "normalize"):
    setattr(Some, _name, _step(_name))


def adapted(image_processor: PilBackend, steps: type[Shapes]) -> PilBackend:
    """A copy of an image processor. In the order of classes, `steps` stands between the class of a
    family, whose decisions stay its own, and PilBackend."""
    out = copy.copy(image_processor)
    family = type(image_processor)
    out.__class__ = type(family.__name__, (family, steps), {})
    return out


class _Heard(WhisperFeatureExtractor):
    """One clip after the other, so that what becomes of a clip does not depend on the others."""

    def _torch_extract_fbank_features(self, waveform: np.ndarray, device: str = "cpu"
                                      ) -> np.ndarray:
        count, samples = waveform.shape
        out = np.zeros((count, self.feature_size, samples // self.hop_length), np.float32)
        for k in np.flatnonzero(~np.isnan(waveform[:, 0])):
            out[k] = super()._torch_extract_fbank_features(waveform[k], device)
        return out


def of_clips(extractor: WhisperFeatureExtractor) -> WhisperFeatureExtractor:
    """A copy of the part for clips that also takes what `sized` gives, of which it makes zeros of
    the shape that a clip of this length has."""
    out = copy.copy(extractor)
    out.__class__ = _Heard
    return out
