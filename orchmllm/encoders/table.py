"""What all ranks know of the media of one forward: one gather of integers.

A row holds a head, a block of fixed size per encoder, then the items' integers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.comm.agree import PlanMismatchError, describe, raise_first, require_agreement
from orchmllm.comm.exchange import RaggedGather, RowGather, gather_texts
from orchmllm.encoders.items import Items
from orchmllm.encoders.spec import Encoder
from orchmllm.plan.rearrange import ranges

_HEAD = 2  # number of the forward, bytes of an error text
_FIXED = 3  # per encoder: items of this rank, integers of each, digest of the encoder's options
_TENSOR = 8  # dtype, dimensions, sizes of up to 6
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int32,
           torch.uint8, torch.bool, torch.int8)  # gloo and NCCL have no int16
PAD = "; pad to the same size and use the same dtype on all ranks"


@dataclass(frozen=True)
class LocalItems(Items):
    """This rank's items of one encoder: those of its first call, then of its second. counts: items
    per call; inputs: the arguments of the forward; options: keyword arguments of the call."""

    counts: list[int]
    inputs: Mapping[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class GatheredItems:
    """The items of one encoder on all d ranks. sizes (d,): items of each; meta (n, columns) in
    order of the rank; tensors: (dtype, shape of a row) of each packed argument, None if it was not
    given."""

    sizes: np.ndarray
    meta: np.ndarray
    tensors: list[tuple[torch.dtype, tuple[int, ...]] | None]


def describe_local(
    encoder: Encoder, owner: nn.Module, inputs: Mapping[str, Any]
) -> LocalItems:
    """This rank's items of `encoder` in the arguments of a forward. Raises ValueError."""
    given = [inputs.get(layout.value) for layout in encoder.calls.values()]
    parts = [None if value is None else layout.describe(owner, inputs)
             for layout, value in zip(encoder.calls.values(), given, strict=True)]
    _refuse_gradients(encoder, inputs)
    held = [part for part in parts if part is not None]
    options = {k: inputs[k] for k in encoder.options if inputs.get(k) is not None}
    if tensors := [k for k, value in options.items() if isinstance(value, Tensor)]:
        raise ValueError(f"encoder {encoder.name!r}: the argument {tensors[0]} is a tensor, and "
                         "what it says of each item is not known: describe the encoder with "
                         "orchmllm.Encoder (docs/encoders.md)")
    return LocalItems(
        np.concatenate([part.meta for part in held]) if held else np.zeros((0, 0), np.int64),
        tuple(_joined(encoder, owner, tensors)
              for tensors in zip(*(part.values for part in held), strict=True)),
        counts=[0 if part is None else len(part.meta) for part in parts], inputs=inputs,
        options=options)


def _refuse_gradients(encoder: Encoder, inputs: Mapping[str, Any]) -> None:
    """Gradients of media would have to move back, on ranks without media, too."""
    for name in {name for layout in encoder.calls.values() for name in layout.arguments}:
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"encoder {encoder.name!r}: the argument {name} requires gradients, "
                             "which are not computed of media that move: detach it")


def _joined(
    encoder: Encoder, owner: nn.Module, tensors: Sequence[Tensor | None]
) -> Tensor | None:
    """One argument of all calls that have items; in the dtype of the tower, where that is smaller
    and the encoder casts to it anyway."""
    known = [t for t in tensors if t is not None]
    if not known:
        return None
    if len(known) < len(tensors):
        raise ValueError(f"encoder {encoder.name!r}: an optional argument is given for one of "
                         f"{', '.join(encoder.calls)} and not for the other")
    value = known[0] if len(known) == 1 else torch.cat(known)
    if value.dtype not in _DTYPES or value.dim() > _TENSOR - 1:
        raise ValueError(f"encoder {encoder.name!r}: cannot move a tensor of {value.dtype} and "
                         f"shape {tuple(value.shape)} ({', '.join(encoder.layout.arguments)})")
    if not encoder.cast or not value.is_floating_point():
        return value
    _, tower = encoder.tower_modules(owner)[0]
    dtype = next((p.dtype for p in tower.parameters() if p.is_floating_point()), value.dtype)
    return value.to(dtype) if dtype.itemsize < value.dtype.itemsize else value


def _block(local: LocalItems, size: int) -> list[int]:
    """What the items of one encoder have in common, in `size` integers."""
    num_items, columns = local.meta.shape
    options = zlib.crc32(repr(sorted(local.options.items())).encode())
    block = [num_items, columns if num_items else 0, options]
    for value in local.values if num_items else ():
        entry = [0] * _TENSOR
        if value is not None:
            entry[0] = 1 + _DTYPES.index(value.dtype)
            entry[1: 1 + value.dim()] = [value.dim(), *value.shape[1:]]
        block += entry
    return block + [0] * (size - len(block))


class Tables:
    """Gathers the tables of a model's encoders. Constructed by all ranks together."""

    def __init__(self, encoders: Sequence[Encoder], gather: RowGather) -> None:
        self.encoders, self.gather = encoders, gather
        empty = np.zeros((0, 3), np.int64)  # the layouts look at three columns at most
        self._sizes = [_FIXED + _TENSOR * len(e.layout.rows(empty)) for e in encoders]
        self._names = [", ".join(e.layout.arguments) for e in encoders]
        self._fixed = _HEAD + sum(self._sizes)
        self._gather_tables = RaggedGather(gather, self._fixed + 128)

    def __call__(
        self, forward: int, items: Sequence[LocalItems], error: Exception | None
    ) -> list[GatheredItems]:
        """The encoders' items on all ranks. Raises, on all ranks alike, RemoteError if `error` is
        given on one of them, PlanMismatchError if they disagree."""
        fixed = [forward, len(describe(error).encode())]
        for local, size in zip(items, self._sizes, strict=False):  # none with an error
            fixed += _block(local, size)
        rows, _ = self._gather_tables(np.concatenate([fixed, *(x.meta.ravel() for x in items)]))
        require_agreement(forward, "the number of forwards with media balancing", rows[:, 0])
        raise_first(forward, gather_texts(self.gather, describe(error), rows[:, 1]), error)
        return self._items_of_all(forward, rows)

    def _items_of_all(self, forward: int, rows: np.ndarray) -> list[GatheredItems]:
        out, at = [], _HEAD
        flat, start = rows.ravel(), np.arange(len(rows)) * rows.shape[1] + self._fixed
        for encoder, size, names in zip(self.encoders, self._sizes, self._names, strict=True):
            block = rows[:, at: at + size]
            sizes, holding = block[:, 0], block[:, 0] > 0
            columns = int(_one(forward, f"the columns of encoder {encoder.name!r}", block[:, 1:2],
                               holding)[0])
            require_agreement(forward, f"the options {', '.join(encoder.options)} of encoder "
                              f"{encoder.name!r} (digest)", block[:, 2])
            length = sizes * columns
            meta = flat[ranges(start, length)].reshape(-1, columns) if columns else np.zeros(
                (int(sizes.sum()), 0), np.int64)
            tensors = block[:, _FIXED:].reshape(len(rows), -1, _TENSOR)
            out.append(GatheredItems(sizes, meta, [
                _tensor(_one(forward, f"argument {i} of encoder {encoder.name!r} ({names})",
                             tensors[:, i], holding, _shown, PAD))
                for i in range(tensors.shape[1])]))
            at, start = at + size, start + length
        return out


def _one(
    forward: int, what: str, entries: np.ndarray, holding: np.ndarray,
    show: Callable[[np.ndarray], object] = lambda entry: entry[0], cure: str = "",
) -> np.ndarray:
    """The entry (k,) of the ranks that hold items, zeros if none does. entries: (d, k). Raises
    PlanMismatchError, which shows some, if they differ."""
    there = np.unique(entries[holding], axis=0)
    if len(there) > 1:
        first = [int(np.argmax(holding & (entries == entry).all(1))) for entry in there[:4]]
        raise PlanMismatchError(f"step {forward}: ranks disagree on {what}: " + ", ".join(
            f"rank {rank} has {show(entries[rank])}" for rank in first) + cure)
    return there[0] if len(there) else np.zeros_like(entries[0])


def _tensor(entry: np.ndarray) -> tuple[torch.dtype, tuple[int, ...]] | None:
    """dtype and shape of a row of a packed argument, None if it was not given."""
    code, ndim, *shape = entry.tolist()
    return (_DTYPES[code - 1], tuple(shape[: ndim - 1])) if code else None


def _shown(entry: np.ndarray) -> str:
    found = _tensor(entry)
    return f"{found[0]} rows of shape {found[1]}" if found else "nothing"


def same_on_all_ranks(gather: RowGather, encoders: Sequence[Encoder]) -> None:
    """Raises PlanMismatchError if ranks were given other encoders."""
    text = repr([(e.name, [(k, repr(v)) for k, v in e.calls.items()], e.outputs) for e in encoders])
    digest = zlib.crc32(re.sub(" at 0x[0-9a-f]+", "", text).encode())
    require_agreement(0, "the encoders (digest)", gather(np.array([digest], np.int64))[:, 0])
