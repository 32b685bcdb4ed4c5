"""The lengths of a data set that is not tokenised: what the model's own processor, or the loop's
own collate function, makes of its rows."""

from __future__ import annotations

import copy
import logging
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock, get_ident
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from orchmllm.data.media.headers import image_header
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.loader.positions import tensor_in
from orchmllm.loader.wrapped import plain
from orchmllm.plan.layout import VISION

log = logging.getLogger("orchmllm.loader")
SMALL = 4096  # values that a processor may read: grids and sizes, no pixels
KEPT = 10_000  # sizes of images whose results are kept
_patching = RLock()  # of the threads that compute lengths


def lengths_of(
    processor: Any, dataset: Sequence[Mapping[str, Any]],
    render: Callable[[Mapping], tuple[str | list, list]] | None = None, **options: Any,
) -> list[int]:
    """Tokens of each row, as the processor will make them, without decoding an image: give them to
    BalancedDataLoader, balance or balance_trainer as `lengths`.

    processor: of a vision-language model of transformers. dataset: rows with `messages` in
    transformers' form, or `text`, or TRL's `prompt` with or without a `completion`, and none or
    several images in `images`, or one in `image`, or in the parts of the messages. An image is a
    PIL image, an array or tensor of (height, width, 3) or (3, height, width), or a file's path or
    bytes, whose header is read; columns of `datasets` are fast if cast to Image(decode=False).
    render: instead, row -> (its text or messages, its images). options: those of your processor's
    call, such as max_length and truncation.

    The processor sees images that have a size alone, on the meta device, or black ones where its
    image processor reads pixels; what it makes of images of a size is kept in memory for the
    call. Keep the list yourself for the next run (it is JSON). Raises ValueError naming the row
    that has none of these or that the processor refuses."""
    kind = type(processor.image_processor)
    with _by_size(next(c for c in kind.__mro__ if "__call__" in vars(c)), {}):
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
    name = next((n for n in ("messages", "prompt") if n in row), "text")
    said = row[name] + row["completion"] if name == "prompt" and "completion" in row else row[name]
    if isinstance(said, str):
        return said, images
    messages = [dict(m, content=[{"type": "text", "text": m["content"]}] if isinstance(
        m["content"], str) else m["content"]) for m in said]
    shown = [p for m in messages for p in m["content"] if p["type"] == "image"]
    if not shown and images:
        user = next(m for m in messages if m["role"] == "user")
        user["content"] = [{"type": "image"}] * len(images) + user["content"]
    return messages, images or [p["image"] for p in shown]


def known_lengths(loader: DataLoader, given: Mapping[str, Any]) -> dict[str, Any]:
    """The option for a BalancedDataLoader over a Trainer's loader, unless one is given."""
    if given.keys() & {"lengths", "length_fn"}:
        return {}
    lengths = CollatedLengths(plain(loader))
    is_stream = isinstance(lengths.data, IterableDataset)
    return {"length_fn": lengths.of} if is_stream else {"lengths": lengths}


class CollatedLengths:
    """The length of an example by its index, or of a loaded one (`of`): the positions of the batch
    that collate_fn makes of it alone, of its longest row where an example has several. Images are
    not decoded where the data set is one of `datasets`; image processors of transformers are asked
    by the size of images alone."""

    def __init__(self, loader: DataLoader) -> None:
        """Raises ValueError if collate_fn or the data set draws random numbers: the loop's would
        then be others than without lengths."""
        self.data, self._collate = loader.dataset, loader.collate_fn
        self._known: dict[str, Any] = {}
        self._proven = False
        if isinstance(self.data, IterableDataset):
            return
        self._rows = _with_blank_images(self.data)
        self._lengths = np.full(len(self.data), -1)
        before = _random_state()
        self(0)
        if _random_state() != before:
            raise ValueError("reading and collating an example draws random numbers, so its length "
                             "is not found out by that: give lengths or length_fn")

    def __call__(self, index: int) -> int:
        """Raises ValueError naming the row whose length is not known."""
        if self._lengths[index] < 0:
            try:
                self._lengths[index] = self.of(self._rows[index])
                if self._known and not self._proven:
                    self._prove(index)
            except Exception as error:  # of a data set or a collate_fn that is not ours
                raise ValueError(f"row {index}: its length is not known: {error!r}; give lengths "
                                 "or length_fn") from error
        return int(self._lengths[index])

    def of(self, example: Any) -> int:
        """Of a loaded example. Raises ValueError if its batch has no positions."""
        if isinstance(example, Mapping) and "input_ids" in example:
            return len(example["input_ids"])
        from transformers.image_processing_utils import BaseImageProcessor

        example = tree_map(lambda leaf: leaf, example)  # TRL's collate_fn changes its dicts
        with _by_size(BaseImageProcessor, self._known):
            return _positions(self._collate([example]))

    def _prove(self, index: int) -> None:
        """The first example with images has the length that its own images give it."""
        self._proven = True
        length = _positions(self._collate([tree_map(lambda leaf: leaf, self.data[index])]))
        if length != self._lengths[index]:
            raise ValueError(f"with its images {length}, by their sizes {self._lengths[index]}")


def _positions(batch: Any) -> int:
    mask, ids = (tensor_in(batch, name) for name in ("attention_mask", "input_ids"))
    if mask is not None and mask.dim() == 2:
        return int(mask.sum(-1).max())
    if ids is None or not ids.dim():
        raise ValueError("the collated batch has neither input_ids nor an attention_mask of "
                         "(rows, positions)")
    return ids.shape[-1]


def _random_state() -> str:
    return repr((torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1:3]))


def _with_blank_images(dataset: Any) -> Any:
    """A data set of `datasets` whose images are black ones of their size; any other as it is."""
    of = sys.modules.get("datasets")
    if of is None or not isinstance(dataset, of.Dataset):
        return dataset

    class Blank(of.Image):
        def decode_example(self, value: dict, token_per_repo_id: Any = None) -> Any:
            try:
                height, width = _size(value)
            except (MediaError, OSError, ValueError):  # of a kind that has to be decoded
                return super().decode_example(value, token_per_repo_id)
            return sys.modules["PIL.Image"].new("RGB", (width, height))

    def blank(feature: Any) -> None:
        if type(feature) is of.Image:
            feature.__class__ = Blank
        inner = getattr(feature, "feature", feature)  # of a list
        parts = inner.values() if isinstance(inner, dict) else inner if isinstance(
            inner, list) else [inner] if inner is not feature else []
        for part in parts:
            blank(part)

    dataset = copy.deepcopy(dataset)  # which shares the table
    blank(dataset.features)
    return dataset


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


@contextmanager
def _by_size(kind: type, known: dict[str, Any]) -> Iterator[None]:
    """Within it image processors of `kind` that this thread calls answer by the sizes of images,
    without pixels. known: their answers so far."""
    def answer(self: Any, images: Any, *args: Any, **options: Any) -> Any:
        if get_ident() != thread:
            return call(self, images, *args, **options)
        shapes = tree_map(lambda image: (3, *_size(image)), images)
        key = repr((id(self), shapes, args, options))
        if key not in known:
            sized = tree_map(lambda image: torch.empty(
                3, *_size(image), dtype=torch.uint8, device="meta"), images)
            try:
                made = call(self, sized, *args, **options)
            except (AttributeError, RuntimeError, TypeError, ValueError):  # it reads pixels
                made = call(self, images, *args, **options)
            if len(known) >= KEPT:
                known.clear()
            known[key] = type(made), tree_map(_without_pixels, dict(made))
        kind_of, values = known[key]
        return kind_of(dict(values))

    with _patching:
        call, thread = kind.__call__, get_ident()
        kind.__call__ = answer
        try:
            yield
        finally:
            kind.__call__ = call


def _without_pixels(value: Any) -> Any:
    """Of the same shape, and without memory if it is large."""
    if isinstance(value, torch.Tensor) and value.numel() > SMALL:
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    if hasattr(value, "shape") and np.prod(value.shape) > SMALL:
        return np.broadcast_to(np.float32(0), value.shape)
    return value
