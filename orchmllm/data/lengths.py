"""Rows -> lengths, before anything is decoded: tokens in batches, media from their headers.

Every way to an example goes through `LengthReader.plan`: the index, a run without one, lint and
stats. A row that cannot be used (its JSON, its turns, a header) keeps its place in the order of
examples as a stand-in of one token that nothing is learnt from: what is sampled when is then the
same on every rank, with or without an index, and after somebody mends a file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import Conversation, media_of
from orchmllm.data.media.headers import audio_header, audio_lengths, image_header
from orchmllm.data.media.medium import OUT_OF, MediaError, Medium, RowError
from orchmllm.data.storage.remote import fetch_ahead
from orchmllm.data.tokenizer import ChatTokenizer, Piece
from orchmllm.plan.geometry import AudioGeometry, SegmentLengths, VisionGeometry, segment_lengths
from orchmllm.plan.layout import TEXT, VISION, ExampleLayout

_TOO_LONG = 1 << 30  # of a medium after the cut, whatever its length


class MeasuredExample(NamedTuple):
    """One example as planned. pieces: one per segment. media: in reading order, those after the cut
    too. problem: why it is a stand-in, or None. changed: how its row differs from the index."""

    layout: ExampleLayout
    pieces: list[Piece]
    media: list[Medium]
    problem: MediaError | None
    changed: str = ""

    @property
    def num_bytes(self) -> int:
        """Of media that the row itself holds."""
        return sum(len(m.data) for m in self.media if m.data is not None)


class LengthReader:
    """tokenizer, vision, audio: as the model has them. max_example_tokens: LLM positions after
    which an example ends (0: no limit); a medium that would cross it is left out whole."""

    def __init__(self, tokenizer: ChatTokenizer, vision: VisionGeometry, audio: AudioGeometry,
                 max_example_tokens: int = 0) -> None:
        self.tokenizer, self.vision, self.audio = tokenizer, vision, audio
        self.max_example_tokens = max_example_tokens
        self.stand_in = [Piece(TEXT, np.array([tokenizer.end_id], np.int32), np.zeros(1, bool))]

    def plan(
        self, read_row: Callable[[int], Conversation], rows: Sequence[int], ids: Sequence[int]
    ) -> list[MeasuredExample]:
        """Lengths of `rows`, as `read_row` (DataSource.conversation) gives them; ids: their example
        ids. Never raises for bad data."""
        read = [self._read(read_row, row) for row in rows]
        fetch_ahead(medium.path for turns in read if not isinstance(turns, MediaError)
                    for medium in media_of(turns))
        pieces = iter(self.tokenizer.pieces_batch(
            [turns for turns in read if not isinstance(turns, MediaError)]))
        return [self._unusable(found, i) if isinstance(found, MediaError)
                else self._measure(media_of(found), next(pieces), i)
                for found, i in zip(read, ids, strict=True)]

    def cut_like(self, layout: ExampleLayout, pieces: list[Piece]) -> list[Piece]:
        """The pieces, cut as they were when `layout` was measured. Raises ValueError if their text
        has other lengths."""
        counts = iter(layout.num_tokens[layout.modality != TEXT].tolist())
        pieces = self.truncate(pieces, [
            len(p.token_ids) if p.modality == TEXT else next(counts, _TOO_LONG) for p in pieces])
        texts = np.where(layout.modality == TEXT, layout.num_tokens, 0)
        if [(p.modality, len(p.token_ids)) for p in pieces] != list(
                zip(layout.modality.tolist(), texts.tolist(), strict=True)):
            raise ValueError("its text does not have the indexed lengths")
        return pieces

    def truncate(self, pieces: list[Piece], num_tokens: Sequence[int]) -> list[Piece]:
        """The pieces that fit into max_example_tokens; text is cut, a medium never."""
        left = self.max_example_tokens
        if not left or sum(num_tokens) <= left:
            return pieces
        kept = []
        for piece, count in zip(pieces, num_tokens, strict=True):
            if count > left:
                if piece.modality == TEXT and left:
                    kept.append(Piece(TEXT, piece.token_ids[:left], piece.supervised[:left]))
                break
            kept.append(piece)
            left -= count
        return kept

    def _read(
        self, read_row: Callable[[int], Conversation], row: int
    ) -> Conversation | MediaError:
        try:
            return read_row(row)
        except RowError as error:
            problem = MediaError(error.file, error.reason)
            problem.modality = error.modality
            return problem
        except OSError as error:
            if error.errno in OUT_OF:
                raise
            return MediaError(str(error.filename or ""), f"cannot be read: {error}")

    def _unusable(self, problem: MediaError, example_id: int) -> MeasuredExample:
        layout = ExampleLayout.from_segments(example_id, 0, [(TEXT, segment_lengths(None, 1))])
        return MeasuredExample(layout, self.stand_in, [], problem)

    def _measure(
        self, media: list[Medium], pieces: list[Piece] | RowError, example_id: int
    ) -> MeasuredExample:
        if isinstance(pieces, RowError):
            return self._unusable(MediaError("", pieces.reason), example_id)
        lengths: list[SegmentLengths] = []
        left = iter(media)
        try:
            for piece in pieces:
                lengths.append(SegmentLengths(0, 0, len(piece.token_ids), (0, 0, 0))
                               if piece.modality == TEXT else self.medium_lengths(next(left)))
        except MediaError as error:
            error.segment, error.modality = len(lengths), pieces[len(lengths)].modality
            return self._unusable(error, example_id)
        kept = self.truncate(pieces, [n.num_tokens for n in lengths])
        lengths = lengths[: len(kept)]
        if kept and kept[-1].modality == TEXT:  # it may have been cut
            lengths[-1] = lengths[-1]._replace(num_tokens=len(kept[-1].token_ids))
        targets = sum(map(int, [piece.supervised.sum() for piece in kept]))
        if kept and kept[0].modality == TEXT and kept[0].supervised[0]:
            targets -= 1  # no position comes before the first token that could predict it
        if targets == 0:
            limit = (f" in the first max_example_tokens={self.max_example_tokens} tokens"
                     if kept is not pieces else "")
            return self._unusable(
                MediaError("", f"nothing to learn: no text of an assistant{limit}"), example_id)
        layout = ExampleLayout.from_segments(
            example_id, targets, list(zip([p.modality for p in kept], lengths, strict=True)))
        return MeasuredExample(layout, kept, media, None)

    def medium_lengths(self, medium) -> SegmentLengths:
        """From the header alone. Raises MediaError."""
        if medium.modality == VISION:
            return segment_lengths(self.vision, image_header(medium))
        return audio_lengths(medium, audio_header(medium), self.audio)
