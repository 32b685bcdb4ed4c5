"""Images as the processor of a model of transformers cuts and resizes them, before it rescales and
normalises: one byte a value, and each frame once. What is left to do to them is `Arithmetic`, and
whether that gives what the processor makes is proven with its own results (`samples`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

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


def as_bytes(values: Tensor, copies: int) -> Tensor:
    """Pixels that were not rescaled as uint8; of rows (n, 3 * copies * k) with the same frame in
    all copies, (n, 3 * k). Raises ValueError for values that are no bytes."""
    data = values.to(torch.uint8)
    if not torch.equal(data.to(values.dtype), values):
        raise ValueError("the processor makes values that are not whole numbers from 0 to 255 of "
                         "an image that it does not rescale")
    if copies > 1 and data.dim() == 2 and data.shape[1] % (_CHANNELS * copies) == 0:
        frames = data.unflatten(1, (_CHANNELS, copies, -1))
        if torch.equal(frames, frames[:, :, :1].expand_as(frames)):
            return frames[:, :, 0].flatten(1)
    return data


def with_bytes(tensors: Mapping[str, Tensor], names: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors of a medium, of any shapes, those of `names` (argument -> copies) as `as_bytes`
    gives them."""
    return {name: as_bytes(value, names[name]) if name in names else value
            for name, value in tensors.items()}


def of_images(processor: Any, options: Mapping[str, Any], name: str,
              parts: Callable[..., list[dict[str, Tensor]]]) -> Arithmetic:
    """processor: for images; options: of its call. name: of the argument that holds them. parts: of
    (images of an example, **options), the tensors of each."""
    scale, rescales, mean, std, normalises = (options.get(key, getattr(processor, key)) for key in (
        "rescale_factor", "do_rescale", "image_mean", "image_std", "do_normalize"))
    copies = getattr(processor, "temporal_patch_size", 1)

    def made(image: np.ndarray) -> np.ndarray:
        image = processor.rescale(image, scale) if rescales else image
        return processor.normalize(image, mean, std) if normalises else image

    def samples() -> Iterator[tuple[dict[str, Tensor], dict[str, Tensor]]]:
        for images in sample_images():
            for bare, full in zip(parts(images, **AS_BYTES), parts(images), strict=True):
                yield with_bytes(bare, {name: copies}), full

    return Arithmetic(table_of(made), copies, samples())


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
