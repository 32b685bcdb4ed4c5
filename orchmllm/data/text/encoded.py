"""A conversation as the tokenizer of a model of transformers encodes it, in one call.

The ids are those of this call. Which of them are learnt, and that none is a special token that the
data wrote, is told by the characters that each of them is of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from transformers import BatchEncoding, PreTrainedTokenizerFast

from orchmllm.data.media.medium import Medium
from orchmllm.data.text.spans import Expanded, Span

Range = tuple[int, int]  # the first and the one after the last


class Written(NamedTuple):
    """A conversation as one text, with what its media become. learnt, of_data: characters."""

    text: str
    learnt: list[Range]
    of_data: list[Range]

    @classmethod
    def of(cls, spans: Sequence[Span], media: Sequence[str]) -> Written:
        """media: what is written for each."""
        texts, learnt, of_data, end, shown = [], [], [], 0, iter(media)
        for span in spans:
            is_medium = isinstance(span, Medium)
            texts.append(next(shown) if is_medium else span.text)
            start, end = end, end + len(texts[-1])
            if not is_medium:
                learnt += [(start, end)] * span.learnt
                of_data += [(start, end)] * span.of_data
        return cls("".join(texts), learnt, of_data)


class Encoded(NamedTuple):
    """text: that was encoded. ids (n,) int32. places (n, 2): the characters of each token, as a
    Range; (0, 0) of one that was added around the text."""

    text: str
    ids: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, text: str, found: Any) -> Encoded:
        """found: an Encoding of `tokenizers`."""
        places = np.fromiter(chain.from_iterable(found.offsets), np.int64, 2 * len(found))
        return cls(text, np.array(found.ids, np.int32), places.reshape(-1, 2))

    @property
    def is_whole(self) -> bool:
        """Whether the text has been read to its end, but for space."""
        return int(self.places[:, 1].max(initial=0)) >= len(self.text.rstrip())

    def learnt(self, ranges: Sequence[Range]) -> np.ndarray:
        """(n,) bool: the tokens from the first to the last with a character in one of `ranges`. A
        character may be in several tokens, and a token between may have none."""
        out = np.zeros(len(self.ids), bool)
        for start, end in ranges:
            inside = np.flatnonzero((self.places[:, 0] < end) & (self.places[:, 1] > start))
            if len(inside):
                out[inside[0]: inside[-1] + 1] = True
        return out

    def ids_in(self, ranges: Sequence[Range], which: np.ndarray) -> list[int]:
        """Those of the tokens `which` (n,) bool that have a character in one of `ranges`, without
        the space around them, which a special token may take in."""
        before = np.zeros(len(self.text) + 1, np.int64)  # characters of `ranges` before each
        for start, end in ranges:
            before[start + 1: end + 1] = 1
        before = before.cumsum()
        starts, ends = self.places.T
        out = []
        for k in np.flatnonzero(which & (before[ends] > before[starts])).tolist():
            start, end = self.places[k].tolist()
            read = self.text[start:end]
            start, end = end - len(read.lstrip()), start + len(read.rstrip())
            if start < end and before[end] > before[start]:
                out.append(int(self.ids[k]))
        return out


def digest_of(text: str, expanded: Expanded) -> bytes:
    """expanded: what the media became that are in the text."""
    grids = repr(expanded.grids).encode()
    return blake2b(text.encode("utf-8", "surrogatepass") + grids, digest_size=16).digest()


class OneCall:
    """The tokenizer of a processor in one call of it, which keeps what the processor asks of it:
    options, and the text with its ids."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.options: dict[str, Any] = {}
        self.encoded: Encoded | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, text: Sequence[str], **options: Any) -> BatchEncoding:
        self.options = {k: v for k, v in options.items() if k != "return_tensors"}
        out = self._tokenizer(text, **self.options)
        self.encoded = Encoded.of(text[0], out.encodings[0])
        return self.converted(out, options)

    @staticmethod
    def converted(out: BatchEncoding, options: Mapping[str, Any]) -> BatchEncoding:
        """With the tensors that a call with these options asks for."""
        if make := {"pt": torch.tensor, "np": np.array}.get(options.get("return_tensors")):
            out.update({name: make(value) for name, value in out.items()})
        return out


class Encoder:
    """The tokenizer of a processor, as this calls it: with these options, and with special tokens
    around the text or without. tokenizer: has been called with them before, which sets up the
    `tokenizers` below it; where nothing else is done in a call, that is called itself."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, options: Mapping[str, Any]) -> None:
        self._tokenizer, self._options = tokenizer, dict(options)
        self._is_direct = all(
            getattr(type(tokenizer), name) is getattr(PreTrainedTokenizerFast, name)
            for name in ("__call__", "_encode_plus"))

    @property
    def identity(self) -> list:
        """What decides which ids a text has: what is left of the files when they are read."""
        tokenizer = self._tokenizer
        return [type(tokenizer).__name__, tokenizer.backend_tokenizer.to_str(),
                tokenizer.bos_token, self._options]

    def __call__(self, text: str, adds_special_tokens: bool) -> Encoded:
        if self._is_direct:
            [found] = self._tokenizer.backend_tokenizer.encode_batch(
                [text], add_special_tokens=adds_special_tokens)
        else:
            [found] = self._tokenizer([text], **self._options | {
                "add_special_tokens": adds_special_tokens}).encodings
        return Encoded.of(text, found)


def keep_space(tokenizer: Any) -> None:
    """Of a tokenizer of `tokenizers`: the characters of a token are with the space in it, which
    some post-processors leave out. Ids stay what they are."""
    if (last := tokenizer.post_processor) is not None:
        last.__setstate__(last.__getstate__().replace(b'"trim_offsets":true',
                                                      b'"trim_offsets":false'))
        tokenizer.post_processor = last
