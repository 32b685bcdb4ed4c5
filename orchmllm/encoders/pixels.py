"""Images that travel as bytes and become what the processor makes of them where they are encoded.

The processor cuts and resizes as always, but neither rescales nor normalises; what it would have
made of a byte is looked up in a table. That this is the same, bit by bit, is proven at the start
with the processor's own results; where it is not, float32 travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import torch
from torch import Tensor

from orchmllm.encoders.items import Items

CHANNELS = 3
_VALUES = 256  # of a byte
_LEAST = 4  # samples


class Pixels:
    """table (3, 256) float32: of a channel and a byte, what the processor makes. channels_first:
    whether a row (or a tile) has its channels one after the other, or those of each pixel together.
    width: the values of a row as the processor makes it. copies: how often such a row has each
    channel; where these are the same, as in an item of one image, one of them travels."""

    def __init__(self, table: Tensor, channels_first: bool, width: int, copies: int) -> None:
        self.table, self.channels_first = table, channels_first
        self.width, self.copies = width, copies
        self._there: dict[tuple, Tensor] = {}  # tables and places of channels, on devices

    def restored(self, data: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """(n, ...) uint8 -> the same as the processor makes it, with all copies, rounded to
        `dtype`."""
        size = data[0].numel()
        index = data.flatten(1).int() + self._kept(self._places, size, data.device)
        table = self._kept(self._table, dtype, data.device)
        values = table.index_select(0, index.flatten()).view(data.shape)
        if self.copies > 1 and size * self.copies == self.width:
            each = values.unflatten(1, (CHANNELS, 1, -1))
            values = each.expand(-1, -1, self.copies, -1).flatten(1)
        return values

    def _kept(self, make: Callable, what: object, device: torch.device) -> Tensor:
        key = (what, device)
        if key not in self._there:
            self._there[key] = make(what).to(device)
        return self._there[key]

    def _places(self, size: int) -> Tensor:
        """(size,) int32: where the channel of each value of a row begins in the flat table."""
        value = torch.arange(size, dtype=torch.int32)
        return _VALUES * (value // (size // CHANNELS) if self.channels_first else value % CHANNELS)

    def _table(self, dtype: torch.dtype) -> Tensor:
        return self.table.flatten().to(dtype)


def proven(
    table: Tensor, copies: int, samples: Iterable[tuple[Mapping, Mapping]],
    describe: Callable[[Mapping], Items],
) -> Pixels:
    """Pixels with which every sample is bit-equal to what the processor makes; the samples have
    every entry of `table` (3, 256). samples: (tensors of a medium with bytes, those that the
    processor makes); after the first four they are taken until all entries were seen. describe:
    what the encoder takes of such tensors. Raises ValueError saying why there are none."""
    found: list[Pixels] | None = None
    seen = torch.zeros(CHANNELS * _VALUES, dtype=torch.bool)
    for number, sample in enumerate(samples):
        if number >= _LEAST and seen.all():
            break
        raw, made = map(describe, sample)
        if raw.meta.shape != made.meta.shape or raw.values[0][0].numel() % CHANNELS:
            raise ValueError("the encoder takes other parts of an image with bytes")
        if found is None:
            width = made.values[0][0].numel()
            found = [Pixels(table, first, width, copies) for first in (True, False)]
        found = [pixels for pixels in found if _equal(pixels, raw, made)]
        if not found:
            raise ValueError("the processor does more than to rescale and to normalise each value")
        rows = raw.values[0].flatten(1)
        places = rows.int() + found[0]._places(rows.shape[1])
        seen |= places.flatten().bincount(minlength=len(seen)) > 0
    if not found or not seen.all():
        raise ValueError("the processor resizes so that not every value of a pixel was seen")
    return found[0]


def _equal(pixels: Pixels, raw: Items, made: Items) -> bool:
    """Also of the other tensors of a medium."""
    values = (pixels.restored(raw.values[0]), *raw.values[1:])
    return np.array_equal(raw.meta, made.meta) and all(
        a is b or (a is not None and b is not None and a.dtype == b.dtype and torch.equal(a, b))
        for a, b in zip(values, made.values, strict=True))
