"""Rows for a whole model of transformers: its own processor decides lengths and makes tensors.

Lengths are read from the headers of images and clips: the processor runs on their sizes, on all
media of an example together. Loading decodes, runs the processor on pixels and samples and
compares: an example has the ids and lengths that were planned, or its row or medium counts as one
that failed.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from PIL import Image

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.config.recipe import DataConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.conversation import Conversation, media_of
from orchmllm.data.formats.open import sources_of
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.decode import OnError, decode_samples, fail, upright_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError, Medium, RowError
from orchmllm.data.media.shapes import Size, blank, sized
from orchmllm.data.media.video import pictures
from orchmllm.data.segments import KINDS, is_content
from orchmllm.data.storage.remote import Storage
from orchmllm.data.text.processor import Processor, Tokens
from orchmllm.data.text.spans import before
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import TEXT, VISION, BatchLayout


class ProcessedReader(LengthReader):
    """Lengths of rows as the processor of a model has them. max_example_tokens: see
    LengthReader."""

    has_sizes = True

    def __init__(self, processor: Processor, max_example_tokens: int = 0) -> None:
        super().__init__(processor.tokenizer, None, processor.audio, max_example_tokens)
        self.processor = processor

    @property
    def identity(self) -> list:
        return ["processor", self.processor.digest, self.max_example_tokens]

    def _texts(self, conversations: Sequence[Conversation]) -> Sequence[Conversation]:
        return conversations

    def _measure(self, turns: Conversation, _: Conversation, example_id: int) -> MeasuredExample:
        media = media_of(turns)
        try:
            spans = self.processor.rendered(turns)
            sizes = [self._size(medium) for medium in media]
            tokens = self.processor.tokens(spans, sizes, self.max_example_tokens)
            layout = layout_of(example_id, tokens)
        except RowError as error:
            return self.stand_in(MediaError(error.file, error.reason), example_id)
        except MediaError as error:
            return self.stand_in(error, example_id)
        num_media = int((layout.modality != TEXT).sum())
        return MeasuredExample(layout, tokens.ids, tokens.learnt, media, None, turns,
                               sizes[:num_media])

    def _size(self, medium: Medium) -> Size:
        """Raises MediaError."""
        try:
            if medium.modality == VISION:
                return image_header(medium)[::-1]
            return 0, self.audio.resampled(*audio_header(medium))
        except MediaError as error:
            error.segment, error.modality = 0, medium.modality
            raise


def layout_of(example_id: int, tokens: Tokens) -> BatchLayout:
    """Raises RowError for an example that nothing is learnt of."""
    targets = int(tokens.learnt[1:].sum())  # no position comes before the first token
    if targets == 0:
        raise RowError("nothing to learn: no text of an assistant (in the first "
                       "data.max_example_tokens tokens, where that is set)")
    return BatchLayout.from_segments(example_id, targets, tokens.segments)


class ProcessedRows(ConversationDataset):
    """The rows of a recipe's data section for a model of transformers.

    folder, options: see Processor; the tokenizer and the chat template are the model's. Raises
    ValueError if the folder or a source cannot be used, or `data` names another tokenizer.
    """

    def __init__(self, folder: str | os.PathLike, data: DataConfig,
                 options: Mapping[str, Any] | None = None) -> None:
        if data.tokenizer:
            raise ValueError(f"data.tokenizer is {data.tokenizer!r}, but the model brings its own "
                             "tokenizer: leave it out")
        self.processor = Processor(folder, options)
        super().__init__(
            sources_of(data), tokenizer=self.processor.tokenizer, vision=None, audio=None,
            index_dir=data.index_dir or None, storage=Storage(data.remote),
            reader=ProcessedReader(self.processor, data.max_example_tokens))

    @property
    def digest(self) -> str:
        """Changes with anything that changes what the processor makes of a row."""
        return self.processor.digest

    def fingerprint(self) -> dict:
        return {**super().fingerprint(), "processor": self.digest}

    def measure(self, i: int) -> BatchLayout:
        """Lengths of example i, from the index or from headers: `layout`. Of a medium, num_tokens
        counts its features alone, and tokens that the processor writes between them belong to the
        text after them. Of an image, grid is (t, h, w), t tiles of h x w patches, rows and attn_len
        their product; of a clip, rows are the frames that are encoded, padding of a window too."""
        return self.layout(i)

    def load(self, i: int, *, text: bool = True, segments: Collection[int] | None = None,
             row: MeasuredExample | None = None, on_error: OnError = None) -> ProcessedExample:
        """Example i with the lengths that `measure` gives, or parts of it.

        text: False leaves ids and labels None. segments: None for the whole example; else the
        positions in the segment list of the media to decode, whose tensors are in `parts`, as the
        processor makes them beside the others of the example. row: what `kept` returned in the
        process that planned it. A medium that cannot be decoded raises MediaError with `segment`
        set; with `on_error`, it is called with (segment, error) instead, the image is black or the
        clip silent, and nothing is learnt. A row that cannot be used, or has changed since it was
        measured, is told of as segment 0 (the first where its text is loaded) and has the planned
        lengths."""
        row = row or self._row(i)
        problem, example = row.problem, None
        if problem is None:
            try:
                example = self._example(row, segments, on_error)
            except RowError as error:
                problem = MediaError(self.name(i), f"cannot be used as it was planned: {error}")
        if problem is not None:
            if text or row.problem is None:
                fail(0, problem, on_error)
            example = self._filler(row)
        if segments is not None:
            example = _parted(example, segments)
        return example if text else replace(example, input_ids=None, labels=None)

    def _row(self, i: int, text: bool = True) -> MeasuredExample:
        row = super()._row(i, text=False)
        source, number = self.where(i)
        index = self.indexes[source]
        return row if index is None else row._replace(sizes=index.sizes(number))

    def _example(self, row: MeasuredExample, wanted: Collection[int] | None, on_error: OnError
                 ) -> ProcessedExample:
        """wanted: segments that are decoded (None: all). Raises RowError where the row is not as
        planned."""
        layout, sizes = row.layout, row.sizes
        spans = before(self.processor.rendered(row.turns), len(sizes))
        segments = np.flatnonzero(layout.modality != TEXT).tolist()
        media, failed = [], False
        reads = [wanted is None or segment in wanted for segment in segments]
        shown = pictures([m for m, read in zip(row.media, reads, strict=False) if read],
                         self.processor)
        for medium, size, segment, read in zip(row.media, sizes, segments, reads, strict=False):
            if not read:
                media.append(sized(*size))
                continue
            try:
                media.append(_decoded(medium, size, shown.get(medium), self.processor.audio))
            except MediaError as error:
                failed, error.modality = True, medium.modality
                fail(segment, error, on_error)
                media.append(blank(size))
        tokens, arguments = self.processor.load(spans, media, self.reader.max_example_tokens)
        found = layout_of(int(layout.example_id[0]), tokens)
        if found.to_payload().tolist() != layout.to_payload().tolist():
            raise RowError("the processor makes other lengths of it")
        ids = torch.from_numpy(tokens.ids.astype(np.int64))
        learnt = torch.from_numpy(tokens.learnt & (not failed))
        return ProcessedExample(int(layout.example_id[0]), ids,
                                ids.where(learnt, torch.tensor(IGNORE_INDEX)), arguments, layout)

    def _filler(self, row: MeasuredExample) -> ProcessedExample:
        """An example of the planned lengths that nothing is learnt of: media are black or
        silent."""
        layout = row.layout
        token = {TEXT: self.tokenizer.end_id or 0, **self.processor.token_ids}
        ids = torch.from_numpy(np.repeat([token[m] for m in layout.modality.tolist()],
                                         layout.num_tokens))
        arguments = self.processor.arguments_like(ids, row.sizes)
        return ProcessedExample(int(layout.example_id[0]), ids,
                                torch.full_like(ids, IGNORE_INDEX), arguments, layout)


def _parted(example: ProcessedExample, segments: Collection[int]) -> ProcessedExample:
    """Of a whole example the tensors of these media, and those that the text model reads."""
    lengths, cut, arguments = example.lengths, {}, {}
    for modality, kind in KINDS.items():
        media = np.flatnonzero(lengths.modality == modality).tolist()
        cut |= zip(media, kind.parts(example.media, lengths.grid[media]), strict=True)
        arguments |= dict.fromkeys(media, kind.content)
    return replace(
        example, media={n: v for n, v in example.media.items() if not is_content(n)},
        parts={s: cut[s] for s in segments}, arguments=arguments)


def _decoded(medium: Medium, size: Size, picture: np.ndarray | MediaError | None,
             audio: AudioGeometry | None) -> Image.Image | np.ndarray:
    """An image, or a clip (n,) float32 at the rate of `audio`. picture: where it is a frame of a
    video. Raises MediaError, also for another size than planned."""
    if isinstance(picture, MediaError):
        raise picture
    if medium.modality != VISION:
        samples = decode_samples(medium, audio)
        if (0, len(samples)) != size:
            raise _changed(medium, f"{len(samples)} samples at {audio.sample_rate} Hz", size[1])
        return samples
    image = upright_image(medium) if picture is None else Image.fromarray(picture)
    if image.size[::-1] != size:
        there, planned = (f"{width}x{height}" for width, height in (image.size, size[::-1]))
        raise _changed(medium, f"{there} pixels", planned)
    return image


def _changed(medium: Medium, there: str, planned: object) -> MediaError:
    return MediaError(medium.name, f"has {there}, where {planned} were planned: the file has "
                      "changed; orchmllm data lint reads all headers of an index again")
