"""The processor of a model of transformers: what it makes of a conversation's text and media.

It expands the placeholder of every medium itself and makes the tensors. Which tokens are learnt is
told by the project's own rendering of the chat template: the ids of both have to be the same.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from PIL import Image
from torch import Tensor

from orchmllm.data.formats.conversation import Turn, media_of
from orchmllm.data.formats.scanned import digest
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.media.raw import Arithmetic, of_images
from orchmllm.data.media.shapes import (
    Content,
    Shapes,
    Size,
    Some,
    adapted,
    blank,
    kind_of,
    of_clips,
    sized,
)
from orchmllm.data.media.video_processor import PROCESSORS, Videos, with_videos
from orchmllm.data.segments import KINDS
from orchmllm.data.text.clips import Clips
from orchmllm.data.text.model_folder import image_grids, load_processor, most_tokens
from orchmllm.data.text.spans import Expanded, Span, Text, Tokens, before
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.geometry import AudioGeometry, SegmentLengths, text_lengths
from orchmllm.plan.layout import AUDIO, TEXT, VISION

_TYPES = {VISION: 1, VIDEO: 2, AUDIO: 3}  # of tokens, in mm_token_type_ids


class Processor:
    """folder: of a model of transformers, with config.json, its processor, tokenizer.json and a
    chat template. Code of the folder is never run, images are resized by Pillow, and videos are
    read as images where the family has no tokens for them. token_ids: modality -> the token that
    stands for a row of features; patch: pixels of its side; videos: the part for them, or None.
    options: of the call of the processor for images (size, do_pan_and_scan, ...), instead of its
    own. Raises ValueError naming the folder if it cannot be used."""

    def __init__(self, folder: str | os.PathLike, options: Mapping[str, Any] | None = None
                 ) -> None:
        self.folder, self.options = Path(folder), dict(options or {})
        self._processor, config = load_processor(self.folder)
        self.videos: Videos | None = None
        self._clips: Clips | None = None
        self._marks: dict[int, str] = {}
        self.token_ids: dict[int, int] = {}
        try:
            self._read_parts(config)
        except AttributeError as error:
            raise ValueError(f"{folder}: its config.json does not say {error.name}, so it is no "
                             "model of images or clips that is known here") from error
        self._most_tokens = most_tokens(config)
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ValueError(f"{folder}: it has no chat template: put the chat_template.jinja of "
                             "the model's instruct version into it")
        self.tokenizer = ChatTokenizer(self.folder, template, self._marks)
        self._features = {kind: self._processor.tokenizer.convert_ids_to_tokens(token)
                          for kind, token in self.token_ids.items()}
        missing = [self.token_ids[kind] for kind, token in self._features.items() if token is None]
        if missing:
            raise ValueError(f"{folder}: its tokenizer does not have the token {missing[0]}, which "
                             "config.json names for media")
        self.expanded = lru_cache(maxsize=1024)(self._expanded)
        media = tuple(Medium(m, "") for m in self._marks if m != VIDEO)
        talk = [Turn("user", (*media, "Who is it?"), False), Turn("assistant", ("Anna.",), True)]
        sizes = {VISION: Size(224, 336), AUDIO: Size(0, self.audio and self.audio.sample_rate)}
        try:
            self.tokens(self.rendered(talk), [sizes[m.modality] for m in media])
        except RowError as error:
            raise ValueError(f"{folder}: its processor cannot be used for a medium, a question and "
                             f"an answer: {error}") from error

    def _read_parts(self, config: Any) -> None:
        """The parts of the processor for images, videos and clips, of those that it has. Raises
        AttributeError for what a configuration does not say."""
        processor, marks, tokens = self._processor, self._marks, self.token_ids
        self._have_grids, self.patch = False, 0
        if (kind := type(processor).__name__) in PROCESSORS:
            self.videos = Videos(self.folder, kind)
            processor.video_processor = self.videos.processor
        self._shapes, self._some = copy.copy(processor), copy.copy(processor)
        if hasattr(processor, "image_processor"):
            images = processor.image_processor
            self._shapes.image_processor = adapted(images, Shapes)
            self._some.image_processor = adapted(images, Some)
            self._have_grids = "image_grid_thw" in images.model_input_names
            self.patch = int(np.max(config.vision_config.patch_size))
            marks[VISION], tokens[VISION] = processor.image_token, int(config.image_token_id)
        if self.videos is not None:
            marks[VIDEO], tokens[VIDEO] = processor.video_token, int(config.video_token_id)
        if hasattr(processor, "feature_extractor"):
            clips = of_clips(processor.feature_extractor)
            self._shapes.feature_extractor = self._some.feature_extractor = clips
            self._clips = Clips(processor, config)
            marks[AUDIO], tokens[AUDIO] = processor.audio_token, int(config.audio_token_id)
        self._is_omni = marks.keys() >= {VISION, AUDIO}

    @property
    def audio(self) -> AudioGeometry | None:
        """The rate at which clips are read; None where the model takes none."""
        return self._clips and self._clips.geometry

    def __reduce__(self):
        return Processor, (self.folder, self.options)  # worker processes open the files themselves

    @cached_property
    def digest(self) -> str:
        """Changes with anything that changes what the processor makes of a row, and not with how
        the files of the folder are written: their settings, and the packages that run it."""
        import PIL
        import tokenizers
        import transformers

        return digest([self._processor.to_dict(), self.tokenizer.digest, self.options,
                       self.patch, self._clips and self._clips.identity,
                       self.videos and self.videos.identity,
                       sorted(self.token_ids.items()), self._most_tokens,
                       *(package.__version__ for package in (transformers, tokenizers, PIL))])

    def rendered(self, turns: Sequence[Turn]) -> list[Span]:
        """A conversation as the template writes it; a video is one medium where the model has
        tokens for it. Raises RowError."""
        media = media_of(turns)
        for other in {medium.modality for medium in media} - self._marks.keys():
            taken = " and ".join(f"{KINDS[kind].name}s" for kind in self._marks)
            raise RowError(f"the model takes {taken} alone: leave rows with {KINDS[other].name}s "
                           "out")
        if self.videos is None or not any(medium.sampled for medium in media):
            return self.tokenizer.spans(turns)
        self.videos.check(self.tokenizer.writes(VIDEO))
        return self.tokenizer.spans(with_videos(turns))

    @staticmethod
    def resized(width: int, height: int) -> tuple[int, int]:
        """Size in which frames of videos are read: their own, as the processor resizes them."""
        return width, height

    def tokens(self, spans: Sequence[Span], sizes: Sequence[Size], limit: int = 0) -> Tokens:
        """The sequence of a rendered conversation with media of these sizes. limit: ids after
        which it ends (0: none); a medium that would cross it is left out whole. Raises RowError."""
        while True:
            expanded = self.expanded(tuple(sizes))
            tokens, fit = self._tokens(spans, expanded, limit)
            if fit == len(sizes):
                return tokens
            spans, sizes = before(spans, fit), sizes[:fit]

    def load(self, spans: Sequence[Span], media: list, limit: int,
             options: Mapping[str, Any] = MappingProxyType({})
             ) -> tuple[Tokens, dict[str, Tensor]]:
        """(The sequence of a rendered conversation and its media, the processor's other tensors by
        argument name). media: images of Pillow, as arrays small ones can be read with another side
        for the channels; clips (n,) float32; or as `sized` makes them, whose content is not wanted.
        The tensor of videos is on the meta device: see Videos.pixels. limit: see `tokens`; no
        medium crosses it. options: of the call for images. Raises RowError."""
        text = "".join(self._marks[span.modality] if isinstance(span, Medium) else span.text
                       for span in spans)
        has_pixels = any(isinstance(medium, Image.Image) for medium in media)
        out, expanded = self._run(self._some if has_pixels else self._shapes, text, media, "pt",
                                  options)
        tokens, _ = self._tokens(spans, expanded, limit)
        ids = out.pop("input_ids")
        if ids[0, : len(tokens.ids)].tolist() != tokens.ids.tolist():
            raise RowError("the processor makes other tokens of its media than of their sizes")
        return tokens, {name: value[:, : len(tokens.ids)] if name.endswith("type_ids") else value
                        for name, value in out.items()}

    def parts(self, media: Sequence[Image.Image | np.ndarray], **options: Any
              ) -> list[dict[str, Tensor]]:
        """The tensors of each of these media, images or clips, in an example of their own."""
        out, expanded = self._run(self._processor, self._written(media), [*media], "pt", options)
        return KINDS[kind_of(media[0])].parts(
            out, np.array([grids[0] for grids in expanded.grids]))

    def arithmetic(self) -> Iterator[Arithmetic]:
        """Of the pixels of images, and of those of videos."""
        if images := getattr(self._processor, "image_processor", None):
            yield of_images(images, self.options, KINDS[VISION].content, self.parts)
        if self.videos is not None and self.videos.processor is not None:
            yield self.videos.arithmetic()

    def arguments_like(self, ids: Tensor, sizes: Sequence[Size], **options: Any
                       ) -> dict[str, Tensor]:
        """The processor's tensors for an example with these ids (n,) and blank media. options: of
        its call, for images and videos alike."""
        out, _ = self._run(self._processor, self._written(sizes) or "no media",
                           [*map(blank, sizes)], "pt", options)
        del out["input_ids"]
        types = sum(_TYPES[kind] * (ids == token).long()[None]
                    for kind, token in self.token_ids.items())
        return {name: types if name.endswith("type_ids") else value for name, value in out.items()}

    def _written(self, sizes: Sequence[Content]) -> str:
        return "\n".join(self._marks[kind_of(size)] for size in sizes)

    def _expanded(self, sizes: tuple[Size, ...]) -> Expanded:
        """What media of these sizes become, which are all media of an example: processors treat
        several in another way than one. Raises RowError."""
        if not sizes:
            return Expanded((), ())
        tensors = "np" if VISION in self._marks else "pt"  # audioflamingo3's knows no other
        if any(size.sampled for size in sizes):
            tensors = None  # what is on the meta device cannot become an array
        return self._run(self._shapes, self._written(sizes), [*map(sized, sizes)], tensors)[1]

    def _run(self, processor: Any, text: str, media: list, tensors: str | None,
             options: Mapping[str, Any] = MappingProxyType({})) -> tuple[dict[str, Any], Expanded]:
        """(The arguments that a processor makes of one text and its media, what the media
        become). options: of its call for images and videos. Raises RowError."""
        kinds = [kind_of(medium) for medium in media]
        images, clips, videos = ([m for m, kind in zip(media, kinds, strict=True) if kind == wanted]
                                 for wanted in (VISION, AUDIO, VIDEO))
        given = {"audio": clips, "audio_kwargs": {"sampling_rate": self.audio.sample_rate}
                 } if clips else {}
        if videos:
            given |= self.videos.arguments(videos, options)
        try:
            # Nested as apply_chat_template does it: some processors tell examples by the lists.
            out = processor(text=[text], images=[images] if images else None,
                            images_kwargs={**self.options, **options}, return_tensors=tensors,
                            add_special_tokens=self._adds_special_tokens(text),
                            return_text_replacement_offsets=True, **given)
        except MemoryError:
            raise
        except Exception as error:  # processors check little themselves
            raise RowError(f"the processor of the model refuses it: {type(error).__name__}: {error}"
                           ) from error
        out.pop("attention_mask", None)
        offsets = out.pop("text_replacement_offsets", [])
        texts = tuple(o["replacement"] for row in offsets for o in row)
        shown, heard = ([t for t, kind in zip(texts, kinds, strict=True) if kind == wanted]
                        for wanted in (VISION, AUDIO))
        features = [text.count(self._features[VISION]) for text in shown]
        grids = {VISION: zip(image_grids(processor, out, features, self.patch) if images else ()),
                 AUDIO: zip(self._clips.grids(out, clips, heard) if clips else ()),
                 VIDEO: Videos.grids(out)}
        return dict(out), Expanded(texts, tuple(next(grids[kind]) for kind in kinds))

    def _tokens(self, spans: Sequence[Span], expanded: Expanded, limit: int
                ) -> tuple[Tokens | None, int]:
        """(The sequence, how many media fit into `limit`); None where not all of them do. Raises
        RowError where features cannot be told from text, and for other ids than the processor's."""
        texts = iter(expanded.texts)
        spans = [Text(next(texts), False) if isinstance(s, Medium) else s for s in spans]
        ids, learnt = self._encoded(spans)
        counted = {modality: np.array([text.count(token) for text in expanded.texts], np.int64)
                   for modality, token in self._features.items()}
        for modality, count in counted.items():
            if (ids == self.token_ids[modality]).sum() != count.sum():
                raise RowError(f"its text contains the token {self._features[modality]}, which "
                               f"stands for {KINDS[modality].name}s")
        features = sum(counted.values())
        at = np.flatnonzero(np.isin(ids, [*self.token_ids.values()]))
        ends = np.cumsum(features)
        begins, last = at[ends - features], at[ends - 1]
        # The token behind a medium belongs to it where the model looks for it.
        fit = int((last + self._is_omni < (limit or len(ids))).sum())
        if fit < len(features):
            return None, fit
        if self._have_grids and (begins[1:] == last[:-1] + 1).any():
            raise RowError("two media have no token between them, so the model cannot tell them "
                           "apart: write text between them")
        ids, learnt = ids[: limit or None], learnt[: limit or None]
        if self._is_omni:
            ids, learnt = self._clips.bracketed(ids, learnt, begins)
        if self._most_tokens and len(ids) > self._most_tokens:
            raise RowError(f"it has {len(ids)} tokens, but after {self._most_tokens} this model's "
                           "rotary positions change for other examples of the batch, too: set "
                           f"data.max_example_tokens to {self._most_tokens} or less")
        num_items = np.array([len(grids) for grids in expanded.grids], np.int64)
        features = np.repeat(features // num_items, num_items)
        first = at[np.cumsum(features) - features]
        starts = np.append(first, len(ids))  # text runs from the end of an image's features
        counts = np.diff(starts, prepend=0) - np.append(0, features)
        segments = [(TEXT, text_lengths(int(counts[0])))]
        modalities = np.where(ids[first] == self.token_ids.get(AUDIO, -1), AUDIO, VISION).tolist()
        grids = [grid for of_medium in expanded.grids for grid in of_medium]
        for modality, (t, h, w), tokens, count in zip(
                modalities, grids, features, counts[1:], strict=True):
            rows = t * h * w
            positions = (rows + 1) // 2 if modality == AUDIO else rows  # a convolution of stride 2
            segments += [(modality, SegmentLengths(rows, positions, int(tokens), (t, h, w))),
                         (TEXT, text_lengths(int(count)))]
        return Tokens(ids, learnt, [s for s in segments if s[1].num_tokens]), fit

    def _adds_special_tokens(self, text: str) -> bool:
        """As apply_chat_template decides it."""
        begin = self._processor.tokenizer.bos_token
        return begin is None or not text.startswith(begin)

    def _encoded(self, spans: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        """(ids, learnt) of a conversation whose media are text, with the special tokens that the
        processor's tokenizer adds around it. Raises RowError where it has other ids between."""
        ids, learnt = self.tokenizer.encode_spans(spans)
        text = "".join(span.text for span in spans)
        theirs = np.array(self._processor.tokenizer(
            text, add_special_tokens=self._adds_special_tokens(text))["input_ids"], np.int32)
        for start in range(len(theirs) - len(ids) + 1):
            if np.array_equal(theirs[start: start + len(ids)], ids):
                end = len(theirs) - len(ids) - start
                return theirs, np.pad(learnt, (start, end))
        for token in self.tokenizer.special:
            if any(span.of_data and token in span.text for span in spans):
                raise RowError(f"its text contains the special token {token}, which the model "
                               "would read as that: leave it out or write it in another way")
        raise RowError("the processor's tokenizer has other ids for it than tokenizer.json")
