"""Requests for examples and their answers, as messages."""

from __future__ import annotations

import numpy as np
import torch

from orchmllm.batch import Example
from orchmllm.data.loading.workers import Call, Result
from orchmllm.data.wire import WireError
from orchmllm.plan.layout import AUDIO, BatchLayout

_KEYS = {"text", "segments", "encoded"}


def to_request(calls: list[Call]) -> dict:
    """calls: of `load`, with the keys text, segments and encoded, of which nothing else is sent."""
    return {"load": [[index, {k: v for k, v in keys.items() if k in _KEYS}]
                     for (index,), keys in calls]}


def from_request(message: dict, num_examples: int | None) -> list[Call]:
    """Raises ValueError for what is no request. num_examples: None where they have no end."""
    calls = []
    for item in _list(message.get("load")):
        index, keys = _list(item, 2)
        if type(index) is not int or not 0 <= index < (num_examples or 1 << 60):
            raise ValueError(f"example {index!r:.80} does not exist")
        if not isinstance(keys, dict) or not keys.keys() <= _KEYS or (
                type(keys.get("text", True)) is not bool):
            raise ValueError(f"a request has the keys {list(keys)!r:.200}")
        for name in ("segments", "encoded"):
            if not all(type(s) is int and 0 <= s < 1 << 30 for s in _list(keys.get(name, []))):
                raise ValueError(f"{name} of a request are {keys[name]!r:.200}")
        calls.append(((index,), keys))
    return calls


def _list(value: object, length: int | None = None) -> list:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError(f"a request holds {value!r:.80} where a list is expected")
    return value


def to_answer(results: list[Result]) -> tuple[dict, list[np.ndarray]]:
    """(header, arrays) of what calls of `load` returned."""
    message, arrays = [], []
    for example, failed in results:
        text = example.token_ids is not None
        message.append({"text": text, "segments": list(example.media), "failed": failed})
        arrays += [t.numpy() for t in (example.token_ids, example.labels) if text]
        arrays += [m.numpy() for m in example.media.values()]
    return {"results": message}, arrays


def from_answer(message: dict, arrays: list[np.ndarray], calls: list[Call],
                layouts: list[BatchLayout], row_sizes: tuple[int, int]) -> list[Result]:
    """arrays: tokens and labels, each (L,), and media (rows, values) of each example. row_sizes:
    values of a row of vision and audio. Raises WireError where the answer is not what was asked
    for, in lengths or types."""
    left, out = iter(arrays), []
    try:
        for ((index,), keys), layout, got in zip(calls, layouts, message["results"], strict=True):
            text, segments = keys.get("text", True), sorted(keys["segments"])
            if got["text"] is not text or got["segments"] != segments:
                raise WireError(f"another part of example {index} came than was asked for")
            token_ids, labels = [_tokens(next(left), layout) if text else None for _ in range(2)]
            media = {s: _rows(next(left), layout, s, s in keys.get("encoded", ()), row_sizes)
                     for s in segments}
            failed = [(int(s), str(reason), int(modality))
                      for s, reason, modality in got["failed"]]
            out.append((Example(index, token_ids, labels, media), failed))
        if next(left, None) is not None:
            raise WireError("more came than was asked for")
    except (ArithmeticError, KeyError, TypeError, ValueError, StopIteration) as error:
        raise WireError(f"an answer cannot be read: {type(error).__name__}: {error}") from error
    return out


def _tokens(array: np.ndarray, layout: BatchLayout) -> torch.Tensor:
    if array.dtype != np.int32 or array.shape != (int(layout.num_tokens.sum()),):
        raise WireError(f"example {layout.example_id[0]}: {array.dtype} {array.shape} came for "
                        f"{layout.num_tokens.sum()} tokens")
    return torch.from_numpy(array)


def _rows(array: np.ndarray, layout: BatchLayout, segment: int, encoded: bool,
          row_sizes: tuple[int, int]) -> torch.Tensor:
    audio = bool(layout.modality[segment] == AUDIO)
    shape = (int(layout.rows[segment]), row_sizes[audio])
    fits = (array.dtype == np.uint8 and array.ndim == 1 if encoded else
            array.dtype == (np.float32 if audio else np.uint8) and array.shape == shape)
    if not fits:
        raise WireError(f"example {layout.example_id[0]}, segment {segment}: {array.dtype} "
                        f"{array.shape} came where {shape} was planned")
    return torch.from_numpy(array)


def answer_bytes(calls: list[Call], layouts: list[BatchLayout], row_bytes: tuple[int, int],
                 encoded_bytes: int) -> int:
    """The most that an answer may hold. row_bytes: of vision and audio; encoded_bytes: of a medium
    that is not decoded."""
    total = 0
    for (_, keys), layout in zip(calls, layouts, strict=True):
        for s in keys["segments"]:
            rows = int(layout.rows[s]) * row_bytes[int(layout.modality[s] == AUDIO)]
            total += encoded_bytes if s in keys.get("encoded", ()) else rows
        total += 16 * int(layout.num_tokens.sum())
    return total
