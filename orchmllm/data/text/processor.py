"""The processor of a model of transformers: what it makes of a conversation's text and media.

It expands the placeholder of every medium itself and makes the tensors. The ids are those that its
own tokenizer makes in its own call, one for a row; which of them are learnt is told by where they
are in the text, which the project's own rendering of the chat template wrote
(orchmllm.data.text.encoded). When a folder is opened, conversations are proven to have the ids that
tokenizer.json gives by itself, where special tokens of the template are other tokens than those in
the data. Of every row it is checked that it has the tokens of its media and no special token of the
data, and that its text was read to the end.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, lru_cache, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
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
    adapted,
    blank,
    kind_of,
    of_clips,
    reading,
    sized,
)
from orchmllm.data.media.video_processor import PROCESSORS, Videos, with_videos
from orchmllm.data.segments import KINDS, VIDEOS
from orchmllm.data.text.clips import Clips
from orchmllm.data.text.encoded import Encoded, OneCall, Written, digest_of, keep_space
from orchmllm.data.text.model_folder import (
    image_grids,
    load_processor,
    most_tokens,
    refused,
    settled,
)
from orchmllm.data.text.sequences import Sequences
from orchmllm.data.text.spans import Expanded, Span, Text, Tokens, before
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import AUDIO, VISION

_TYPES = {VISION: 1, VIDEO: 2, AUDIO: 3}  # of tokens, in mm_token_type_ids
# What is said in the conversations that are compared when a folder is opened.
_SAID = ("Who is it?", " Anna,\u4e16\u754c \n\n", "\tGr\u00fc\u00dfe 1234567\r\n",
         "it's\u00a0\U0001f469\u200d\U0001f680 <b>")


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
        template = self._processor.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ValueError(f"{folder}: it has no chat template: put the chat_template.jinja of "
                             "the model's instruct version into it")
        self.tokenizer = ChatTokenizer(self.folder, template, self._marks)
        self._read_tokenizer()
        self.expanded = lru_cache(maxsize=1024)(self._expanded)
        try:
            self._prove()
        except RowError as error:
            raise ValueError(f"{folder}: its processor cannot be used for a medium, a question and "
                             f"an answer: {error}") from error
        self._sequences.most_tokens = self._most_tokens = most_tokens(config)

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
            self._have_grids = "image_grid_thw" in images.model_input_names and any(
                hasattr(config, f"{kind}_start_token_id") for kind in ("vision", "image"))
            self.patch = int(np.max(config.vision_config.patch_size))
            marks[VISION], tokens[VISION] = processor.image_token, int(config.image_token_id)
        if self.videos is not None:
            marks[VIDEO], tokens[VIDEO] = processor.video_token, int(config.video_token_id)
        if hasattr(processor, "feature_extractor"):
            clips = of_clips(processor.feature_extractor)
            self._shapes.feature_extractor = self._some.feature_extractor = clips
            self._clips = Clips(processor, config)
            marks[AUDIO], tokens[AUDIO] = processor.audio_token, int(config.audio_token_id)
        for part in (self._shapes, self._some):
            part._merge_kwargs = settled(part._merge_kwargs)

    def _read_tokenizer(self) -> None:
        """The tokens that stand for features of media, and those that data must not write."""
        self._ids_of = self._processor.tokenizer
        if not getattr(self._ids_of, "is_fast", False):
            raise ValueError(f"{self.folder}: its tokenizer is not one of `tokenizers`, which says "
                             "where in a text a token is: save the fast one into it")
        backend = self._ids_of.backend_tokenizer
        keep_space(backend)
        self._features = {kind: self._ids_of.convert_ids_to_tokens(token)
                          for kind, token in self.token_ids.items()}
        missing = [self.token_ids[kind] for kind, token in self._features.items() if token is None]
        if missing:
            raise ValueError(f"{self.folder}: its tokenizer does not have the token {missing[0]}, "
                             "which config.json names for media")
        special = {token.content: at for at, token in backend.get_added_tokens_decoder().items()
                   if token.special}
        reserved = {*special, *self.tokenizer.special, *self._marks.values(),
                    *self._features.values()}
        self._reserved = re.compile("|".join(map(re.escape, sorted(reserved, key=len)[::-1])))
        size = max(self.tokenizer.vocab_size, *special.values(), *self.token_ids.values()) + 1
        self._is_reserved = np.zeros(size, bool)
        self._is_reserved[[*special.values(), *self.token_ids.values()]] = True
        is_omni = self._clips is not None and self._clips.brackets
        self._sequences = Sequences(self.token_ids, self._features, size, self._have_grids,
                                    self._clips if is_omni else None)

    def _prove(self) -> None:
        """Finds out how the processor calls its tokenizer, and whether it asks more of it than ids.
        Raises RowError where conversations with media of all kinds become other ids than by the
        whole processor, or other ids, or others that are learnt, than by tokenizer.json alone."""
        kinds = [kind for kind in self._marks if kind != VIDEO]
        sizes = tuple(Size(224, 336) if kind == VISION else Size(0, self.audio.sample_rate)
                      for kind in kinds)
        media, asked = [*map(sized, sizes)], OneCall(self._ids_of)
        talk = self.rendered([Turn("user", (*(Medium(kind, "") for kind in kinds), "a"), False),
                              Turn("assistant", ("b",), True)])
        tensors = "np" if VISION in kinds else "pt"  # audioflamingo3's knows no other
        with refused():
            if VISION in kinds:
                self._some.image_processor = reading(self._processor.image_processor, self.options)
            self._settings = self._shapes._merge_kwargs(
                tokenizer_init_kwargs=self._ids_of.init_kwargs, images_kwargs=self.options,
                audio_kwargs={"sampling_rate": self.audio.sample_rate} if self.audio else {},
                return_tensors=tensors)
        self._run(self._shapes, asked, self._placed(talk), media, tensors)
        self._asked, self._takes_ids = asked.options, True
        for said in _SAID:
            spans = [span._replace(text=said) if isinstance(span, Text) and span.of_data else span
                     for span in talk]
            found, texts = self.tokens(spans, sizes), iter(self.expanded(sizes).texts)
            whole, wanted = self.load(spans, media, 0)
            ids, learnt = self.tokenizer.encode_spans([
                Text(next(texts), False) if isinstance(span, Medium) else span for span in spans])
            added = [k for k in range(len(found.ids) - len(ids) + 1)
                     if np.array_equal(found.ids[k: k + len(ids)], ids)]
            if not added or np.flatnonzero(found.learnt).tolist() != (
                    np.flatnonzero(learnt) + added[0]).tolist():
                raise RowError("the processor's tokenizer has other ids for it than tokenizer.json")
            if whole.segments != found.segments or not (
                    np.array_equal(whole.ids, found.ids)
                    and np.array_equal(whole.learnt, found.learnt)):
                raise RowError("its parts make something else of media than the whole")
        try:
            _, made = self.load(spans, media, 0, known=found)
        except RowError:  # it asks its tokenizer for places, too
            self._takes_ids = False
        else:
            self._takes_ids = wanted.keys() == made.keys() and all(
                torch.equal(value, made[name]) for name, value in wanted.items())

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
            written, encoded, expanded = self._measured(spans, tuple(sizes))
            learnt = self._learnt(written, encoded)
            tokens, fit = self._sequences.of(encoded.ids, learnt, expanded, limit)
            if tokens is not None:
                is_cut = len(tokens.ids) < len(encoded.ids)
                return tokens if is_cut else tokens._replace(digest=digest_of(encoded.text))
            spans, sizes = before(spans, fit), sizes[:fit]

    def load(self, spans: Sequence[Span], media: list, limit: int,
             options: Mapping[str, Any] = MappingProxyType({}), known: Tokens | None = None
             ) -> tuple[Tokens, dict[str, Tensor]]:
        """(The sequence of a rendered conversation and its media, the processor's other tensors by
        argument name). media: images of Pillow, as arrays small ones can be read with another side
        for the channels; clips (n,) float32; or as `sized` makes them, whose content is not wanted.
        The tensor of videos is on the meta device: see Videos.pixels. limit: see `tokens`; no
        medium crosses it. options: of the call for images; known: what `tokens` made of these
        spans; it is not made again where the processor writes the same text. Raises RowError."""
        has_pixels = any(isinstance(medium, Image.Image) for medium in media)
        asked = OneCall(self._ids_of, known if self._takes_ids else None)
        out, expanded = self._run(self._some if has_pixels else self._shapes, asked,
                                  self._placed(spans), media, "pt", options)
        if asked.encoded is None:
            ids, learnt = known.ids, known.learnt
        else:
            ids = asked.encoded.ids
            learnt = self._learnt(Written.of(spans, expanded.texts), asked.encoded)
        tokens, _ = self._sequences.of(ids, learnt, expanded, limit)
        made, n = out.pop("input_ids"), len(tokens.ids)
        if made[0, :n].tolist() != tokens.ids.tolist():
            raise RowError("the processor makes other tokens of its media than of their sizes")
        return tokens, {name: value[:, :n] if name.endswith("type_ids") else value
                        for name, value in out.items()}

    def parts(self, media: Sequence[Image.Image | np.ndarray], **options: Any
              ) -> list[dict[str, Tensor]]:
        """The tensors of each of these media, images or clips, in an example of their own."""
        out, expanded = self._run(self._processor, OneCall(self._ids_of), self._written(media),
                                  [*media], "pt", options)
        return KINDS[kind_of(media[0])].parts(
            out, np.array([grids[0] for grids in expanded.grids]))

    def arithmetic(self) -> dict[str, Callable[[], Arithmetic]]:
        """What finds out what becomes of the pixels in an argument, images or videos. It may raise
        anything, because processors need not have these steps."""
        found, name = {}, KINDS[VISION].content
        if images := getattr(self._processor, "image_processor", None):
            found[name] = partial(of_images, images, self.options, name, self.parts)
        if self.videos is not None and self.videos.processor is not None:
            found[VIDEOS] = self.videos.arithmetic
        return found

    def arguments_like(self, ids: Tensor, sizes: Sequence[Size], **options: Any
                       ) -> dict[str, Tensor]:
        """The processor's tensors for an example with these ids (n,) and blank media. options: of
        its call, for images and videos alike."""
        text = self._written(sizes) or "no media"
        out, _ = self._run(self._processor, OneCall(self._ids_of), text, [*map(blank, sizes)],
                           "pt", options)
        del out["input_ids"]
        types = sum(_TYPES[kind] * (ids == token).long()[None]
                    for kind, token in self.token_ids.items())
        return {name: types if name.endswith("type_ids") else value for name, value in out.items()}

    def _written(self, media: Sequence[Content]) -> str:
        """The placeholders of media, or of their sizes."""
        return "\n".join(self._marks[kind_of(medium)] for medium in media)

    def _placed(self, spans: Sequence[Span]) -> str:
        """A conversation as the processor is given it. Raises RowError where the data write a
        token that they must not."""
        for text in [span.text for span in spans if isinstance(span, Text) and span.of_data]:
            if found := self._reserved.search(text):
                raise self._refusal(found[0])
        return Written.of(spans, [self._marks[span.modality] for span in spans
                                  if isinstance(span, Medium)]).text

    def _refusal(self, token: str) -> RowError:
        kinds = [KINDS[kind].name for tokens in (self._features, self._marks)
                 for kind, mark in tokens.items() if mark == token]
        if kinds and token not in self.tokenizer.special:
            return RowError(f"its text contains the token {token}, which stands for {kinds[0]}s")
        return RowError(f"its text contains the special token {token}, which the model would read "
                        "as that: leave it out or write it in another way")

    def _measured(self, spans: Sequence[Span], sizes: tuple[Size, ...]
                  ) -> tuple[Written, Encoded, Expanded]:
        """A conversation with media of these sizes, encoded as the processor would have it. Raises
        RowError."""
        placed, expanded = self._placed(spans), self.expanded(sizes)
        written, asked = Written.of(spans, expanded.texts), OneCall(self._ids_of)
        with refused():
            asked([written.text], **{**self._asked, "return_tensors": None, "add_special_tokens":
                                     self._adds_special_tokens(placed)})
        return written, asked.encoded, expanded

    def _expanded(self, sizes: tuple[Size, ...]) -> Expanded:
        """What media of these sizes become, which are all media of an example: processors treat
        several in another way than one. Those parts of the processor run that decide it. Raises
        RowError."""
        media, kinds = [*map(sized, sizes)], [*map(kind_of, sizes)]
        text = self._written(sizes)
        if VIDEO in kinds:  # whose settings are those of its frames
            return self._run(self._shapes, OneCall(self._ids_of), text, media, None)[1]
        processor, out, texts = self._shapes, {}, {}
        with refused():
            given = self._given(media, kinds)
            laid = dict(zip(("images", "text", "videos", "audio"),
                            processor.prepare_inputs_layout(text=[text], **given), strict=False))
            processor.validate_inputs(text=laid["text"], **{name: laid[name] for name in given})
            for kind, name, run in ((VISION, "images", processor._process_images),
                                    (AUDIO, "audio", processor._process_audio)):
                if name in given:
                    made, texts[kind] = run(laid[name], **self._settings[f"{name}_kwargs"])
                    out |= made
        of_kinds = {kind: iter(of_kind) for kind, of_kind in texts.items()}
        return self._become(out, media, kinds, [next(of_kinds[kind]) for kind in kinds])

    @staticmethod
    def _given(media: list, kinds: Sequence[int]) -> dict[str, list]:
        """Images and clips as arguments of a processor. They are nested as apply_chat_template does
        it: some processors tell examples by the lists."""
        images, clips = ([m for m, kind in zip(media, kinds, strict=True) if kind == wanted]
                         for wanted in (VISION, AUDIO))
        return ({"images": [images]} if images else {}) | ({"audio": clips} if clips else {})

    def _run(self, processor: Any, tokenizer: OneCall, text: str, media: list,
             tensors: str | None, options: Mapping[str, Any] = MappingProxyType({})
             ) -> tuple[dict[str, Any], Expanded]:
        """(The arguments that a processor makes, with a tokenizer in place of its own, of one text
        and its media; what the media become). options: of its call for images and videos. Raises
        RowError."""
        processor, kinds = copy.copy(processor), [*map(kind_of, media)]
        processor.tokenizer = tokenizer
        given = self._given(media, kinds)
        if "audio" in given:
            given["audio_kwargs"] = {"sampling_rate": self.audio.sample_rate}
        given |= self.videos.arguments([m for m, kind in zip(media, kinds, strict=True)
                                        if kind == VIDEO], options) if VIDEO in kinds else {}
        with refused():
            out = processor(text=[text], images_kwargs={**self.options, **options},
                            return_tensors=tensors,
                            add_special_tokens=self._adds_special_tokens(text),
                            return_text_replacement_offsets=True, **given)
        out.pop("attention_mask", None)
        texts = [found["replacement"] for row in out.pop("text_replacement_offsets", [])
                 for found in row]
        expanded = self._become(out, media, kinds, texts)
        return dict(out), expanded

    def _become(self, out: dict[str, Any], media: list, kinds: Sequence[int], texts: Sequence[str]
                ) -> Expanded:
        """What media become of which the processor made the texts and the tensors `out`; frames
        that are not encoded are cut from these."""
        shown, heard = ([t for t, kind in zip(texts, kinds, strict=True) if kind == wanted]
                        for wanted in (VISION, AUDIO))
        features = [text.count(self._features[VISION]) for text in shown]
        clips = [m for m, kind in zip(media, kinds, strict=True) if kind == AUDIO]
        grids = {VISION: zip(image_grids(self._processor, out, features, self.patch)
                             if shown else ()),
                 AUDIO: zip(self._clips.grids(out, clips, heard) if clips else ()),
                 VIDEO: Videos.grids(out)}
        return Expanded(tuple(texts), tuple(next(grids[kind]) for kind in kinds))

    def _learnt(self, written: Written, encoded: Encoded) -> np.ndarray:
        """(n,) bool: which tokens are learnt. Raises RowError for special tokens of the data, and
        where the text was not read to its end."""
        if not encoded.is_whole:
            raise RowError("the tokenizer of the model leaves out the end of its text")
        for token in encoded.ids_in(written.of_data, self._is_reserved[encoded.ids]):
            raise self._refusal(self._ids_of.convert_ids_to_tokens(token))
        return encoded.learnt(written.learnt)

    def _adds_special_tokens(self, text: str) -> bool:
        """As apply_chat_template decides it."""
        begin = self._processor.tokenizer.bos_token
        return begin is None or not text.startswith(begin)
