"""What is compared when the folder of a model of transformers is opened: conversations with media
of all kinds, made by the parts of its processor and by its own call. processor: the
orchmllm.data.text.processor.Processor of the folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers import BatchEncoding

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium, RowError, Sampled
from orchmllm.data.media.shapes import Content, Size, kind_of, sized
from orchmllm.data.media_tensors import VIDEOS
from orchmllm.data.text.encoded import OneCall
from orchmllm.data.text.spans import Span, Text, Tokens
from orchmllm.plan.layout import AUDIO, VISION

# What is said in the conversations.
_SAID = ("Who is it?", " Anna,\u4e16\u754c \n\n", "\tGr\u00fc\u00dfe 1234567\r\n",
         "it's\u00a0\U0001f469\u200d\U0001f680 <b>")


def conversation(processor: Any) -> tuple[list[Span], tuple[Size, ...]]:
    """A question with a medium of each kind that the model takes, and an answer; the sizes."""
    videos = processor.videos
    kinds = [kind for kind in processor.token_ids if kind != VIDEO or (
        videos.processor is not None and processor.tokenizer.writes(VIDEO))]
    size = {VISION: Size(224, 336), VIDEO: Size(224, 336, Sampled(0, (0.0, 1.0), 2.0))}
    if processor.audio:
        size[AUDIO] = Size(0, processor.audio.sample_rate)
    asked = [part for kind in kinds for part in (Medium(kind, ""), "a")]
    talk = processor.rendered([Turn("user", tuple(asked), False), Turn("assistant", ("b",), True)])
    return talk, tuple(size[kind] for kind in kinds)


def prove(processor: Any) -> tuple[str, ...] | None:
    """The tensors that a text has beside its ids, each of which follows from these alone; None
    where the parts of the processor do not make all tensors that its own call makes. Raises
    RowError where conversations become other ids than by this call, or other ids, or others that
    are learnt, than by tokenizer.json alone."""
    talk, sizes = conversation(processor)
    media = [*map(_filled, sizes)]
    for said in _SAID:
        spans = [span._replace(text=said) if isinstance(span, Text) and span.of_data else span
                 for span in talk]
        found = processor.tokens(spans, sizes)
        _compare_ids(processor, spans, sizes, found)
        whole, wanted = processor.whole(spans, media, 0)
        if whole.segments != found.segments or not (
                np.array_equal(whole.ids, found.ids)
                and np.array_equal(whole.learnt, found.learnt)):
            raise RowError("its parts make something else of media than the whole")
    typed = tuple(name for name in wanted if name.endswith("type_ids"))
    every = _with_every_id(processor, found.ids)
    try:
        there, _ = processor.calls.whole(processor.placed(spans), media, _TheseIds(
            processor.calls.stock.tokenizer, every))
    except RowError:  # it asks its tokenizer for more than ids
        return None
    types = processor.types(torch.from_numpy(every))
    processor.calls.unused |= processor.calls.made(media)[0].keys() - wanted.keys()
    made = processor.media_of(media)[0] | dict.fromkeys(typed, processor.types(
        torch.from_numpy(found.ids)))
    is_same = _are_same(wanted, made) and _are_same(
        {name: there[name] for name in typed}, dict.fromkeys(typed, types))
    return typed if is_same else None


def _filled(size: Size) -> Content:
    """An image of noise; other media are `sized`."""
    if kind_of(size) != VISION:
        return sized(size)
    return Image.fromarray(np.random.default_rng(0).integers(
        0, 256, (size.height, size.width, 3), np.uint8))


def _compare_ids(processor: Any, spans: Sequence[Span], sizes: tuple[Size, ...],
                 found: Tokens) -> None:
    """Raises RowError where they are not those of tokenizer.json, but for some around them."""
    texts = iter(processor.calls.expanded(sizes).texts)
    ids, learnt = processor.tokenizer.encode_spans([
        Text(next(texts), False) if isinstance(span, Medium) else span for span in spans])
    added = [k for k in range(len(found.ids) - len(ids) + 1)
             if np.array_equal(found.ids[k: k + len(ids)], ids)]
    if not added or np.flatnonzero(found.learnt).tolist() != (
            np.flatnonzero(learnt) + added[0]).tolist():
        raise RowError("the processor's tokenizer has other ids for it than tokenizer.json")


def _with_every_id(processor: Any, ids: np.ndarray) -> np.ndarray:
    """The ids of a conversation, and all that there are after them but those that the processor
    counts, of which there are as many as its media have."""
    counted = [*processor.token_ids.values(), *processor.calls.placeholders.values()]
    every = range(processor.tokenizer.vocab_size)
    return np.append(ids, [id for id in every if id not in counted]).astype(np.int32)


class _TheseIds(OneCall):
    """A tokenizer that gives these ids, whatever the text."""

    def __init__(self, tokenizer: Any, ids: np.ndarray) -> None:
        super().__init__(tokenizer)
        self._given = ids

    def __call__(self, text: Sequence[str], **options: Any) -> BatchEncoding:
        return self.converted(BatchEncoding({"input_ids": [self._given.tolist()]}), options)


def _are_same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Bit by bit, but for pixels of videos, which are made by themselves."""
    return one.keys() == other.keys() and all(
        value.dtype == other[name].dtype and torch.equal(value, other[name])
        for name, value in one.items() if name != VIDEOS)
