"""Processors of transformers that are told the sizes of images and clips and read neither pixels
nor samples: which shapes their results have is decided by their own code."""

from __future__ import annotations

import copy
from types import FunctionType

import numpy as np
from PIL import Image
from transformers import WhisperFeatureExtractor
from transformers import image_processing_backends as backends
from transformers.image_processing_backends import PilBackend

# Of an image height and width in pixels as displayed; of a clip 0 and its samples, at the rate of
# the processor.
Size = tuple[int, int]


def blank(size: Size) -> Image.Image | np.ndarray:
    """A black image, or a silent clip."""
    height, width = size
    return Image.new("RGB", (width, height)) if height else np.zeros(width, np.float32)


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


def of_shapes(image_processor: PilBackend) -> PilBackend:
    """A copy of an image processor that takes what `sized` gives, and whose results have the shapes
    of images of these sizes."""
    out = copy.copy(image_processor)
    family = type(image_processor)
    out.__class__ = type(family.__name__, (family, _Shapes), {})
    return out


class _Silent(WhisperFeatureExtractor):
    def _torch_extract_fbank_features(self, waveform: np.ndarray, device: str = "cpu"
                                      ) -> np.ndarray:
        count, samples = waveform.shape
        return np.zeros((count, self.feature_size, samples // self.hop_length), np.float32)


def of_lengths(extractor: WhisperFeatureExtractor) -> WhisperFeatureExtractor:
    """A copy of the part for clips whose results have the shapes of clips of these lengths, and
    say nothing of the samples."""
    out = copy.copy(extractor)
    out.__class__ = _Silent
    return out
