"""Requests for examples and their answers, as messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from orchmllm.batch import Example
from orchmllm.data.loading.workers import Call, Result
from orchmllm.data.wire import WireError
from orchmllm.plan.layout import AUDIO

_KEYS = {"text", "segments"}
ArrayKind = tuple[np.dtype, tuple[int, ...]]  # dtype and shape


def to_request(calls: list[Call]) -> dict:
    """calls: of `load`, of whose keys text and segments are sent."""
    return {"load": [[index, {k: v for k, v in keys.items() if k in _KEYS}]
                     for (index,), keys in calls]}


def from_request(message: dict, num_examples: int | None) -> list[Call]:
    """Raises ValueError for what is no request. num_examples: None where they have no end."""
    calls = []
    for item in _list(message.get("load")):
        index, keys = _list(item, 2)
        if type(index) is not int or not 0 <= index < (num_examples or 1 << 60):
            raise ValueError(f"example {index!r:.80} does not exist")
        if not isinstance(keys, dict) or keys.keys() != _KEYS or type(keys["text"]) is not bool:
            raise ValueError(f"a request has the keys {list(keys)!r:.200}")
        if not all(type(s) is int and 0 <= s < 1 << 30 for s in _list(keys["segments"])):
            raise ValueError(f"segments of a request are {keys['segments']!r:.200}")
        calls.append(((index,), keys))
    return calls


def _list(value: object, length: int | None = None) -> list:
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError(f"a request holds {value!r:.80} where a list is expected")
    return value


def to_answer(results: list[Result]) -> tuple[dict, list[np.ndarray]]:
    """(header, arrays) of what calls of `load` returned, in the order of `planned_arrays`."""
    arrays = []
    for example, _ in results:
        if example.token_ids is not None:
            arrays += [example.token_ids.numpy(), example.labels.numpy()]
        arrays += [media.numpy() for _, media in sorted(example.media.items())]
    return {"failed": [failed for _, failed in results]}, arrays


def planned_arrays(calls: list[Call], dataset: Any) -> list[ArrayKind]:
    """The arrays that answer calls of the dataset's `load`: of an example its token ids and labels,
    if they are asked for, and its media by segment."""
    out = []
    for (index,), keys in calls:
        layout = dataset.layout(index)
        if keys["text"]:
            out += 2 * [(np.dtype(np.int32), (int(layout.num_tokens.sum()),))]
        for segment in sorted(keys["segments"]):
            rows = int(layout.rows[segment])
            out.append((np.dtype(np.float32), (rows, dataset.audio.row_size))
                       if layout.modality[segment] == AUDIO
                       else (np.dtype(np.uint8), (rows, dataset.vision.row_size)))
    return out


def from_answer(message: dict, arrays: list[np.ndarray], calls: list[Call],
                planned: list[ArrayKind]) -> list[Result]:
    """arrays: of the shapes in `planned`. Raises WireError where they are not, and for a message
    that is no answer to `calls`."""
    if len(arrays) != len(planned):
        raise WireError(f"{len(arrays)} arrays came where {len(planned)} were planned")
    for array, (dtype, shape) in zip(arrays, planned, strict=True):
        if array.dtype != dtype or array.shape != shape:
            raise WireError(f"{array.dtype} {array.shape} came where {dtype} {shape} was planned")
    left, out = map(torch.from_numpy, arrays), []
    try:
        for ((index,), keys), told in zip(calls, message["failed"], strict=True):
            token_ids, labels = (next(left), next(left)) if keys["text"] else (None, None)
            media = {segment: next(left) for segment in sorted(keys["segments"])}
            failed = [(int(s), str(reason), int(modality)) for s, reason, modality in told]
            out.append((Example(index, token_ids, labels, media), failed))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise WireError(f"an answer cannot be read: {type(error).__name__}: {error}") from error
    return out
