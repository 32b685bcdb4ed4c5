"""The processor of a model of transformers: what it makes of a conversation's text and media.

It expands the placeholder of every medium itself and makes the tensors. The ids are those that its
own tokenizer makes, once for a row; which of them are learnt is told by where they are in the text,
which the project's own rendering of the chat template wrote (orchmllm.data.text.encoded). When a
folder is opened, conversations are proven to have the ids that tokenizer.json gives by itself,
where special tokens of the template are other tokens than those in the data. Of every row it is
checked that it has the tokens of its media and no special token of the data, and that its text was
read to the end.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orchmllm.data.formats.conversation import Turn, media_of
from orchmllm.data.formats.scanned import digest
from orchmllm.data.made import Made
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.media.raw import AS_BYTES, NOTHING, Arithmetic, of_images, with_bytes
from orchmllm.data.media.shapes import Content, Size, blank, kind_of, sized
from orchmllm.data.media.video_processor import Videos, with_videos
from orchmllm.data.media_tensors import KINDS, TYPES, VIDEOS
from orchmllm.data.text import proof
from orchmllm.data.text.calls import Calls
from orchmllm.data.text.encoded import Encoded, Encoder, OneCall, Written, digest_of, keep_space
from orchmllm.data.text.model_folder import most_tokens, refused
from orchmllm.data.text.sequences import Sequences
from orchmllm.data.text.spans import Expanded, Span, Text, Tokens, before
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import MADE, VISION


class Processor:
    """folder: of a model of transformers, with config.json, its processor, tokenizer.json and a
    chat template. Code of the folder is never run, images are resized by Pillow, and videos are
    read as images where the family has no tokens for them. token_ids: modality -> the token that
    stands for a row of features; made: of a model that makes images, else None; patch: pixels of
    its side; videos: the part for them, or None. options: of the call of the processor for images
    (size, do_pan_and_scan, ...), instead of its own. Raises ValueError naming the folder if it
    cannot be used."""

    def __init__(self, folder: str | os.PathLike, options: Mapping[str, Any] | None = None
                 ) -> None:
        self.folder, self.options = Path(folder), dict(options or {})
        try:
            self.calls = Calls(self.folder, self.options)
            self.token_ids, self.patch = self.calls.token_ids, self.calls.patch
            self.made = Made.of(self.calls.config, self.calls.stock.tokenizer)
            self._ids_of = self.calls.stock.tokenizer
            self.tokenizer = ChatTokenizer(self.folder, self._template(), self.calls.marks)
            self._read_tokenizer()
            self._prove()
        except RowError as error:
            raise ValueError(f"{folder}: its processor cannot be used for a medium, a question and "
                             f"an answer: {error}") from error

    def _template(self) -> str:
        template = self.calls.stock.chat_template
        if isinstance(template, dict):
            template = template.get("default")
        if not template:
            raise ValueError(f"{self.folder}: it has no chat template: put the chat_template.jinja "
                             "of the model's instruct version into it")
        return template

    def _read_tokenizer(self) -> None:
        """The tokens that stand for features of media, and those that data must not write."""
        if not getattr(self._ids_of, "is_fast", False):
            raise ValueError(f"{self.folder}: its tokenizer is not one of `tokenizers`, which says "
                             "where in a text a token is: save the fast one into it")
        calls, backend = self.calls, self._ids_of.backend_tokenizer
        keep_space(backend)
        missing = [token for kind, token in self.token_ids.items() if calls.features[kind] is None]
        if self.made is not None and self.made.token is None:
            missing.append(self.made.id)
        if missing:
            raise ValueError(f"{self.folder}: its tokenizer does not have the token {missing[0]}, "
                             "which config.json names for media")
        special = {token.content: at for at, token in backend.get_added_tokens_decoder().items()
                   if token.special}
        reserved = {*special, *self.tokenizer.special, *calls.marks.values(),
                    *calls.features.values(), *calls.placeholders}
        self._reserved = re.compile("|".join(map(re.escape, sorted(reserved, key=len)[::-1])))
        ids = [*special.values(), *self.token_ids.values(), *filter(
            None, calls.placeholders.values())]
        size = max(self.tokenizer.vocab_size, *ids) + 1
        self._is_reserved = np.zeros(size, bool)
        self._is_reserved[ids] = True
        self._types = torch.zeros(size, dtype=torch.int64)
        for kind, token in self.token_ids.items():
            self._types[token] = TYPES[kind]
        is_omni = calls.clips is not None and bool(calls.clips.starts)
        self._sequences = Sequences(self.token_ids, calls.features, size, calls.has_grids,
                                    calls.clips if is_omni else None)

    def _prove(self) -> None:
        """Finds out how the processor calls its tokenizer; see orchmllm.data.text.proof."""
        spans, sizes = proof.conversation(self)
        asked = OneCall(self._ids_of)
        self.calls.whole(self.placed(spans), [*map(sized, sizes)], asked)
        self._encode = Encoder(self._ids_of, asked.options)
        self._typed = proof.prove(self)
        self._sequences.most_tokens = self._most_tokens = most_tokens(self.calls.config)

    @property
    def audio(self) -> AudioGeometry | None:
        """The rate at which clips are read; None where the model takes none."""
        return self.calls.clips and self.calls.clips.geometry

    @property
    def videos(self) -> Videos | None:
        return self.calls.videos

    def __reduce__(self):
        return Processor, (self.folder, self.options)  # worker processes open the files themselves

    @cached_property
    def digest(self) -> str:
        """Changes with anything that changes what the processor makes of a row, and not with how
        the files of the folder are written: their settings, the tokenizer that they make, and the
        packages that run it."""
        import PIL
        import tokenizers
        import transformers

        calls = self.calls
        return digest([calls.stock.to_dict(), self.tokenizer.digest, self._encode.identity,
                       self.options, self.patch, calls.clips and calls.clips.identity,
                       calls.videos and calls.videos.identity,
                       sorted(self.token_ids.items()), self._most_tokens,
                       *filter(None, [self.made]),
                       *(package.__version__ for package in (transformers, tokenizers, PIL))])

    def rendered(self, turns: Sequence[Turn]) -> list[Span]:
        """A conversation as the template writes it; a video is one medium where the model has
        tokens for it. Raises RowError."""
        media = [medium for medium in media_of(turns) if medium.modality != MADE]
        for other in {medium.modality for medium in media} - self.token_ids.keys():
            taken = " and ".join(f"{KINDS[kind].name}s" for kind in self.token_ids)
            raise RowError(f"the model takes {taken} alone: leave rows with {KINDS[other].name}s "
                           "out")
        if self.videos is not None and any(medium.sampled for medium in media):
            self.videos.check(self.tokenizer.writes(VIDEO))
            turns = with_videos(turns)
        spans = self.tokenizer.spans(turns)
        return spans if self.made is None else self.made.written(spans)

    def tokens(self, spans: Sequence[Span], sizes: Sequence[Size], limit: int = 0) -> Tokens:
        """The sequence of a rendered conversation with media of these sizes. limit: ids after
        which it ends (0: none); a medium that would cross it is left out whole. Raises RowError."""
        while True:
            expanded = self.calls.expanded(tuple(sizes))
            tokens, fit = self._tokens(spans, expanded, limit)
            if tokens is not None:
                return tokens
            spans, sizes = before(spans, fit), sizes[:fit]

    def load(self, spans: Sequence[Span], media: list, limit: int,
             options: Mapping[str, Any] = NOTHING, known: Tokens | None = None
             ) -> tuple[Tokens, dict[str, Tensor]]:
        """(The sequence of a rendered conversation and its media, the processor's other tensors by
        argument name). media: images of Pillow, as arrays small ones can be read with another side
        for the channels; clips (n,) float32; or as `sized` makes them, whose content is not wanted.
        The tensor of videos is on the meta device: see Videos.pixels. limit: see `tokens`; no
        medium crosses it. options: of the call for images; known: what `tokens` made of these
        spans, which is returned where the media become what their sizes did. Raises RowError."""
        if self._typed is None:
            return self.whole(spans, media, limit, options)
        tensors, expanded = self.media_of(media, options)
        if known is None or known.digest != digest_of(
                Written.of(spans, expanded.texts).text, expanded):
            known, _ = self._tokens(spans, expanded, limit)
        types = self.types(torch.from_numpy(known.ids))
        return known, tensors | dict.fromkeys(self._typed, types)

    def whole(self, spans: Sequence[Span], media: list, limit: int,
              options: Mapping[str, Any] = NOTHING) -> tuple[Tokens, dict[str, Tensor]]:
        """As `load`, by the processor's own call."""
        asked = OneCall(self._ids_of)
        out, expanded = self.calls.whole(self.placed(spans), media, asked, options)
        tokens, _ = self._sequence(Written.of(spans, expanded.texts), asked.encoded, expanded,
                                   limit)
        made, n = out.pop("input_ids"), len(tokens.ids)
        if made[0, :n].tolist() != tokens.ids.tolist():
            raise RowError("the processor makes other tokens of its media than of their sizes")
        return tokens, {name: value[:, :n] if name.endswith("type_ids") else value
                        for name, value in out.items()}

    def media_of(self, media: Sequence[Content], options: Mapping[str, Any] = NOTHING
                 ) -> tuple[dict[str, Tensor], Expanded]:
        """(The tensors of the media of an example, what they become)."""
        made, expanded = self.calls.made(media, options)
        return self.calls.tensors(made), expanded

    def parts(self, media: Sequence[Content], options: Mapping[str, Any] = NOTHING
              ) -> list[dict[str, Tensor]]:
        """The tensors of each of these media, images or clips, in an example of their own."""
        return _cut(media, *self.media_of(media, options))

    def arithmetic(self) -> dict[str, Callable[[], Arithmetic]]:
        """What finds out what becomes of the pixels in an argument, images or videos. It may raise
        anything, because processors need not have these steps."""
        found: dict[str, Callable[[], Arithmetic]] = {}
        if images := getattr(self.calls.stock, "image_processor", None):
            found[KINDS[VISION].content] = partial(of_images, images, self.options,
                                                   self._bare_parts, self._stock_parts)
        if self.videos is not None and self.videos.processor is not None:
            found[VIDEOS] = self.videos.arithmetic
        return found

    @cached_property
    def of_bytes(self) -> Mapping[str, Any]:
        """Options of the call for images that leaves their bytes as they are, and makes the frame
        of an image once, where that changes the size of none."""
        once = {**AS_BYTES, "temporal_patch_size": 1}
        if getattr(self.calls.stock.image_processor, "temporal_patch_size", 1) == 1:
            return AS_BYTES
        sides = (8 * 2 ** (np.arange(20) / 2)).astype(int).tolist()  # twice the pixels each
        return once if all(
            self.calls.made([sized(size)], once)[1] == self.calls.made([sized(size)])[1]
            for size in (Size(side, side) for side in sides)) else AS_BYTES

    def _bare_parts(self, images: Sequence[Content]) -> list[dict[str, Tensor]]:
        return [with_bytes(tensors, {KINDS[VISION].content}, self.patch)
                for tensors in self.parts(images, self.of_bytes)]

    def _stock_parts(self, media: Sequence[Content]) -> list[dict[str, Tensor]]:
        """As `parts`, by the processor's own call and steps."""
        return _cut(media, *self.calls.whole(self.calls.written(media), media,
                                             OneCall(self._ids_of), stock=True))

    def arguments_like(self, ids: Tensor, sizes: Sequence[Size], options: Mapping[str, Any]
                       ) -> dict[str, Tensor]:
        """The processor's tensors for an example with these ids (n,) and blank media. options: of
        its call, for images and videos alike."""
        text = self.calls.written(sizes) or "no media"
        out, _ = self.calls.whole(text, [*map(blank, sizes)], OneCall(self._ids_of), options,
                                  options, stock=True)
        del out["input_ids"]
        return {name: self.types(ids) if name.endswith("type_ids") else value
                for name, value in out.items()}

    def types(self, ids: Tensor) -> Tensor:
        """(1, n) int64 of ids (n,): the kind of medium that a token stands for, as transformers
        numbers them."""
        return self._types[ids.long()][None]

    def placed(self, spans: Sequence[Span]) -> str:
        """A conversation as the processor is given it. Raises RowError where the data write a
        token that they must not."""
        for text in [span.text for span in spans if isinstance(span, Text) and span.of_data]:
            if found := self._reserved.search(text):
                raise self._refusal(found[0])
        return Written.of(spans, [self.calls.marks[span.modality] for span in spans
                                  if isinstance(span, Medium)]).text

    def _refusal(self, token: str) -> RowError:
        kinds = [KINDS[kind].name for tokens in (self.calls.features, self.calls.marks)
                 for kind, mark in tokens.items() if mark == token]
        if kinds and token not in self.tokenizer.special:
            return RowError(f"its text contains the token {token}, which stands for {kinds[0]}s")
        return RowError(f"its text contains the special token {token}, which the model would read "
                        "as that: leave it out or write it in another way")

    def _tokens(self, spans: Sequence[Span], expanded: Expanded, limit: int
                ) -> tuple[Tokens | None, int]:
        """See `_sequence`; of a rendered conversation whose media become that."""
        placed, written = self.placed(spans), Written.of(spans, expanded.texts)
        with refused():
            encoded = self._encode(written.text, self.calls.adds_special_tokens(placed))
        tokens, fit = self._sequence(written, encoded, expanded, limit)
        if tokens is not None and len(tokens.ids) == len(encoded.ids):
            tokens = tokens._replace(digest=digest_of(written.text, expanded))
        return tokens, fit

    def _sequence(self, written: Written, encoded: Encoded, expanded: Expanded, limit: int
                  ) -> tuple[Tokens | None, int]:
        """See Sequences.of. Raises RowError for special tokens of the data, and where the text was
        not read to its end."""
        if not encoded.is_whole:
            raise RowError("the tokenizer of the model leaves out the end of its text")
        for token in encoded.ids_in(written.of_data, self._is_reserved[encoded.ids]):
            raise self._refusal(self._ids_of.convert_ids_to_tokens(token))
        return self._sequences.of(encoded.ids, encoded.learnt(written.learnt), expanded, limit)


def _cut(media: Sequence[Content], tensors: Mapping[str, Tensor], expanded: Expanded
         ) -> list[dict[str, Tensor]]:
    """tensors: of an example of media of one kind, with one item each."""
    return KINDS[kind_of(media[0])].parts(tensors, np.array(
        [grids[0] for grids in expanded.grids]))
