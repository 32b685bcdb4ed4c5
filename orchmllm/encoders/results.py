"""What an encoder returned -> rows of features that can move, and back to what it returned, for
other items.

A result is a tensor, a list of tensors, a dict, a tuple or an object (a ModelOutput of
transformers, a dataclass). The fields that the model reads are joined on the last dimension, so
that one exchange carries them all; the other fields become None, so that a model that reads one of
them fails instead of reading the features of other items.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from orchmllm.encoders.spec import EQUAL, Encoder

_STACKED, _LISTED, _FLAT, _PADDED = "a row per item", "a list", "flat", "padded"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor, or list of tensors, of a result. field: None for the result itself; layer: its
    place in a field that holds a list of layers; inner: dimensions between the first and the
    last."""

    field: str | int | None
    layer: int | None
    form: str
    width: int
    inner: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Features:
    """result: as the encoder returned it. rows (R, sum of the widths): the features in it of n
    items one after the other, counts (n,) of each. kind: what has to be equal on all ranks."""

    result: Any
    rows: Tensor
    counts: np.ndarray
    leaves: tuple[Leaf, ...]
    kind: str


def flatten(
    encoder: Encoder, owner: nn.Module, result: Any, meta: np.ndarray, placeholder: bool
) -> Features:
    """The features of len(meta) items in a result of the encoder. placeholder: of one item whose
    tensors are made up, so that its number of rows is, too: 0 of them, still part of the graph that
    computed them. Raises ValueError naming the field if the features cannot be told apart by item.
    meta: (n, integers) of the items."""
    leaves, columns, counts, first = [], [], None, ""
    for name, field, layer, value in fields_of(encoder, result):
        rows, form, sizes, inner = _rows_of(encoder, owner, name, value, meta, placeholder)
        if counts is not None and not np.array_equal(counts, sizes):
            raise ValueError(f"encoder {encoder.name!r}: {name} has {sizes.tolist()} rows per "
                             f"item, {first} has {counts.tolist()}")
        if columns and columns[0].dtype != rows.dtype:
            raise ValueError(f"encoder {encoder.name!r}: {name} is {rows.dtype}, {first} is "
                             f"{columns[0].dtype}; return one dtype")
        counts, first = sizes, first or name
        columns.append(rows)
        leaves.append(Leaf(field, layer, form, rows.shape[1], inner))
    rows = columns[0] if len(columns) == 1 else torch.cat(columns, -1)
    if placeholder:  # by index_select, not as a slice: FSDP2 does not want views from what it wraps
        nothing = torch.empty(0, dtype=torch.int64, device=rows.device)
        rows, counts = rows.index_select(0, nothing), counts[:0]
    kind = f"{rows.dtype} {[dataclasses.astuple(leaf) for leaf in leaves]}"
    return Features(result, rows, counts, tuple(leaves), kind)


def fields_of(
    encoder: Encoder, result: Any
) -> Iterator[tuple[str, str | int | None, int | None, Any]]:
    """(name in errors, field, layer, value) of everything that the model reads. Raises
    ValueError."""
    if not encoder.outputs:
        if not isinstance(result, Tensor | list | tuple):
            raise ValueError(
                f"encoder {encoder.name!r} returns a {type(result).__name__}, neither a tensor nor "
                "a list with a tensor per item: name the fields that the model reads in `outputs`")
        yield "the result", None, None, result
    for field in encoder.outputs:
        name = f"output {field!r}"
        if isinstance(field, int):
            held = isinstance(result, Sequence) and field < len(result)
            value = result[field] if held else None
        elif isinstance(result, Mapping):
            value = result.get(field)
        else:
            value = getattr(result, field, None)
        if value is None and field in encoder.optional:
            continue
        if value is None:
            raise ValueError(f"encoder {encoder.name!r}: its {type(result).__name__} has no {name}")
        if field in encoder.layers:
            for layer, part in enumerate(value):
                yield f"{name}, layer {layer}", field, layer, part
        else:
            yield name, field, None, value


def _rows_of(
    encoder: Encoder, owner: nn.Module, name: str, value: Any, meta: np.ndarray, placeholder: bool
) -> tuple[Tensor, str, np.ndarray, tuple[int, ...]]:
    """(rows (R, D), form, rows per item (n,), inner dimensions) of one field."""
    n = len(meta)
    if isinstance(value, list | tuple):
        bad = [v for v in value if not isinstance(v, Tensor) or v.dim() != 2]
        if len(value) != n or bad:
            raise ValueError(f"encoder {encoder.name!r}: {name} is a list of {len(value)}, "
                             f"expected a tensor (rows, D) for each of {n} items")
        return torch.cat(list(value)), _LISTED, np.array([len(v) for v in value], np.int64), ()
    if not isinstance(value, Tensor) or value.dim() < 2:
        raise ValueError(f"encoder {encoder.name!r}: {name} is a {type(value).__name__}"
                         f"{tuple(getattr(value, 'shape', ()))}, not features of items")
    if encoder.rows is not None:
        inner = tuple(value.shape[1:-1])
        counts = (np.full(n, len(value) // n * int(np.prod(inner, dtype=np.int64)))
                  if encoder.rows == EQUAL or placeholder
                  else np.asarray(encoder.rows(owner, meta), np.int64))
        if encoder.padded:
            rows = torch.cat([item[:count] for item, count in zip(value, counts, strict=True)])
            return rows, _PADDED, counts, ()
        rows = value.reshape(-1, value.shape[-1])
        if counts.sum() != len(rows) and not placeholder:
            raise ValueError(f"encoder {encoder.name!r}: {name} has shape {tuple(value.shape)}, "
                             f"expected {int(counts.sum())} rows for {n} items")
        return rows, _FLAT, counts, inner
    if len(value) != n:
        raise ValueError(f"encoder {encoder.name!r}: {name} has {len(value)} rows for {n} items: "
                         "give `rows`, the number of rows of each item")
    inner = tuple(value.shape[1:-1])
    rows = value.reshape(-1, value.shape[-1])
    return rows, _STACKED, np.full(n, int(np.prod(inner, dtype=np.int64))), inner


def rebuild(encoder: Encoder, like: Features, rows: Tensor, counts: Sequence[int]) -> Any:
    """A result like that of `like` with the features `rows` (sum of counts, W) of len(counts)
    items. The model may change it in place, unlike the views that `split` makes."""
    values: dict[Any, Any] = {}
    leaves, start = like.leaves, 0
    for leaf in leaves:
        part = rows.narrow(-1, start, leaf.width)
        start += leaf.width
        if leaf.form == _LISTED:
            # transformers joins the list, and nothing cannot be joined.
            value: Any = [part[end - n: end] for n, end in zip(
                counts, accumulate(counts), strict=True)] or [part]
        elif leaf.form == _PADDED:
            items = part.split(list(counts)) or [part]  # nothing cannot be padded
            value = pad_sequence(items, batch_first=True)
        elif leaf.form == _STACKED:
            value = part.reshape(-1, *leaf.inner, leaf.width)
        else:
            value = part if len(leaves) == 1 else part.contiguous()
            value = value.reshape(-1, *leaf.inner, leaf.width) if leaf.inner else value
        if leaf.layer is None:
            values[leaf.field] = value
        else:
            values.setdefault(leaf.field, []).append(value)
    return values[None] if not encoder.outputs else _like(like.result, values)


def _like(result: Any, values: Mapping[Any, Any]) -> Any:
    """A result of the same type with these fields; the others are None."""
    if isinstance(result, tuple | list):
        fields = [values.get(i) for i in range(len(result))]
        names = getattr(result, "_fields", None)
        if names:
            return type(result)(*(values.get(n, f) for n, f in zip(names, fields, strict=True)))
        return type(result)(fields)
    if dataclasses.is_dataclass(result):  # a ModelOutput, too, which is a dict besides
        fields = dataclasses.fields(result)
        made = type(result)(**{f.name: values.get(f.name) for f in fields if f.init})
        for f in fields:
            if not f.init:
                object.__setattr__(made, f.name, values.get(f.name))
        return made
    if isinstance(result, Mapping):
        return {name: values.get(name) for name in result}
    out = copy.copy(result)
    for name in vars(result):
        setattr(out, name, values.get(name))
    return out
