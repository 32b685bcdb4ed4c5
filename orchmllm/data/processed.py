"""Rows for a whole model of transformers: its own processor decides lengths and makes tensors.

Lengths are read from the headers of media: the processor runs on their sizes, on all
media of an example together. Loading decodes, runs the processor on pixels and samples and
compares: an example has the ids and lengths that were planned, or its row or medium counts as one
that failed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import not_
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.leaving import row_of_medium
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.decode import OnError, decode_samples, fail, upright_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import MediaError, Medium, RowError, Sampled
from orchmllm.data.media.raw import AS_BYTES, NOTHING, with_bytes
from orchmllm.data.media.shapes import Content, Size, blank, kind_of, sized
from orchmllm.data.media.video import pictures
from orchmllm.data.media.video_processor import items_of
from orchmllm.data.media_tensors import KINDS, VIDEOS, is_content
from orchmllm.data.text.processor import Processor
from orchmllm.data.text.spans import Tokens, before
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import AUDIO, MADE, TEXT, VISION, BatchLayout


class ProcessedReader(LengthReader):
    """Measures and loads rows as the processor of a model makes them; the tokenizer and the chat
    template are the model's. max_example_tokens: see LengthReader.

    Of a medium, num_tokens of a layout counts its features alone, and tokens that the processor
    writes between them belong to the text after them. Of an image, grid is (t, h, w), t tiles of
    h x w patches, rows and attn_len their product; of a clip, rows are the frames that are encoded,
    padding of a window too."""

    def __init__(self, processor: Processor, max_example_tokens: int = 0) -> None:
        super().__init__(processor.tokenizer, max_example_tokens)
        self.processor = processor

    @property
    def identity(self) -> list:
        return ["processor", self.processor.digest, self.max_example_tokens]

    @property
    def fingerprint(self) -> dict[str, str]:
        """What decides, beside the rows, what examples hold."""
        return {"tokenizer": self.tokenizer.digest, "processor": self.processor.digest}

    def taken(self, turns: Conversation) -> Conversation:
        """With the images marked that the model makes."""
        return turns if self.processor.made is None else self.processor.made.told(turns)

    def media(self, turns: Conversation) -> list[Medium]:
        """One for each segment that is no text."""
        return [item[0] for item in chain.from_iterable(items_of(turns, self.processor.videos))]

    def measure(self, turns: Conversation, example_id: int) -> MeasuredExample:
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

    def load(self, row: MeasuredExample, name: Callable[[], str], *, text: bool = True,
             segments: Collection[int] | None = None, encoded: Collection[int] = (),
             raw: Collection[str] = (), on_error: OnError = None) -> ProcessedExample:
        """The example of a row with the lengths that were measured, or parts of it. name: tells
        where the row is.

        text: False leaves ids and labels None. segments: None for the whole example; else the
        positions in the segment list of the media to decode, whose tensors are in `parts`, as the
        processor makes them beside the others of the example. encoded: those of them that are not
        decoded: in their place is a row from which another rank loads this medium alone. raw:
        arguments that hold images or videos which are bytes in `parts`, each frame once where the
        processor repeats it. A medium that cannot be decoded raises MediaError with `segment`
        set; with `on_error`, it is called with (segment, error) instead, the image is black or
        the clip silent, and nothing is learnt. A row that cannot be used, or has changed since it
        was measured, is told of as segment 0 (the first where its text is loaded) and has the
        planned lengths."""
        problem, example = row.problem, None
        here = None if segments is None else [s for s in segments if s not in encoded]
        if problem is None:
            try:
                example = self._example(row, here, raw, on_error)
            except RowError as error:
                problem = MediaError(name(), f"cannot be used as it was planned: {error}")
        if problem is not None:
            if text or row.problem is None:
                fail(0, problem, on_error)
            example = self._filler(row, here, raw)
        if here is not None:
            example = _parted(example, here, raw, self.processor.patch)
            example.parts.update({s: row_of_medium(
                row._replace(problem=problem), s, self.processor, on_error) for s in encoded})
        return example if text else replace(example, input_ids=None, labels=None)

    def blank(self, modality: int) -> dict[str, Tensor]:
        """The tensors of a small black image or a silent clip, for a rank that encodes, or makes,
        nothing where others do."""
        if modality == MADE:
            return self.processor.made.blank()
        size = Size(224, 224) if modality == VISION else Size(0, self.processor.audio.sample_rate)
        return self.processor.parts([blank(size)])[0]

    def image_row_bytes(self, raw: Collection[str]) -> int:
        """Of a patch of an image as it moves between ranks. raw: see `load`."""
        size, content = Size(224, 224), KINDS[VISION].content
        [tensors] = self.processor.parts([blank(size)], self._options(raw))
        pixels = with_bytes(tensors, {content} & {*raw}, self.processor.patch)[content]
        [[grid]] = self.processor.calls.expanded((size,)).grids
        return pixels.nbytes // math.prod(grid)

    def _options(self, raw: Collection[str]) -> Mapping[str, Any]:
        """Of the call for images. raw: see `load`."""
        return self.processor.of_bytes if KINDS[VISION].content in raw else NOTHING

    def _example(self, row: MeasuredExample, wanted: Collection[int] | None,
                 raw: Collection[str], on_error: OnError) -> ProcessedExample:
        """wanted: segments that are decoded (None: all). raw: arguments whose pixels are neither
        rescaled nor normalised, see `load`. Raises RowError where the row is not as planned."""
        layout, every = row.layout, items_of(row.turns, self.processor.videos)
        segments = np.flatnonzero(layout.modality != TEXT).tolist()
        sizes = {s: Size(*size) for s, size in zip(segments, row.sizes, strict=True)}
        made = {s: sizes[s] for s in segments if layout.modality[s] == MADE}
        content, failed = self._decoded({
            s: item for s, item in zip(segments, chain.from_iterable(every), strict=False)
            if wanted is None or s in wanted}, sizes, on_error)
        media, names = self._media(every, segments, sizes, content)
        tokens, arguments = self._as_planned(row, media, [*made.values()], raw)
        arguments.pop(VIDEOS, None)  # without pixels
        slices = [self.processor.videos.pixels(frames, *layout.grid[s, 1:].tolist(),
                                               AS_BYTES if VIDEOS in raw else NOTHING)
                  for s, frames in content.items() if names.get(s) == VIDEOS]
        if slices:
            arguments[VIDEOS] = torch.cat(slices)
        ids = torch.from_numpy(tokens.ids.astype(np.int64))
        learnt = torch.from_numpy(tokens.learnt & (not failed))
        return ProcessedExample(
            int(layout.example_id[0]), ids, ids.where(learnt, torch.tensor(IGNORE_INDEX)),
            arguments, layout, arguments=names, parts={
                s: self.processor.made.squares(content[s][0], layout.grid[s, 1:].tolist())
                for s in made.keys() & content.keys()})

    def _as_planned(self, row: MeasuredExample, media: list[Content], made: list[Size],
                    raw: Collection[str]) -> tuple[Tokens, dict[str, Tensor]]:
        """What the processor makes of a row and its media, see Processor.load. made: images that
        the model makes. Raises RowError for other lengths than planned."""
        spans = before(row.spans or self.processor.rendered(row.turns), len(media))
        known = Tokens(row.token_ids, row.supervised, [], row.digest) if row.digest else None
        tokens, arguments = self.processor.load(
            spans, media, self.max_example_tokens, self._options(raw), known)
        if tokens is not known:
            if made:
                tokens = self.processor.made.counted(tokens, made)
            found = layout_of(int(row.layout.example_id[0]), tokens)
            if found.to_payload().tolist() != row.layout.to_payload().tolist():
                raise RowError("the processor makes other lengths of it")
        return tokens, arguments

    @staticmethod
    def _media(every: list[list[list[Medium]]], segments: Sequence[int],
               sizes: Mapping[int, Size], content: Mapping[int, list[Content]]
               ) -> tuple[list[Content], dict[int, str]]:
        """(Of each medium of a row that the model takes, up to the cut, what the processor is
        given; of each segment the argument that holds it). every: see items_of; content: of the
        segments that were decoded. Of a video, and of what was not decoded, the processor is given
        the size."""
        media, names = [], {}
        for items in every:
            own, segments = segments[:len(items)], segments[len(items):]
            if not own:  # it comes after the cut
                break
            if items[0][0].modality == MADE:
                continue
            size = sizes[own[0]]._replace(sampled=items[0][0].sampled)
            is_shown = own[0] in content and not size.sampled
            media.append(content[own[0]][0] if is_shown else sized(size))
            names |= dict.fromkeys(own, KINDS[kind_of(size)].content)
        return media, names

    def _decoded(self, items: Mapping[int, list[Medium]], sizes: Mapping[int, Size],
                 on_error: OnError) -> tuple[dict[int, list[Content]], bool]:
        """(The pictures, or the clip, of each segment, blank where they cannot be decoded; whether
        there are such). items: of segments."""
        shown = pictures([medium for item in items.values() for medium in item])
        out, failed = {}, False
        for segment, item in items.items():
            try:
                out[segment] = [_decoded(m, sizes[segment], shown.get(m), self.processor.audio)
                                for m in item]
            except MediaError as error:
                failed, error.modality = True, item[0].modality
                fail(segment, error, on_error)
                out[segment] = [blank(sizes[segment])] * len(item)
        return out, failed

    def _filler(self, row: MeasuredExample, wanted: Collection[int] | None, raw: Collection[str]
                ) -> ProcessedExample:
        """An example of the planned lengths that nothing is learnt of: media are black or silent.
        wanted: segments whose content is loaded (None: all). raw: see `_example`."""
        layout, processor = row.layout, self.processor
        is_made = layout.modality == MADE
        segments = np.flatnonzero((layout.modality != TEXT) & ~is_made)
        token = {TEXT: self.tokenizer.end_id or 0, **processor.token_ids}
        if is_made.any():
            token[MADE] = processor.made.id
        names = {s: KINDS[m].content for s, m in zip(
            segments.tolist(), layout.modality[segments].tolist(), strict=True)}
        sizes = [Size(*size) for size, made in zip(
            row.sizes, is_made[layout.modality != TEXT], strict=True) if not made]
        options = self._options(raw)
        if processor.videos and sizes:  # the row, which says what is an image, may be gone
            sizes, options = self._as_videos(layout, segments), {"do_resize": False}
            token[VISION], names = token[VIDEO], dict.fromkeys(names, VIDEOS)
        ids = torch.from_numpy(np.repeat([token[m] for m in layout.modality.tolist()],
                                         layout.num_tokens))
        arguments = processor.arguments_like(ids, sizes, options)
        if VIDEOS in arguments:
            rows = sum(int(layout.rows[s]) for s in names if wanted is None or s in wanted)
            arguments[VIDEOS] = torch.zeros(rows, arguments[VIDEOS].shape[1])
        return ProcessedExample(
            int(layout.example_id[0]), ids, torch.full_like(ids, IGNORE_INDEX), arguments, layout,
            arguments=names, parts={s: processor.made.blank(int(layout.rows[s]))
                                    for s in np.flatnonzero(is_made).tolist()})

    def _as_videos(self, layout: BatchLayout, segments: np.ndarray) -> list[Size]:
        """Videos that have the grids of these items of the vision encoder: one for each run of
        items without text between them, since those of an image and of a video look alike."""
        runs = np.split(segments, np.flatnonzero(np.diff(segments) > 1) + 1)
        counts = [self.processor.videos.merged * len(run) for run in runs]  # frames
        return [Size(*(layout.grid[run[0], 1:] * self.processor.patch).tolist(),
                     Sampled(0, tuple(range(count)), count))
                for run, count in zip(runs, counts, strict=True)]


def layout_of(example_id: int, tokens: Tokens) -> BatchLayout:
    """Raises RowError for an example that nothing is learnt of."""
    targets = int(tokens.learnt[1:].sum())  # no position comes before the first token
    if targets == 0:
        raise RowError("nothing to learn: no text of an assistant (in the first "
                       "data.max_example_tokens tokens, where that is set)")
    return BatchLayout.from_segments(example_id, targets, tokens.segments)


def _parted(example: ProcessedExample, segments: Collection[int], raw: Collection[str], patch: int
            ) -> ProcessedExample:
    """Of an example the tensors of these media, and those that the text model reads. Of videos it
    has the pixels of these media alone. raw: see ProcessedReader.load;
    patch: pixels of its side."""
    cut = {}
    for kind in KINDS.values():
        media = [s for s, name in example.arguments.items()
                 if name == kind.content and (name != VIDEOS or s in segments)]
        if media:
            cut |= zip(media, kind.parts(example.media, example.lengths.grid[media]), strict=True)
    return replace(
        example, parts={s: example.parts[s] if s in example.parts else with_bytes(
            cut[s], raw, patch) for s in segments},
        media={n: v for n, v in example.media.items() if not is_content(n)})


def _decoded(medium: Medium, size: Size, picture: np.ndarray | MediaError | None,
             audio: AudioGeometry | None) -> Image.Image | np.ndarray:
    """An image, or a clip (n,) float32 at the rate of `audio`. picture: where it is a frame of a
    video. Raises MediaError, also for another size than planned."""
    if isinstance(picture, MediaError):
        raise picture
    if medium.modality == AUDIO:
        samples = decode_samples(medium, audio)
        if len(samples) != size.width:
            raise _changed(medium, f"{len(samples)} samples at {audio.sample_rate} Hz", size.width)
        return samples
    image = upright_image(medium) if picture is None else Image.fromarray(picture)
    if image.size != (size.width, size.height):
        there, planned = ("{}x{}".format(*s) for s in (image.size, (size.width, size.height)))
        raise _changed(medium, f"{there} pixels", planned)
    return image


def _changed(medium: Medium, there: str, planned: object) -> MediaError:
    return MediaError(medium.name, f"has {there}, where {planned} were planned: the file has "
                      "changed; orchmllm data lint reads all headers of an index again")
