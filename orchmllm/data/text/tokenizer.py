"""Conversations as the chat template writes them, and the token ids of their text.

The tokenizer's chat template when it has one (rendered in jinja's sandbox), else ChatML as in
Qwen2. A conversation is encoded as one text, as transformers does it. Other tokens stand in it for
the special tokens of the template, so one that spells out "<|im_end|>" cannot end its turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import DOCUMENT, Turn
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.text.spans import Span, Text
from orchmllm.data.text.templates import ChatTemplate, read_json, read_template
from orchmllm.plan.layout import AUDIO, VISION

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
_MARK = "\ufdd0"  # begins and ends what stands for another token; a noncharacter
DEFAULT_SYSTEM = "You are a helpful assistant."  # Qwen2's, when a conversation brings none


class _Marked(NamedTuple):
    """A text to encode. learnt: (first, last + 1) characters, in order."""

    text: str
    learnt: list[tuple[int, int]]


class ChatTokenizer:
    """A `tokenizers` file, with the chat template beside it if there is one.

    path: tokenizer.json, or a folder that holds it (with chat_template.jinja or a
    tokenizer_config.json with "chat_template"). template: instead of the one beside it.
    media: modality -> what the template writes for a medium. Raises ValueError if it cannot be
    read, or lacks ChatML's special tokens and has no template.
    """

    def __init__(self, path: str | os.PathLike, template: str = "",
                 media: Mapping[int, str] | None = None):
        from tokenizers import Tokenizer

        self._arguments = path, template, media

        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"{path}: no such tokenizer file; give the path of a tokenizer.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the bindings raise bare Exception
            raise ValueError(f"{path}: not a tokenizer.json of `tokenizers`: {error}") from error
        self.path, self.template = path, read_template(path.parent, template)
        for token in () if self.template else (IM_START, IM_END, END_OF_TEXT):
            if self.tokenizer.token_to_id(token) is None:
                raise ValueError(
                    f"{path}: the special token {token} is missing; use the tokenizer.json of a "
                    "ChatML model (Qwen2), put the chat template of the model beside it, or add "
                    "the token with tokenizers.Tokenizer.add_special_tokens and save it again"
                )
        # Rows that an embedding needs.
        self.vocab_size = max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # special tokens in data are read as text
        self.tokenizer.post_processor = None  # it would cut space off the offsets
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = special = [t.content for t in added.values() if t.special]
        either = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
        self._special = re.compile(either or "(?!)")
        self._chat = self.template and ChatTemplate(
            *self.template, special, str(path), media or {})
        for modality, token in (media or {}).items():
            if modality != VIDEO and not self.writes(modality):
                kind = {VISION: "an image", AUDIO: "a clip"}[modality]
                raise ValueError(f"{path}: the chat template does not write {token} for {kind}")
        self._stand_ins, self._ids = self._add_stand_ins(added)
        self._of_template = lru_cache(maxsize=4096)(
            lambda text: self._special.sub(lambda m: self._stand_ins[m[0]], text))

    def _add_stand_ins(self, added: dict) -> tuple[dict[str, str], np.ndarray]:
        """Adds tokens that stand for the special tokens that a template writes, which data cannot
        write. Returns them by special token; and the id that each token has in the model."""
        from tokenizers import AddedToken

        out: dict[str, str] = {}
        ids = np.arange(self.vocab_size + len(added), dtype=np.int32)
        for special in [t for t in added.values() if t.special]:
            out[special.content] = f"{_MARK}{len(out)}{_MARK}"
            self.tokenizer.add_tokens([AddedToken(
                out[special.content], single_word=special.single_word, lstrip=special.lstrip,
                rstrip=special.rstrip, normalized=special.normalized)])
            at = self.tokenizer.token_to_id(out[special.content])
            if at < self.vocab_size:
                raise ValueError(f"{self.path}: its token ids have gaps, so no token can be added "
                                 "to it: number them from 0 on")
            ids[at] = self.tokenizer.token_to_id(special.content)
        return out, ids

    def __reduce__(self):
        return ChatTokenizer, self._arguments  # worker processes open the file themselves

    def writes(self, modality: int) -> bool:
        """Whether the chat template writes what stands for media of a modality."""
        return bool(self._chat and modality in self._chat.marks)

    @property
    def end_id(self) -> int | None:
        """Id of the special token that ends an assistant's turn; None if the template has none."""
        ids, learnt = self.tokenize([Turn("user", ("a",), False),
                                     Turn("assistant", ("b",), True)])
        added = self.tokenizer.get_added_tokens_decoder()
        return next((i for i in reversed(ids[learnt].tolist()) if i in added), None)

    @cached_property
    def digest(self) -> str:
        """Changes with anything that changes token ids, and not with how the JSON is written."""
        content = json.dumps([read_json(self.path), self.template], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def plain(self, text: str) -> str:
        """A text of the template without special tokens."""
        return self._special.sub("", text)

    def spans(self, turns: Sequence[Turn]) -> list[Span]:
        """A conversation, or a document, as the template writes it. Raises RowError."""
        if turns and turns[0].role == DOCUMENT:
            return self._document(turns)
        return _chatml(turns) if self._chat is None else self._chat.spans(turns)

    def encode_spans(self, spans: Sequence[Text]) -> tuple[np.ndarray, np.ndarray]:
        """(ids (n,) int32, which of them are learnt (n,) bool) of text without media. A token is
        learnt if one of its characters is. Raises RowError."""
        marked = self._marked(spans)
        encoded = self.tokenizer.encode(marked.text, add_special_tokens=False)
        learnt = np.zeros(len(encoded.ids), bool)
        for start, end in marked.learnt:
            first = _token_at(encoded, range(start, end))
            if first is not None:
                last = _token_at(encoded, range(end - 1, start - 1, -1))
                while last + 1 < len(learnt) and encoded.token_to_chars(last + 1)[0] < end:
                    last += 1  # a character may be in several tokens
                learnt[first: last + 1] = True
        return self._ids[encoded.ids], learnt

    def _document(self, turns: Sequence[Turn]) -> list[Span]:
        """Texts and media as they are, between the tokens that begin and end a text. Raises
        RowError where no token ends one."""
        named = self.template[1] if self.template else {}
        known = self.tokenizer.token_to_id(END_OF_TEXT) is not None
        begin, end = named.get("bos_token", ""), END_OF_TEXT if known else named.get("eos_token")
        if not end:
            raise RowError(f"a plain text needs a token that ends it: {END_OF_TEXT}, or eos_token "
                           "in tokenizer_config.json")
        spans: list[Span] = [Text(begin if begin != end else "", False)]
        for turn in turns:
            for part in turn.parts:
                spans.append(part if isinstance(part, Medium)
                             else Text(part, turn.supervised, True))
        return [*spans, Text(end, turns[-1].supervised)]

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Text of ids. An id that only the model's padded vocabulary has is no text."""
        known = [int(t) for t in token_ids if t < self.vocab_size]
        return self.tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def tokenize(self, turns: Sequence[Turn]) -> tuple[np.ndarray, np.ndarray]:
        """As encode_spans, of a conversation without media. Raises RowError for text or turns that
        cannot be tokenized."""
        return self.encode_spans(self.spans(turns))

    def _marked(self, spans: Sequence[Text]) -> _Marked:
        """The spans as one text, in which stand-ins are for special tokens."""
        texts, learnt, end = [], [], 0
        for span in spans:
            if not span.of_data:
                # What images become is long, and would fill the cache.
                write = self._of_template
                text = (write if len(span.text) < 1000 else write.__wrapped__)(span.text)
            elif _MARK in span.text:
                raise RowError(f"a text contains {_MARK!r}, which stands for no character")
            else:
                text = span.text
            texts.append(text)
            start, end = end, end + len(text)
            if span.learnt:
                learnt.append((start, end))
        return _Marked("".join(texts), learnt)


def _token_at(encoded, characters: Iterable[int]) -> int | None:
    """The first token of the first of `characters` that has one: a tokenizer may drop some."""
    for character in characters:
        token = encoded.char_to_token(character)
        if token is not None:
            return token
    return None


def _chatml(turns: Sequence[Turn]) -> list[Span]:
    if any([turn.role in ("tool", "tools") or turn.calls or turn.reasoning for turn in turns]):
        raise RowError("tools and reasoning need the chat template of the model; put its "
                       "chat_template.jinja or tokenizer_config.json beside the tokenizer")
    if not turns or turns[0].role != "system":
        turns = [Turn("system", (DEFAULT_SYSTEM,), False), *turns]
    spans: list[Span] = []
    for turn in turns:
        spans.append(Text(f"{IM_START}{turn.role}\n", False))
        spans += [p if isinstance(p, Medium) else Text(p, turn.supervised, True)
                  for p in turn.parts]
        spans += [Text(IM_END, turn.supervised), Text("\n", False)]
    return spans
