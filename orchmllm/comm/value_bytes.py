"""Examples and other values as bytes, for their way to another rank.

Not pickle: what a rank receives is never executed, and a type that cannot travel is an error that
names the place in the value. Layout: 8 bytes little-endian length of the skeleton, the skeleton
(UTF-8 JSON), then the bytes of strings of bytes, arrays and tensors in the order of the skeleton.
In the skeleton None, a truth value, a number and a text stand for themselves; anything else is a
list that begins with its kind.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import cache
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

Records = Mapping[str, type]  # by name


def encode(value: Any, records: Records | None = None, name: str = "example") -> np.ndarray:
    """(num_bytes,) uint8. Takes None, bool, int, float, str, bytes, dense CPU tensors and their
    dtypes, arrays and numpy scalars, dicts (keys str or int), lists and tuples of them, and objects
    of `records`, which are made of their attributes; by default NamedTuples of modules. Raises
    TypeError that begins with `name` and the place of anything else."""
    buffers: list[np.ndarray] = []
    packed = _pack(value, name, buffers, records)
    skeleton = json.dumps(packed, separators=(",", ":")).encode()
    head = np.array([len(skeleton)], "<i8").view(np.uint8)
    return np.concatenate([head, np.frombuffer(skeleton, np.uint8), *buffers])


def decode(data: np.ndarray, records: Records | None = None) -> Any:
    """Inverse of `encode`; arrays and tensors own their memory and are writable. data: (bytes,)
    uint8. Raises ValueError for bytes that `encode` did not write, and for unknown classes."""
    end = 8 + int(data[:8].view("<i8")[0])
    skeleton = json.loads(data[8:end].tobytes())
    value, used = _unpack(skeleton, data, end, records)
    if used != len(data):
        raise ValueError(f"a value of {len(data)} bytes was read to byte {used}")
    return value


def _pack(value: Any, path: str, buffers: list[np.ndarray], records: Records | None) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is dict:
        for key in value:
            if type(key) not in (str, int):
                raise TypeError(f"{path} has the key {key!r}: keys must be str or int")
        return ["d", [[k, _pack(v, f"{path}[{k!r}]", buffers, records)] for k, v in value.items()]]
    if kind in (list, tuple):
        return ["l" if kind is list else "u",
                [_pack(v, f"{path}[{i}]", buffers, records) for i, v in enumerate(value)]]
    if _class(kind.__module__, kind.__qualname__, records) is kind:
        return ["n", [_pack(getattr(value, a), f"{path}.{a}", buffers, records)
                      for a in _arguments(kind)], kind.__module__, kind.__qualname__]
    if kind is bytes:
        buffers.append(np.frombuffer(value, np.uint8))
        return ["b", len(value)]
    if kind is torch.dtype:
        return ["y", str(value).removeprefix("torch.")]
    if kind is Tensor:  # what a subclass adds would be lost, as the mask of a masked array
        return _pack_tensor(value, path, buffers)
    is_array, is_scalar = kind in (np.ndarray, np.memmap), isinstance(value, np.generic)
    if (is_array or is_scalar) and value.dtype.kind in "biufcSU":
        dtype = value.dtype if value.dtype.itemsize else np.dtype(f"{value.dtype.kind}1")
        buffers.append(np.ascontiguousarray(value, dtype).reshape(-1).view(np.uint8))
        return ["s" if is_scalar else "a", len(buffers[-1]), dtype.str, list(value.shape)]
    raise TypeError(
        f"{path} is a {kind.__module__}.{kind.__qualname__}, which cannot be sent to another rank: "
        "use tensors, arrays, numbers, strings, bytes, and dicts, lists, tuples or NamedTuples (of "
        "a module, not of a function) of them; or give `lengths`, with which nothing is sent")


def _class(module: str, name: str, records: Records | None) -> type | None:
    """The record of that name, or the NamedTuple class of that name in a module that is loaded;
    None if there is none: what arrives imports nothing and can make nothing else."""
    if records is not None:
        return records.get(name)
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_named = isinstance(found, type) and issubclass(found, tuple) and hasattr(found, "_make")
    return found if is_named else None


@cache
def _arguments(kind: Any) -> tuple[str, ...]:
    """Of its constructor; an object has an attribute for each."""
    return getattr(kind, "_fields", None) or tuple(signature(kind).parameters)


def _pack_tensor(value: Tensor, path: str, buffers: list[np.ndarray]) -> list:
    if value.device.type != "cpu" or value.layout != torch.strided or value.is_quantized:
        raise TypeError(f"{path} is a {value.layout} tensor of {value.dtype} on {value.device}: "
                        "only dense CPU tensors of plain types can be sent to another rank")
    raw = value.detach().resolve_conj().resolve_neg().contiguous()
    raw = raw.as_strided((raw.numel(),), (1,))  # a tensor of one value may have any stride
    buffers.append(raw.view(torch.uint8).numpy())
    return ["t", len(buffers[-1]), str(value.dtype).removeprefix("torch."), list(value.shape)]


def _unpack(node: Any, data: np.ndarray, at: int, records: Records | None) -> tuple[Any, int]:
    """(value, position after its bytes)."""
    if type(node) is not list:
        return node, at
    kind, content = node[0], node[1]
    if kind == "d":
        out = {}
        for key, child in content:
            out[key], at = _unpack(child, data, at, records)
        return out, at
    if kind in ("l", "u", "n"):
        items = []
        for child in content:
            item, at = _unpack(child, data, at, records)
            items.append(item)
        if kind == "n":
            return _made(*node[2:], items, records), at
        return (items if kind == "l" else tuple(items)), at
    if kind == "y":
        return getattr(torch, content), at
    end = at + content
    if kind == "b":
        return data[at:end].tobytes(), end
    dtype, shape = node[2:]
    if kind == "t":
        return torch.tensor(data[at:end]).view(getattr(torch, dtype)).reshape(shape), end
    array = data[at:end].copy().view(dtype).reshape(shape)
    return (array[()] if kind == "s" else array), end


def _made(module: str, name: str, items: list[Any], records: Records | None) -> Any:
    found: Any = _class(module, name, records)
    if found is None:
        raise ValueError(f"a {module}.{name} came from another rank, and is not known here")
    return found._make(items) if hasattr(found, "_make") else found(*items)
