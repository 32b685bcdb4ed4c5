"""The lengths of a vision-language data set: what the model's own processor makes of its rows."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from orchmllm.data.media.headers import image_header
from orchmllm.data.media.medium import Medium
from orchmllm.plan.layout import VISION

SMALL = 4096  # values that a processor may read: grids and sizes, no pixels


def lengths_of(
    processor: Any, dataset: Sequence[Mapping[str, Any]],
    render: Callable[[Mapping], tuple[str | list, list]] | None = None, **options: Any,
) -> list[int]:
    """Tokens of each row, as the processor will make them, without decoding an image: give them to
    BalancedDataLoader, balance or balance_trainer as `lengths`.

    processor: of a vision-language model of transformers. dataset: rows with `messages` in
    transformers' form, or `text`, and none or several images in `images`, or one in `image`, or in
    the parts of the messages. An image is a PIL image, an array or tensor of (height, width, 3) or
    (3, height, width), or a file's path or bytes, whose header is read; columns of `datasets` are
    fast if cast to Image(decode=False). render: instead, row -> (its text or messages, its images).
    options: those of your processor's call, such as max_length and truncation.

    The processor sees images that have a size alone, on the meta device, or black ones where its
    image processor reads pixels; what it makes of images of a size is kept in memory for the
    call. Keep the list yourself for the next run (it is JSON). Raises ValueError naming the row
    that has none of these or that the processor refuses."""
    processor = copy.copy(processor)
    processor.image_processor = _BySize(processor.image_processor)
    return [_length(processor, dataset[i], i, render or _rendered, options)
            for i in range(len(dataset))]


def _length(processor: Any, row: Mapping, index: int, render: Callable, options: dict) -> int:
    try:
        text, images = render(row)
        how = {"add_special_tokens": isinstance(text, str), **options}  # the template has its own
        if not isinstance(text, str):
            text = processor.apply_chat_template(text, tokenize=False)
        blank = [np.broadcast_to(np.uint8(0), (3, *_size(image))) for image in images]
        out = processor(text=[text], images=blank or None, **how)
    except Exception as error:  # of a row or a processor that is not ours
        raise ValueError(f"row {index}: its length is not known: {error!r}") from error
    return len(out["input_ids"][0])


def _rendered(row: Mapping) -> tuple[str | list, list]:
    """The messages or text of a row and its images; where no message says where these stand, they
    precede the first text of the user, as TRL puts them."""
    one = row.get("image")
    images = list(row.get("images") or ([] if one is None else [one]))
    if "messages" not in row:
        return row["text"], images
    messages = [dict(m, content=[{"type": "text", "text": m["content"]}] if isinstance(
        m["content"], str) else m["content"]) for m in row["messages"]]
    shown = [p for m in messages for p in m["content"] if p["type"] == "image"]
    if not shown and images:
        user = next(m for m in messages if m["role"] == "user")
        user["content"] = [{"type": "image"}] * len(images) + user["content"]
    return messages, images or [p["image"] for p in shown]


def _size(image: Any) -> tuple[int, int]:
    """(height, width) as displayed."""
    if isinstance(image, str):
        image = {"path": image}
    if isinstance(image, Mapping):
        path = image.get("path") or ""
        width, height = image_header(Medium(VISION, path, path, data=image.get("bytes")))
        return height, width
    if hasattr(image, "shape"):
        return tuple(image.shape[1:] if image.shape[0] in (1, 3) else image.shape[:2])
    return image.height, image.width


class _BySize:
    """An image processor that keeps what it made of images of the same sizes, without pixels."""

    def __init__(self, inner: Any) -> None:
        self._inner, self._known = inner, {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, images: Any, *args: Any, **options: Any) -> Any:
        key = repr((tree_map(np.shape, images), args, options))
        if key not in self._known:
            sized = tree_map(lambda image: torch.empty(
                image.shape, dtype=torch.uint8, device="meta"), images)
            try:
                made = self._inner(sized, *args, **options)
            except (AttributeError, RuntimeError, TypeError, ValueError):  # it reads pixels
                made = self._inner(images, *args, **options)
            self._known[key] = type(made), tree_map(_without_pixels, dict(made))
        kind, values = self._known[key]
        return kind(dict(values))


def _without_pixels(value: Any) -> Any:
    """Of the same shape, and small if it is large."""
    if hasattr(value, "shape") and np.prod(value.shape) > SMALL:
        return np.broadcast_to(np.float32(0), value.shape)
    return value
