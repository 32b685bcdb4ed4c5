"""Images as the processor of a model of transformers cuts and resizes them, before it rescales and
normalises: one byte a value, and each frame once. What is left to do to them is `Arithmetic`, and
whether that gives what the processor makes is proven with its own results (`samples`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

NOTHING: Mapping[str, Any] = MappingProxyType({})
AS_BYTES = {"do_rescale": False, "do_normalize": False}  # options of a processor's call
_CHANNELS = 3


class Arithmetic(NamedTuple):
    """Of an argument of the model that holds images. table (3, 256) float32: what becomes of a
    channel's byte. copies: how often a row of values has the frame of an image. samples: pairs
    of the tensors of one medium, with bytes and as the processor makes them."""

    table: Tensor
    copies: int
    samples: Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]


def table_of(arithmetic: Callable[[np.ndarray], Any]) -> Tensor:
    """arithmetic: what a processor makes of an image (3, 16, 16) uint8."""
    every = np.broadcast_to(np.arange(256, dtype=np.uint8).reshape(16, 16), (_CHANNELS, 16, 16))
    return torch.as_tensor(np.asarray(arithmetic(every.copy()))).reshape(_CHANNELS, 256)


def as_bytes(values: Tensor) -> Tensor:
    """Pixels that were not rescaled, (..., pixels), as uint8. Raises ValueError for values that are
    no bytes."""
    if values.dtype == torch.uint8:
        return values
    made = values.numpy()  # numpy converts a value in a sixth of torch's time
    with np.errstate(invalid="ignore"):
        data = made.astype(np.uint8, copy=False)
    if not np.array_equal(data, made):
        raise ValueError("the processor makes values that are not whole numbers from 0 to 255 of "
                         "an image that it does not rescale")
    return torch.from_numpy(data)


def one_of_copies(rows: Tensor, copies: int) -> Tensor:
    """Of rows (n, 3 * copies * k) of `copies` frames, (n, 3 * k) where all frames are the same."""
    frames = rows.unflatten(1, (_CHANNELS, copies, -1))
    is_same = all(torch.equal(frames[:, :, 0], frames[:, :, k]) for k in range(1, copies))
    return frames[:, :, 0].flatten(1) if is_same else rows


def with_bytes(tensors: Mapping[str, Tensor], names: Collection[str], patch: int
               ) -> dict[str, Tensor]:
    """The tensors of a medium, of any shapes, those of `names` as bytes. patch: pixels of the side
    of one; rows of more values than it has are of several frames, which may be the same."""
    out = {name: as_bytes(value) if name in names else value for name, value in tensors.items()}
    for name in out.keys() & names:
        copies = out[name].shape[1] // (_CHANNELS * patch**2) if out[name].dim() == 2 else 1
        if copies > 1:
            out[name] = one_of_copies(out[name], copies)
    return out


def of_images(processor: Any, options: Mapping[str, Any], bare: Callable, full: Callable
              ) -> Arithmetic:
    """processor: for images; options: of its call. bare, full: of the images of an example, the
    tensors of each with bytes, as they are loaded, and as the processor itself makes them."""
    scale, rescales, mean, std, normalises = (options.get(key, getattr(processor, key)) for key in (
        "rescale_factor", "do_rescale", "image_mean", "image_std", "do_normalize"))

    def made(image: np.ndarray) -> np.ndarray:
        image = processor.rescale(image, scale) if rescales else image
        return processor.normalize(image, mean, std) if normalises else image

    return Arithmetic(table_of(made), getattr(processor, "temporal_patch_size", 1), (
        pair for images in sample_images() for pair in zip(bare(images), full(images), strict=True)
    ))


def sample_images() -> Iterator[list[Image.Image]]:
    """Images of several examples: four that differ (noise of several sizes, black), and then every
    byte in every channel on areas that stay after resizing."""
    rng = np.random.default_rng(0)
    for sizes in ([(64, 48)], [(200, 130), (64, 64), (30, 90)]):
        yield [Image.fromarray(rng.integers(0, 256, (h, w, _CHANNELS), np.uint8) * np.uint8(w != h))
               for h, w in sizes]
    areas = np.arange(256).reshape(16, 4, 4)
    for four in areas.reshape(4, 4, 4, 4):
        yield [Image.fromarray(np.stack([(area + shift) % 256 for shift in (0, 85, 170)], -1)
                               .astype(np.uint8).repeat(32, 0).repeat(32, 1)) for area in four]
