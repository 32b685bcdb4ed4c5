"""Values that ranks send each other, as bytes. Nothing is unpickled: what comes is numbers, texts,
arrays, and records of the classes that are named here.

    header bytes (u64) | header (JSON) | arrays and strings of bytes, one after the other

In the header a number, a text, a truth value and null stand for themselves; anything else is a list
that begins with its kind.
"""

from __future__ import annotations

import json
import math
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.batch import ProcessedExample
from orchmllm.comm.pieces import Form, Piece
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.lengths import MeasuredExample
from orchmllm.data.media.medium import Frame, MediaError, Medium, Sampled, VideoHeader
from orchmllm.data.text.spans import Text
from orchmllm.plan.layout import BatchLayout

RECORDS = {record.__name__: record for record in (
    BatchLayout, Form, Frame, MeasuredExample, MediaError, Medium, Piece, ProcessedExample, Sampled,
    Text, Turn, VideoHeader)}
DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def packed(value: Any) -> np.ndarray:
    """(n,) uint8 of a value. Raises TypeError for one that holds something else."""
    blobs: list[np.ndarray] = []
    header = json.dumps(_written(value, blobs)).encode()
    size = np.array([len(header)], np.uint64).view(np.uint8)
    return np.concatenate([size, np.frombuffer(header, np.uint8), *blobs])


def unpacked(data: np.ndarray) -> Any:
    """The value of data (n,) uint8; its arrays are copies. Raises KeyError for an unknown kind."""
    end = 8 + int(data[:8].view(np.uint64)[0])
    return _read(json.loads(data[8:end].tobytes()), _Rest(data[end:]))


class _Rest:
    """What comes after the header, in its order."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = data

    def take(self, size: int) -> np.ndarray:
        """A copy of the next `size` bytes."""
        part, self._data = self._data[:size].copy(), self._data[size:]
        return part


def _written(value: Any, blobs: list[np.ndarray]) -> Any:
    """The value in the header. blobs: gets the (n,) uint8 of what is not in it."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        blobs.append(np.frombuffer(value, np.uint8))
        return ["bytes", len(value)]
    if isinstance(value, np.ndarray | Tensor):
        kind = "array" if isinstance(value, np.ndarray) else "tensor"
        array = np.ascontiguousarray(value if kind == "array" else value.numpy())
        blobs.append(array.reshape(-1).view(np.uint8))
        return [kind, array.dtype.name, value.shape]
    if isinstance(value, torch.dtype):
        return ["dtype", str(value)]
    if isinstance(value, dict):
        return ["dict", [[_written(k, blobs), _written(v, blobs)] for k, v in value.items()]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_written(v, blobs) for v in value]]
    name = type(value).__name__
    if RECORDS.get(name) is not type(value):
        raise TypeError(f"a {name} is not sent between ranks")
    return [name, [_written(v, blobs) for v in _fields(value)]]


def _fields(record: Any) -> list[Any]:
    """The arguments that make a record."""
    if isinstance(record, MediaError):
        return [record.path, record.reason, record.segment, record.modality]
    if is_dataclass(record):
        return [getattr(record, field.name) for field in fields(record)]
    return [*record]


def _read(value: Any, rest: _Rest) -> Any:
    if not isinstance(value, list):
        return value
    kind, first, *shape = value
    if kind == "bytes":
        return rest.take(first).tobytes()
    if kind in ("array", "tensor"):
        dtype, [shape] = np.dtype(first), shape
        array = rest.take(dtype.itemsize * math.prod(shape)).view(dtype).reshape(shape)
        return array if kind == "array" else torch.from_numpy(array)
    if kind == "dtype":
        return DTYPES[first]
    if kind == "dict":
        return {_read(k, rest): _read(v, rest) for k, v in first}
    parts = [_read(part, rest) for part in first]
    if kind in ("list", "tuple"):
        return parts if kind == "list" else tuple(parts)
    return RECORDS[kind](*parts)
