"""Rows for a whole model of transformers: its own processor decides lengths and makes tensors.

Lengths are read from the headers of images and videos: the processor runs on their sizes, on all
media of an example together. Loading decodes, runs the processor on pixels and compares: an example
has the ids and lengths that were planned, or its row or medium counts as one that failed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.config.recipe import DataConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.formats.open import sources_of
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.decode import OnError, fail, upright_image
from orchmllm.data.media.headers import image_header
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import MediaError, Medium, RowError, Sampled
from orchmllm.data.media.shapes import Size, black
from orchmllm.data.media.video import pictures
from orchmllm.data.media.video_processor import video_of_pictures
from orchmllm.data.storage.remote import Storage
from orchmllm.data.text.processor import Processor, Tokens
from orchmllm.data.text.spans import before
from orchmllm.plan.layout import VISION, BatchLayout


class ProcessedReader(LengthReader):
    """Lengths of rows as the processor of a model has them. max_example_tokens: see
    LengthReader."""

    has_sizes = True

    def __init__(self, processor: Processor, max_example_tokens: int = 0) -> None:
        super().__init__(processor.tokenizer, None, None, max_example_tokens)
        self.processor = processor

    @property
    def identity(self) -> list:
        return ["processor", self.processor.digest, self.max_example_tokens]

    def _texts(self, conversations: Sequence[Conversation]) -> Sequence[Conversation]:
        return conversations

    def _measure(self, turns: Conversation, _: Conversation, example_id: int) -> MeasuredExample:
        try:
            spans = self.processor.rendered(turns)
            parts = self.processor.parts(turns)
            sizes = [_size_of(part) for part in parts]
            tokens = self.processor.tokens(spans, sizes, self.max_example_tokens)
            layout = layout_of(example_id, tokens)
        except RowError as error:
            return self.stand_in(MediaError(error.file, error.reason), example_id)
        except MediaError as error:
            error.segment, error.modality = 0, VISION
            return self.stand_in(error, example_id)
        items = [(medium, size[:2]) for part, size in zip(parts, sizes, strict=True)
                 for medium in self.processor.items(part)]
        return MeasuredExample(
            layout, tokens.ids, tokens.learnt, [medium for medium, _ in items], None, turns,
            [size for _, size in items[: len(layout.segments[VISION])]])


def _size_of(part: list[Medium]) -> Size:
    """Of an image, or of the frames of a video. Raises MediaError, and RowError."""
    sizes = sorted({image_header(medium)[::-1] for medium in part})
    if len(sizes) > 1:
        raise RowError("frames of a video have {} x {} and {} x {} pixels (height x width): give "
                       "all of them one size".format(*sizes[0], *sizes[-1]), part[0].name)
    return Size(*sizes[0], part[0].sampled)


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
        """Lengths of example i, from the index or from headers: `layout`. Of an image, num_tokens
        counts its features alone, and tokens that the processor writes between them belong to the
        text after them; grid is (t, h, w), t tiles of h x w patches, rows and attn_len their
        product."""
        return self.layout(i)

    def load(self, i: int, *, row: MeasuredExample | None = None, on_error: OnError = None
             ) -> ProcessedExample:
        """Example i with the lengths that `measure` gives. row: what `kept` returned in the process
        that planned it. An image that cannot be decoded raises MediaError with `segment` set; with
        `on_error`, it is called with (segment, error) instead, the image is black, and nothing is
        learnt. A row that cannot be used, or has changed since it was measured, is told of as
        segment 0 and has the planned lengths."""
        row = row or self._row(i)
        problem = row.problem
        if problem is None:
            try:
                return self._example(row, on_error)
            except RowError as error:
                problem = MediaError(self._name(i), f"cannot be used as it was planned: {error}")
        fail(0, problem, on_error)
        return self._filler(row)

    def _row(self, i: int, text: bool = True) -> MeasuredExample:
        row = super()._row(i, text=False)
        source, number = self.where(i)
        index = self.indexes[source]
        if index is None:
            return row
        items = [medium for part in self.processor.parts(row.turns)
                 for medium in self.processor.items(part)]
        return row._replace(media=items, sizes=index.sizes(number))

    def _example(self, row: MeasuredExample, on_error: OnError) -> ProcessedExample:
        """Raises RowError where the row is not as planned."""
        layout, parts = row.layout, self.processor.parts(row.turns)
        segments = np.flatnonzero(layout.modality == VISION)
        firsts = np.cumsum([0, *(len(self.processor.items(part)) for part in parts)])
        parts = parts[: np.searchsorted(firsts[:-1], len(row.sizes))]  # others are after the cut
        spans = before(self.processor.rendered(row.turns), len(parts))
        shown = pictures([medium for part in parts for medium in part], self.processor)
        media, failed = [], False
        for part, first in zip(parts, firsts.tolist(), strict=False):
            size = Size(*row.sizes[first], part[0].sampled)
            try:
                frames = [_decoded(medium, size, shown.get(medium)) for medium in part]
            except MediaError as error:
                failed, error.modality = True, VISION
                fail(int(segments[first]), error, on_error)
                frames = [black(size)] * len(part)
            media.append(video_of_pictures(frames, size.sampled) if size.sampled else frames[0])
        tokens, arguments = self.processor.load(spans, media, self.reader.max_example_tokens)
        found = layout_of(int(layout.example_id[0]), tokens)
        if found.to_payload().tolist() != layout.to_payload().tolist():
            raise RowError("the processor makes other lengths of it")
        ids = torch.from_numpy(tokens.ids.astype(np.int64))
        learnt = torch.from_numpy(tokens.learnt & (not failed))
        return ProcessedExample(int(layout.example_id[0]), ids,
                                ids.where(learnt, torch.tensor(IGNORE_INDEX)), arguments, layout)

    def _filler(self, row: MeasuredExample) -> ProcessedExample:
        """An example of the planned lengths that nothing is learnt of: images are black."""
        layout, token_ids = row.layout, self.processor.token_ids
        shown = layout.modality == VISION
        token = np.where(shown, token_ids[VISION], self.tokenizer.end_id or 0)
        media, options = [black(Size(*size)) for size in row.sizes], {}
        if VIDEO in token_ids:  # the row, which says what is a video, may be gone
            media, options = [], {"do_resize": False}
            edges = np.flatnonzero(np.diff(shown, prepend=False, append=False))
            for start, end in edges.reshape(-1, 2).tolist():
                picture = black(Size(*(layout.grid[start, 1:] * self.processor.patch).tolist()))
                seconds = tuple(range(self.processor.merged * (end - start)))
                is_video = end - start > 1  # images do not stand beside each other
                if is_video:
                    token[start:end] = token_ids[VIDEO]
                media.append(video_of_pictures(
                    [picture] * len(seconds), Sampled(0, seconds, len(seconds)))
                    if is_video else picture)
        ids = torch.from_numpy(np.repeat(token, layout.num_tokens))
        arguments = self.processor.arguments_like(ids, media, **options)
        return ProcessedExample(int(layout.example_id[0]), ids,
                                torch.full_like(ids, IGNORE_INDEX), arguments, layout)


def _decoded(medium: Medium, size: Size, picture: np.ndarray | MediaError | None) -> Image.Image:
    """An image. picture: where it is a frame of a video. Raises MediaError, also for another size
    than planned."""
    if isinstance(picture, MediaError):
        raise picture
    image = upright_image(medium) if picture is None else Image.fromarray(picture)
    if image.size != (size.width, size.height):
        there, planned = ("{}x{}".format(*s) for s in (image.size, (size.width, size.height)))
        raise MediaError(medium.name, f"has {there} pixels, where {planned} were planned: the file "
                         "has changed; orchmllm data lint reads all headers of an index again")
    return image
