"""How the inputs of an encoder divide into items (images, videos, clips), one class per layout.

A layout turns the arguments of the model's forward into `Items`: one row of integers per item
(`meta`), which all ranks gather, and the tensors to move, packed along their first dimension. From
these integers alone every rank knows how many rows an item has and what it costs; from both
together the rank that encodes an item builds the arguments of the encoder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from orchmllm.batch import on_device

Values = tuple[Tensor | None, ...]  # packed tensors by argument
Place = Callable[[np.ndarray, torch.device], Tensor]


@dataclass(frozen=True)
class Items:
    """n items. meta (n, columns) int64; values: packed tensors by argument, None where an optional
    argument was not given."""

    meta: np.ndarray
    values: tuple[Tensor | None, ...]


def tensor_of(inputs: Mapping[str, Any], name: str, ndim: int = 1) -> Tensor:
    """The argument `name`. Raises ValueError unless it is a tensor of `ndim` dimensions or more."""
    value = inputs.get(name)
    if not isinstance(value, Tensor) or value.dim() < ndim:
        found = (f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor)
                 else "missing" if value is None else f"a {type(value).__name__}")
        raise ValueError(f"{name} is {found}: balance_encoders needs a tensor of at least {ndim} "
                         "dimensions")
    return value


def table_of(name: str, value: Any, num_items: int | None = None) -> np.ndarray:
    """Integers per item -> (n, columns) int64. Raises ValueError if there are not num_items."""
    if value is None:
        raise ValueError(f"{name} is missing: it says how the media divide into items")
    array = (value.detach().cpu().numpy() if isinstance(value, Tensor)
             else np.asarray(value)).astype(np.int64)
    array = array.reshape(len(array), int(np.prod(array.shape[1:])))
    if num_items is not None and len(array) != num_items:
        raise ValueError(f"{name} has {len(array)} entries for {num_items} items")
    return array


def form_of(value: Any) -> Tensor | None:
    """What is gathered of a tensor whose values are in `meta`: its dtype and the shape of a row."""
    return value[:0] if isinstance(value, Tensor) else None


def _no_rows(meta: np.ndarray) -> np.ndarray:
    return np.zeros(len(meta), np.int64)


def _as_given(integers: np.ndarray, values: Values, place: Place) -> Tensor:
    """Integers of items as the forward was given them, in int64 where they were no tensor. values:
    the packed tensors, and the integers' `form_of`."""
    content, form = values
    out = place(integers.copy(), content.device)
    return out if form is None else out.to(form.dtype).reshape(-1, *form.shape[1:])


def _packed_rows(value: Tensor, counts: np.ndarray, items: slice) -> Tensor:
    ends = counts.cumsum()
    return value[ends[items.start] - counts[items.start]: ends[items.stop - 1]]


class Layout(ABC):
    """How the arguments of a forward divide into items. value: the argument that holds them."""

    value: str

    @abstractmethod
    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        """The Items among the arguments of a forward; ValueError if these do not fit together."""

    @abstractmethod
    def rows(self, meta: np.ndarray) -> list[np.ndarray]:
        """meta (n, columns) -> for each packed tensor (n,), its rows of each item."""

    @abstractmethod
    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        """meta (n, columns) and the packed tensors of n items of any ranks -> the encoder's
        arguments. place: makes a tensor on a device of what meta says."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Those that the encoder gets: the layout's texts, in their order."""
        return tuple(v for f in fields(self) if isinstance(v := getattr(self, f.name), str))

    def part(self, inputs: Mapping[str, Any], meta: np.ndarray, items: slice) -> tuple[Any, ...]:
        """The arguments of a forward, cut to some of its items. meta: (n, k) of all of them, as
        `describe` gives it. For a proof this must not go through `describe` and `build`."""
        return tuple(None if inputs.get(name) is None else inputs[name][items]
                     for name in self.arguments)

    def lengths(self, meta: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        """(n,) lengths for the cost model; (n,) frames inside which attention stays, or None."""
        return self.rows(meta)[0], None


@dataclass(frozen=True)
class Rows(Layout):
    """Tensors with one row per item: values (n, ...) and any others with as many rows.

    length: argument (n, T) of zeros and ones, among those named, whose sum is the item's length; it
    decides the cost. Without it all items cost the same."""

    value: str
    others: tuple[str, ...] = ()
    length: str = ""

    @property
    def arguments(self) -> tuple[str, ...]:
        return self.value, *self.others

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        value = tensor_of(inputs, self.value)
        tensors = [value]
        for name in self.others:
            other = None if inputs.get(name) is None else tensor_of(inputs, name)
            if other is not None and len(other) != len(value):
                raise ValueError(f"{name} has {len(other)} rows, {self.value} has {len(value)}")
            tensors.append(other)
        columns = (table_of(self.length, tensor_of(inputs, self.length).sum(-1)) if self.length
                   else np.zeros((len(value), 0), np.int64))
        return Items(columns, tuple(tensors))

    def rows(self, meta: np.ndarray) -> list[np.ndarray]:
        return [np.ones(len(meta), np.int64)] * len(self.arguments)

    def lengths(self, meta: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return (meta[:, 0] if self.length else np.ones(len(meta), np.int64)), None

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        return values


@dataclass(frozen=True)
class Windows(Rows):
    """Rows whose encoder computes what is outside of the length, too, so that all items cost the
    same."""

    def lengths(self, meta: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return np.ones(len(meta), np.int64), None


@dataclass(frozen=True)
class Packed(Layout):
    """Items one after the other in values (R, ...); counts (n,) or (n, k): item i has
    prod(counts[i]) rows. frames: the first column of counts is a number of frames, and attention
    stays inside a frame. apart: nothing else of the encoder looks at other frames either, so each
    frame is an item."""

    value: str
    counts: str
    frames: bool = False
    apart: bool = False

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        value = tensor_of(inputs, self.value)
        counts = table_of(self.counts, inputs.get(self.counts))
        total = int(counts.prod(1).sum())
        if total != len(value):
            raise ValueError(f"{self.counts} says {total} rows, {self.value} has {len(value)}")
        if self.apart:
            counts = np.repeat(counts, counts[:, 0], axis=0)
            counts[:, 0] = 1
        return Items(counts, (value, form_of(inputs[self.counts])))

    def rows(self, meta: np.ndarray) -> list[np.ndarray]:
        return [meta.prod(1), _no_rows(meta)]

    def part(self, inputs: Mapping[str, Any], meta: np.ndarray, items: slice) -> tuple[Any, ...]:
        counts = inputs[self.counts]
        if self.apart:
            counts = counts.repeat_interleave(counts[:, 0], 0)
            counts[:, 0] = 1
        return _packed_rows(inputs[self.value], self.rows(meta)[0], items), counts[items]

    def lengths(self, meta: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return meta.prod(1), meta[:, 0] if self.frames else None

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        counts = meta if meta.shape[1] > 1 or values[1] is not None else meta[:, 0]
        return values[0], _as_given(counts, values, place)


@dataclass(frozen=True)
class Masked(Layout):
    """values (n, C, T) with a mask (n, T): only what is inside the mask moves, and the rank that
    encodes pads to its own longest. For encoders that never read what is outside the mask."""

    value: str
    mask: str

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        value, mask = tensor_of(inputs, self.value, 3), tensor_of(inputs, self.mask, 2).bool()
        if value.shape[::2] != mask.shape:
            raise ValueError(f"{self.mask} has shape {tuple(mask.shape)}, {self.value} has "
                             f"{tuple(value.shape)}")
        return Items(table_of(self.mask, mask.sum(-1)), (
            value.permute(0, 2, 1)[mask], form_of(inputs[self.mask][:, 0])))

    def rows(self, meta: np.ndarray) -> list[np.ndarray]:
        return [meta[:, 0], _no_rows(meta)]

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        padded = pad_sequence(values[0].split(meta[:, 0].tolist()), batch_first=True)  # (n, T, C)
        mask = np.arange(padded.shape[1]) < meta[:, :1]
        return (padded.transpose(1, 2).contiguous(),
                place(mask.astype(np.int64), padded.device).to(values[1].dtype))


@dataclass(frozen=True)
class Tiles(Layout):
    """Images cut into tiles: values (n, most tiles, C, H, W), of which image i fills as many as
    count(module, sizes[i]) says, or only the filled ones, (tiles of all images, C, H, W). sizes
    (n, 2): height and width."""

    value: str
    sizes: str
    count: Callable[[nn.Module, list[int]], int]

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        value, sizes = tensor_of(inputs, self.value, 4), table_of(
            self.sizes, inputs.get(self.sizes))
        tiles = np.array([self.count(module, size) for size in sizes.tolist()], np.int64)
        if value.dim() == 5:
            if len(value) != len(sizes) or value.shape[1] < tiles.max(initial=0):
                raise ValueError(f"{self.value} of shape {tuple(value.shape)} does not hold the "
                                 f"{tiles.tolist()} tiles of {self.sizes}")
            filled = torch.arange(value.shape[1]) < torch.from_numpy(tiles)[:, None]
            value = value[filled.to(value.device)]
        if len(value) != tiles.sum():
            raise ValueError(f"{self.value} has {len(value)} tiles, {self.sizes} says "
                             f"{int(tiles.sum())}")
        return Items(np.column_stack([sizes, tiles]), (value, form_of(inputs[self.sizes])))

    def rows(self, meta: np.ndarray) -> list[np.ndarray]:
        return [meta[:, 2], _no_rows(meta)]

    def part(self, inputs: Mapping[str, Any], meta: np.ndarray, items: slice) -> tuple[Any, ...]:
        if inputs[self.value].dim() == 5:
            return super().part(inputs, meta, items)
        return _packed_rows(inputs[self.value], meta[:, 2], items), inputs[self.sizes][items]

    def lengths(self, meta: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
        return meta[:, 2], meta[:, 2]  # a tile is a frame: attention stays inside

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        return values[0], _as_given(meta[:, :2], values, place)


@dataclass(frozen=True)
class Cropped(Layout):
    """Images padded to a common size: values (n, C, H, W), sizes (n, 2) of what is inside. Patches
    inside move, as rows (C, p, p); the rank that encodes pads to its own largest. For encoders that
    cut the padding off after a patch convolution. patch: p, from the module."""

    value: str
    sizes: str
    patch: Callable[[nn.Module], int]

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        value = tensor_of(inputs, self.value, 4)
        sizes, p = table_of(self.sizes, inputs.get(self.sizes), len(value)), self.patch(module)
        patches = []
        for image, (h, w) in zip(value, (sizes // p).tolist(), strict=True):
            inside = image[:, : h * p, : w * p].reshape(-1, h, p, w, p)
            patches.append(inside.permute(1, 3, 0, 2, 4).flatten(0, 1))
        # A column holds p, because the ranks know rows from the integers alone.
        meta = np.column_stack([sizes, np.full(len(sizes), p)])
        return Items(meta, (torch.cat([value.new_zeros(0, value.shape[1], p, p), *patches]),
                            form_of(inputs[self.sizes])))

    def rows(self, meta: np.ndarray) -> list[np.ndarray]:
        return [(meta[:, :2] // meta[:, 2:]).prod(1), _no_rows(meta)]

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        rows, sizes = values[0], meta[:, :2]
        height, width = (int(n) for n in sizes.max(0))
        out = rows.new_zeros((len(meta), rows.shape[1], height, width))
        patches = rows.split(self.rows(meta)[0].tolist())
        for image, part, (h, w, p) in zip(out, patches, meta.tolist(), strict=True):
            h, w = h // p, w // p
            part = part.unflatten(0, (h, w)).permute(2, 0, 3, 1, 4)
            image[:, : h * p, : w * p] = part.reshape(-1, h * p, w * p)
        return out, _as_given(sizes, values, place)


@dataclass(frozen=True)
class Slots(Rows):
    """Images in a fixed number of slots per example: values (B, slots, C, H, W), one mask
    (B, slots, H, W) or None. A slot of zeros holds no image, and the encoder leaves it out."""

    def describe(self, module: nn.Module, inputs: Mapping[str, Any]) -> Items:
        value, [name] = tensor_of(inputs, self.value, 5).flatten(0, 1), self.others
        filled = (value != 0).flatten(1).any(1)
        mask = inputs.get(name)
        if mask is not None:
            mask = tensor_of(inputs, name, 4).flatten(0, 1)[filled]
        return Items(np.zeros((int(filled.sum()), 0), np.int64), (value[filled], mask))

    def part(self, inputs: Mapping[str, Any], meta: np.ndarray, items: slice) -> tuple[Any, ...]:
        filled = (inputs[self.value] != 0).flatten(2).any(2)
        return tuple(None if inputs.get(name) is None else inputs[name][filled][items][:, None]
                     for name in self.arguments)

    def build(self, meta: np.ndarray, values: Values, place: Place = on_device) -> tuple[Any, ...]:
        return tuple(None if v is None else v[:, None] for v in values)  # one slot per example
