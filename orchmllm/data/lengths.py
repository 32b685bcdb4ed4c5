"""Rows -> lengths, before anything is decoded: tokens in batches, media from their headers.

Every way to an example goes through `LengthReader.plan`: the index, a run without one, lint and
stats. A row that cannot be used (its JSON, its turns, a header) keeps its place in the order of
examples as a stand-in of one token that nothing is learnt from: what is sampled when is then the
same on every rank, with or without an index, and after somebody mends a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, compress
from operator import not_
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import Conversation, media_of
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import OUT_OF, MediaError, Medium, RowError
from orchmllm.data.media.shapes import Size
from orchmllm.data.media.video_processor import items_of
from orchmllm.data.storage.remote import fetch_ahead
from orchmllm.data.text.processor import Processor
from orchmllm.data.text.spans import Span, Tokens
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import AUDIO, MADE, TEXT, BatchLayout


class MeasuredExample(NamedTuple):
    """One example as planned. token_ids (T,) int32, supervised (T,) bool: of its text. media: in
    reading order, those after the cut too. problem: why it is a stand-in, or how its row differs
    from the index, or None. turns, sizes, spans, digest: the conversation, the sizes of the media
    before the cut, what the chat template wrote, and Tokens.digest; the last two, token_ids and
    supervised are empty where the lengths are an index's."""

    layout: BatchLayout
    token_ids: np.ndarray
    supervised: np.ndarray
    media: list[Medium]
    problem: MediaError | None
    turns: Conversation = ()
    sizes: Sequence[tuple[int, int]] = ()
    spans: Sequence[Span] = ()
    digest: bytes = b""

    @property
    def media_at(self) -> dict[int, Medium]:
        """By segment; those after the cut are left out."""
        at = np.flatnonzero(self.layout.modality != TEXT).tolist()
        return dict(zip(at, self.media, strict=False))

    @property
    def num_bytes(self) -> int:
        """Of media that the row itself holds."""
        return sum(len(m.data) for m in self.media if m.data is not None)


class LengthReader:
    """Measures rows as the processor of a model makes them; the tokenizer and the chat template are
    the model's. max_example_tokens: LLM positions after which an example ends (0: no limit); a
    medium that would cross it is left out whole.

    Of a medium, num_tokens of a layout counts its features alone, and tokens that the processor
    writes between them belong to the text after them. Of an image, grid is (t, h, w), t tiles of
    h x w patches, rows and attn_len their product; of a clip, rows are the frames that are encoded,
    padding of a window too."""

    def __init__(self, processor: Processor, max_example_tokens: int = 0) -> None:
        self.processor, self.tokenizer = processor, processor.tokenizer
        self.max_example_tokens = max_example_tokens

    @property
    def identity(self) -> list:
        """What decides, beside the rows, which lengths they have."""
        return ["processor", self.processor.digest, self.max_example_tokens]

    def plan(self, read_row: Callable[[int], Conversation], rows: Sequence[int]
             ) -> list[MeasuredExample]:
        """Lengths of `rows`, as `read_row` (DataSource.conversation) gives them; their numbers are
        the ids of the examples. Never raises for bad data."""
        read: list[Conversation | MediaError] = []
        made = self.processor.made  # marks the images that the model makes
        for row in rows:
            try:
                turns = read_row(row)
                read.append(turns if made is None else made.told(turns))
            except RowError as error:
                read.append(MediaError(error.file, error.reason, modality=error.modality))
            except OSError as error:
                if error.errno in OUT_OF:
                    raise
                read.append(MediaError(str(error.filename or ""), f"cannot be read: {error}"))
        usable = [turns for turns in read if not isinstance(turns, MediaError)]
        fetch_ahead([medium.path for turns in usable for medium in media_of(turns)])
        return [self.stand_in(found, i) if isinstance(found, MediaError)
                else self.measure(found, i) for found, i in zip(read, rows, strict=True)]

    def measure(self, turns: Conversation, example_id: int) -> MeasuredExample:
        """Of a conversation. Never raises for bad data."""
        try:
            spans = self.processor.rendered(turns)
            every = items_of(turns, self.processor.videos)
            sizes = [self._size([*chain.from_iterable(items)]) for items in every]
            made = [items[0][0].modality == MADE for items in every]
            tokens = self.processor.tokens(spans, [*compress(sizes, map(not_, made))],
                                           self.max_example_tokens)
            if any(made):
                tokens = self.processor.made.counted(tokens, [*compress(sizes, made)])
            layout = layout_of(example_id, tokens)
        except RowError as error:
            return self.stand_in(MediaError(error.file, error.reason), example_id)
        except MediaError as error:
            return self.stand_in(error, example_id)
        of_items = [size[:2] for items, size in zip(every, sizes, strict=True) for _ in items]
        spans = [Medium(span.modality, "") if isinstance(span, Medium) else span for span in spans]
        return MeasuredExample(
            layout, tokens.ids, tokens.learnt, [item[0] for item in chain.from_iterable(every)],
            None, turns, of_items[: int((layout.modality != TEXT).sum())], spans, tokens.digest)

    def _size(self, media: list[Medium]) -> Size:
        """Of an image, a clip, or the frames of a video. Raises MediaError, and RowError."""
        first = media[0]
        try:
            if first.modality == AUDIO:
                return Size(0, self.processor.audio.resampled(*audio_header(first)))
            sizes = sorted({image_header(medium)[::-1] for medium in media})
        except MediaError as error:
            error.segment, error.modality = 0, first.modality
            raise
        if len(sizes) > 1:
            raise RowError("frames of a video have {} x {} and {} x {} pixels (height x width): "
                           "give all of them one size".format(*sizes[0], *sizes[-1]), first.name)
        return Size(*sizes[0], first.sampled)

    def stand_in(
        self, problem: MediaError, example_id: int, layout: BatchLayout | None = None
    ) -> MeasuredExample:
        """One token that nothing is learnt from, in place of a row that cannot be used."""
        return MeasuredExample(
            layout or BatchLayout.from_segments(example_id, 0, [(TEXT, text_lengths(1))]),
            np.array([self.tokenizer.end_id or 0], np.int32), np.zeros(1, bool), [], problem)


def layout_of(example_id: int, tokens: Tokens) -> BatchLayout:
    """Raises RowError for an example that nothing is learnt of."""
    targets = int(tokens.learnt[1:].sum())  # no position comes before the first token
    if targets == 0:
        raise RowError("nothing to learn: no text of an assistant (in the first "
                       "data.max_example_tokens tokens, where that is set)")
    return BatchLayout.from_segments(example_id, targets, tokens.segments)
