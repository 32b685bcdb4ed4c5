"""Rows -> lengths, before anything is decoded: tokens in batches, media from their headers.

Every way to an example goes through `LengthReader.plan`: the index, a run without one, lint and
stats. A row that cannot be used (its JSON, its turns, a header) keeps its place in the order of
examples as a stand-in of one token that nothing is learnt from: what is sampled when is then the
same on every rank, with or without an index, and after somebody mends a file.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import Conversation, media_of
from orchmllm.data.media.medium import OUT_OF, MediaError, Medium, RowError
from orchmllm.data.storage.remote import fetch_ahead
from orchmllm.data.text.spans import Span
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.geometry import text_lengths
from orchmllm.plan.layout import TEXT, BatchLayout


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
        """Of media that the row itself holds; the frames of a video share its file."""
        return sum({id(m.data): len(m.data) for m in self.media if m.data is not None}.values())


class LengthReader(ABC):
    """tokenizer: of the model. max_example_tokens: LLM positions after which an example ends (0: no
    limit); a medium that would cross it is left out whole."""

    def __init__(self, tokenizer: ChatTokenizer, max_example_tokens: int = 0) -> None:
        self.tokenizer, self.max_example_tokens = tokenizer, max_example_tokens

    @property
    @abstractmethod
    def identity(self) -> list:
        """What decides, beside the rows, which lengths they have."""

    @abstractmethod
    def measure(self, turns: Conversation, example_id: int) -> MeasuredExample:
        """Of a conversation. Never raises for bad data."""

    def taken(self, turns: Conversation) -> Conversation:
        """A conversation as the model takes it."""
        return turns

    def plan(self, read_row: Callable[[int], Conversation], rows: Sequence[int]
             ) -> list[MeasuredExample]:
        """Lengths of `rows`, as `read_row` (DataSource.conversation) gives them; their numbers are
        the ids of the examples. Never raises for bad data."""
        read: list[Conversation | MediaError] = []
        for row in rows:
            try:
                read.append(self.taken(read_row(row)))
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

    def stand_in(
        self, problem: MediaError, example_id: int, layout: BatchLayout | None = None
    ) -> MeasuredExample:
        """One token that nothing is learnt from, in place of a row that cannot be used."""
        return MeasuredExample(
            layout or BatchLayout.from_segments(example_id, 0, [(TEXT, text_lengths(1))]),
            np.array([self.tokenizer.end_id or 0], np.int32), np.zeros(1, bool), [], problem)
