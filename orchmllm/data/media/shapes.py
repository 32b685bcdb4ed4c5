"""Processors of transformers that are told the sizes of images and clips and read no pixels and
samples, or only those of some: which shapes their results have is decided by their own code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple

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


def _with_other(step: FunctionType, **names: object) -> FunctionType:
    """A step of a processor in which these names of its module stand for something else."""
    out = FunctionType(step.__code__, {**step.__globals__, **names}, step.__name__,
                       step.__defaults__, step.__closure__)
    out.__kwdefaults__ = step.__kwdefaults__
    return out


def _with_other_resizing(resized: Callable) -> FunctionType:
    """PilBackend's step, which chooses the size, with another function that resizes."""
    return _with_other(PilBackend.resize, np_resize=resized)


class Shapes(PilBackend):
    """What the steps that read pixels do to shapes, of images as `sized` makes them. Images are
    (3, H, W) uint8. met: options of calls -> what they were settled to, which takes transformers
    longer than an image of a few hundred patches takes for its shape."""

    met: dict[str, dict[str, Any]]

    def preprocess(self, images: Any, *args: Any, **options: Any) -> Any:
        if (key := repr(options)) not in self.met:
            asked = copy.copy(self)
            asked._preprocess_image_like_inputs = lambda *_, **settled: settled
            self.met[key] = PilBackend.preprocess(asked, images, *args, **options)
        return self._preprocess_image_like_inputs(images, *args, **self.met[key])

    def process_image(self, image: np.ndarray, *args, **options) -> np.ndarray:
        return np.moveaxis(image, -1, 0)

    resize = _with_other_resizing(_resized)

    def center_crop(self, image: np.ndarray, size, **options) -> np.ndarray:
        return _resized(image, (size.height, size.width))

    def rescale(self, image: np.ndarray, scale: float, **options) -> np.ndarray:
        return image

    def normalize(self, image: np.ndarray, mean, std, **options) -> np.ndarray:
        return np.broadcast_to(np.zeros((), np.float32), image.shape)


class _Picture:
    """The pixels (3, H, W) uint8 of an image of Pillow, which are copied out of it where they are
    read: most families resize it first, and Pillow does that without the copy. To all others it is
    an array."""

    ndim, dtype = 3, np.dtype(np.uint8)

    def __init__(self, image: Image.Image) -> None:
        self.image, self.shape = image, (3, image.height, image.width)

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        return np.moveaxis(np.array(self.image, dtype), -1, 0)

    def __getitem__(self, key: object) -> np.ndarray:
        return np.asarray(self)[key]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what numpy looks for before __array__
            raise AttributeError(name)
        return getattr(np.asarray(self), name)


def _is_made_up(image: object) -> bool:
    """By `sized`."""
    return isinstance(image, np.ndarray) and not any(image.strides)


def _concatenated(arrays: Sequence[np.ndarray], axis: int = 0) -> np.ndarray:
    """np.concatenate, which gives an array without memory where all are such arrays of one value:
    for a large image its copy takes longer than all other steps together."""
    if all(_is_made_up(array) and array.size for array in arrays):
        alike = {(array.dtype, array.flat[0], *np.delete(array.shape, axis)) for array in arrays}
        if len(alike) == 1:
            shape = list(arrays[0].shape)
            shape[axis] = sum(array.shape[axis] for array in arrays)
            one = np.full(1, arrays[0].flat[0])  # torch warns of an array that is not writable
            return np.lib.stride_tricks.as_strided(one, shape, [0] * len(shape))
    return np.concatenate(arrays, axis=axis)


_NUMPY = SimpleNamespace(**vars(np) | {"concatenate": _concatenated})


def _resized_or_made_up(image: np.ndarray | _Picture, size: tuple[int, int], **options: Any
                        ) -> np.ndarray:
    if _is_made_up(image):
        return _resized(image, size)
    if isinstance(image, _Picture):
        keys = {name: options[name] for name in ("resample", "reducing_gap")}
        return np.moveaxis(np.array(image.image.resize(size[::-1], **keys)), -1, 0)
    return backends.np_resize(image, size, **options)


def _step(name: str) -> FunctionType:
    def run(self, image, *args, **options):
        image = np.asarray(image) if isinstance(image, _Picture) else image
        of = Shapes if _is_made_up(image) else PilBackend
        return getattr(of, name)(self, image, *args, **options)

    return run


class Some(Shapes):
    """Steps that read the pixels of an image, unless `sized` made it: of such an image they compute
    the shape alone, as Shapes does. copies_late: whether images stay Pillow's until they are
    resized, which steps of a family that want an array refuse."""

    copies_late = False
    resize = _with_other_resizing(_resized_or_made_up)
    center_crop, normalize = map(_step, ("center_crop", "normalize"))

    def rescale(self, image: np.ndarray | _Picture, scale: float, **options: Any) -> np.ndarray:
        """As transformers does it, in float64 and rounded to float32, with no array of float64."""
        if _is_made_up(image):
            return image
        image = np.asarray(image)
        return np.multiply(image, scale, out=np.empty_like(image, np.float32), dtype=np.float64,
                           casting="unsafe")

    def process_image(self, image: Image.Image | np.ndarray, *args: Any, **options: Any
                      ) -> np.ndarray | _Picture:
        if self.copies_late and isinstance(image, Image.Image) and image.mode == "RGB":
            return _Picture(image)
        of = Shapes if _is_made_up(image) else PilBackend
        return of.process_image(self, image, *args, **options)


def adapted(image_processor: PilBackend, steps: type[Shapes]) -> PilBackend:
    """A copy of an image processor. In the order of classes, `steps` stands between the class of a
    family, whose decisions stay its own, and PilBackend."""
    out, family = copy.copy(image_processor), type(image_processor)
    out.met = {}
    joins = _with_other(family._preprocess, np=_NUMPY)
    out.__class__ = type(family.__name__, (family, steps), {"_preprocess": joins})
    return out


def reading(image_processor: PilBackend, options: Mapping[str, Any]) -> PilBackend:
    """`adapted` with Some, in the way that was found to make the same of an image, bit by bit, as
    the image processor itself, with these options of its call. Raises ValueError."""
    noise = np.random.default_rng(0).integers(0, 256, (112, 168, 3), np.uint8)
    image, out = Image.fromarray(noise), adapted(image_processor, Some)
    wanted = image_processor([[image]], **options, return_tensors="np")
    for out.copies_late in (True, False):
        with suppress(Exception if out.copies_late else ()):  # a step may ask for an array
            found = out([[image]], **options, return_tensors="np")
            if wanted.keys() == found.keys() and all(
                    np.array_equal(value, found[name]) for name, value in wanted.items()):
                return out
    raise ValueError(f"{type(image_processor).__name__} makes something else of an image than its "
                     "steps, one by one")


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
