"""Image processors of transformers that are told the sizes of images and read no pixels, or only
those of some: which shapes their results have is decided by their own code."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import NamedTuple

import numpy as np
from PIL import Image
from transformers import image_processing_backends as backends
from transformers.image_processing_backends import PilBackend

from orchmllm.data.media.medium import Sampled


class Size(NamedTuple):
    """Of an image or a video in pixels as displayed. sampled: the frames of a video."""

    height: int
    width: int
    sampled: Sampled | None = None


def black(size: Size) -> Image.Image:
    return Image.new("RGB", (size.width, size.height))


def sized(height: int, width: int) -> np.ndarray:
    """(height, width, 3) uint8: an image of this size that takes no memory."""
    return np.broadcast_to(np.zeros((), np.uint8), (height, width, 3))


def _resized(image: np.ndarray, size: tuple[int, int], **options) -> np.ndarray:
    return np.broadcast_to(np.zeros((), np.uint8), (len(image), *size))


class _Shapes(PilBackend):
    """What the steps that read pixels do to shapes. In the order of classes it stands between the
    class of a family, whose decisions stay its own, and PilBackend. Images are (3, H, W) uint8."""

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


class _Some(_Shapes):
    """Steps that read the pixels of an image, unless `sized` made it."""


def _step(name: str) -> FunctionType:
    def run(self, image, *args, **options):
        made_up = isinstance(image, np.ndarray) and not any(image.strides)
        return getattr(_Shapes if made_up else PilBackend, name)(self, image, *args, **options)

    return run


for _name in ("process_image", "resize", "center_crop", "rescale", "normalize"):
    setattr(_Some, _name, _step(_name))


def of_shapes(image_processor: PilBackend) -> PilBackend:
    """A copy of an image processor that takes what `sized` gives, and whose results have the shapes
    of images of these sizes."""
    return _with_steps(image_processor, _Shapes)


def of_some(image_processor: PilBackend) -> PilBackend:
    """A copy of an image processor that also takes what `sized` gives, among other images, which
    become what they become beside images of these sizes."""
    return _with_steps(image_processor, _Some)


def _with_steps(image_processor: PilBackend, steps: type) -> PilBackend:
    out = copy.copy(image_processor)
    family = type(image_processor)
    out.__class__ = type(family.__name__, (family, steps), {})
    return out
