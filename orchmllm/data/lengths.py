"""Rows -> lengths, before anything is decoded: tokens in batches, media from their headers.

Every way to an example goes through `LengthReader.plan`: the index, a run without one, lint and
stats. A row that cannot be used (its JSON, its turns, a header) keeps its place in the order of
examples as a stand-in of one token that nothing is learnt from: what is sampled when is then the
same on every rank, with or without an index, and after somebody mends a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import DOCUMENT, Conversation, media_of
from orchmllm.data.media.headers import audio_header, audio_lengths, image_header
from orchmllm.data.media.medium import OUT_OF, MediaError, Medium, RowError
from orchmllm.data.storage.remote import fetch_ahead
from orchmllm.data.text.spans import Span
from orchmllm.data.text.tokenizer import ChatTokenizer, Tokenized
from orchmllm.plan.geometry import AudioGeometry, SegmentLengths, VisionGeometry, text_lengths
from orchmllm.plan.layout import TEXT, VISION, BatchLayout

_TOO_LONG = 1 << 30  # of a medium after the cut, whatever its length


class MeasuredExample(NamedTuple):
    """One example as planned. token_ids (T,) int32, supervised (T,) bool: of its text. media: in
    reading order, those after the cut too. problem: why it is a stand-in, or how its row differs
    from the index, or None. turns, sizes, spans, digest: where a processor of transformers made the
    lengths, the conversation, the sizes of the media before the cut, what the chat template wrote,
    and Tokens.digest; the last two are empty where the lengths are an index's."""

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
    """tokenizer, vision, audio: as the model has them. max_example_tokens: LLM positions after
    which an example ends (0: no limit); a medium that would cross it is left out whole.
    has_sizes: whether its examples have sizes. media: those of a conversation, one for each
    segment."""

    has_sizes = False
    media = staticmethod(media_of)

    def __init__(self, tokenizer: ChatTokenizer, vision: VisionGeometry, audio: AudioGeometry,
                 max_example_tokens: int = 0) -> None:
        self.tokenizer, self.vision, self.audio = tokenizer, vision, audio
        self.max_example_tokens = max_example_tokens

    @property
    def fingerprint(self) -> dict[str, str]:
        """What decides, beside the rows, what examples hold."""
        return {"tokenizer": self.tokenizer.digest}

    @property
    def identity(self) -> list:
        """What decides, beside the rows, which lengths they have."""
        return [self.tokenizer.digest, asdict(self.vision), asdict(self.audio),
                self.max_example_tokens]

    def plan(self, read_row: Callable[[int], Conversation], rows: Sequence[int]
             ) -> list[MeasuredExample]:
        """Lengths of `rows`, as `read_row` (DataSource.conversation) gives them; their numbers are
        the ids of the examples. Never raises for bad data."""
        read: list[Conversation | MediaError] = []
        for row in rows:
            try:
                read.append(read_row(row))
            except RowError as error:
                read.append(MediaError(error.file, error.reason, modality=error.modality))
            except OSError as error:
                if error.errno in OUT_OF:
                    raise
                read.append(MediaError(str(error.filename or ""), f"cannot be read: {error}"))
        usable = [turns for turns in read if not isinstance(turns, MediaError)]
        fetch_ahead([medium.path for turns in usable for medium in media_of(turns)])
        texts = iter(self._texts(usable))
        return [self.stand_in(found, i) if isinstance(found, MediaError)
                else self._measure(found, next(texts), i)
                for found, i in zip(read, rows, strict=True)]

    def _texts(self, conversations: Sequence[Conversation]) -> Sequence:
        """What `_measure` gets of each conversation."""
        return self.tokenizer.tokenize_batch(conversations)

    def text_like(self, layout: BatchLayout, turns: Conversation) -> tuple[np.ndarray, np.ndarray]:
        """(token ids, learnt) of a conversation, cut as it was when `layout` was measured. Raises
        RowError, and ValueError if its text has other lengths."""
        token_ids, learnt, segments = self.tokenizer.tokenize(turns)
        counts = iter(layout.num_tokens[layout.modality != TEXT].tolist())
        kept, end = self._cut([(modality, n if modality == TEXT else next(counts, _TOO_LONG))
                               for modality, n in segments])
        if kept != list(zip(layout.modality.tolist(), layout.num_tokens.tolist(), strict=True)):
            raise ValueError("its text does not have the indexed lengths")
        return token_ids[:end], learnt[:end]

    def _cut(self, segments: list[tuple[int, int]]) -> tuple[list[tuple[int, int]], int]:
        """(Those of (modality, LLM positions) that fit into max_example_tokens, tokens of text
        among them); text is cut, media are kept whole or left out."""
        kept, left = segments, self.max_example_tokens
        if left:
            kept = []
            for modality, count in segments:
                if count > left:
                    kept += [(TEXT, left)] if modality == TEXT and left else []
                    break
                kept.append((modality, count))
                left -= count
        return kept, sum([count for modality, count in kept if modality == TEXT])

    def stand_in(
        self, problem: MediaError, example_id: int, layout: BatchLayout | None = None
    ) -> MeasuredExample:
        """One token that nothing is learnt from, in place of a row that cannot be used."""
        return MeasuredExample(
            layout or BatchLayout.from_segments(example_id, 0, [(TEXT, text_lengths(1))]),
            np.array([self.tokenizer.end_id or 0], np.int32), np.zeros(1, bool), [], problem)

    def _measure(
        self, turns: Conversation, tokenized: Tokenized | RowError, example_id: int
    ) -> MeasuredExample:
        if isinstance(tokenized, RowError):
            return self.stand_in(MediaError("", tokenized.reason), example_id)
        token_ids, learnt, segments = tokenized
        media, is_read_only = media_of(turns), turns[0].role == DOCUMENT and not learnt.any()
        lengths: list[SegmentLengths] = []
        left = iter(media)
        try:
            for modality, count in segments:
                if modality == TEXT:
                    lengths.append(text_lengths(count))
                elif modality == VISION:
                    lengths.append(self.vision.segment_lengths(*image_header(next(left))))
                else:
                    clip = next(left)
                    lengths.append(audio_lengths(clip, *audio_header(clip), self.audio))
        except MediaError as error:
            error.segment, error.modality = len(lengths), segments[len(lengths)][0]
            return self.stand_in(error, example_id)
        every = [(m, n.num_tokens) for (m, _), n in zip(segments, lengths, strict=True)]
        kept, end = self._cut(every)
        token_ids, learnt = token_ids[:end], learnt[:end]
        targets = int(learnt.sum())
        if targets and kept[0][0] == TEXT and learnt[0]:
            targets -= 1  # no position comes before the first token that could predict it
        if targets == 0 and not is_read_only:
            limit = (f" in the first max_example_tokens={self.max_example_tokens} tokens"
                     if kept != every else "")
            return self.stand_in(
                MediaError("", f"nothing to learn: no text of an assistant{limit}"), example_id)
        segments = [(modality, n._replace(num_tokens=count))
                    for (modality, count), n in zip(kept, lengths, strict=False)]
        return MeasuredExample(BatchLayout.from_segments(example_id, targets, segments),
                               token_ids, learnt, media, None)
