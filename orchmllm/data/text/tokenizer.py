"""Conversations -> token ids, with media between the text.

The tokenizer's chat template when it has one (rendered in jinja's sandbox), else ChatML as in
Qwen2. Only what the assistant says is supervised, and the special token that ends its turn.
Text of the data is encoded apart from the template: a conversation that spells out "<|im_end|>"
cannot end its turn.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.text.spans import ALL, END, NONE, Span, Text, spans_of
from orchmllm.data.text.template_engine import undeclared
from orchmllm.data.text.templates import ChatTemplate
from orchmllm.plan.layout import TEXT

IM_START, IM_END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
DEFAULT_SYSTEM = "You are a helpful assistant."  # Qwen2's, when a conversation brings none


# Token ids (T,) int32 of a conversation's text; which of them are learnt (T,) bool; its segments in
# reading order: (modality, tokens), of a medium 0 tokens.
Tokenized = tuple[np.ndarray, np.ndarray, list[tuple[int, int]]]


class _Encoded(NamedTuple):
    """Text of the template: ids, of which the first num_learnt are supervised."""

    ids: tuple[int, ...]
    num_learnt: int


class ChatTokenizer:
    """A `tokenizers` file, with the chat template beside it if there is one.

    path: tokenizer.json, or a folder that holds it (with chat_template.jinja or a
    tokenizer_config.json with "chat_template"). Raises ValueError if it cannot be read, or lacks
    ChatML's special tokens and has no template.
    """

    def __init__(self, path: str | os.PathLike):
        from tokenizers import Tokenizer

        path = Path(path)
        path = path / "tokenizer.json" if path.is_dir() else path
        if not path.is_file():
            raise ValueError(f"{path}: no such tokenizer file; give the path of a tokenizer.json")
        try:
            self.tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the bindings raise bare Exception
            raise ValueError(f"{path}: not a tokenizer.json of `tokenizers`: {error}") from error
        self.path, self.template = path, _read_template(path.parent)
        for token in () if self.template else (IM_START, IM_END, END_OF_TEXT):
            if self.tokenizer.token_to_id(token) is None:
                raise ValueError(
                    f"{path}: the special token {token} is missing; use the tokenizer.json of a "
                    "ChatML model (Qwen2), put the chat template of the model beside it, or add "
                    "the token with tokenizers.Tokenizer.add_special_tokens and save it again"
                )
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        self.tokenizer.encode_special_tokens = True  # special tokens in data are read as text
        tokens = self.tokenizer.encode("a", add_special_tokens=False).tokens
        if tokens and tokens[0].startswith(("\u2581", "\u0120")):  # SentencePiece's, ByteLevel's
            raise ValueError(
                f"{path}: it puts a space before every text ('a' becomes {tokens[0]!r}); texts "
                "are encoded one by one, so a conversation would get spaces that its chat "
                "template does not write. Turn it off in that file: prepend_scheme: never, "
                "add_prefix_space: false, or a normalizer without Prepend")
        added = self.tokenizer.get_added_tokens_decoder().values()
        either = "|".join(map(re.escape, sorted((t.content for t in added), key=len,
                                                reverse=True)))
        self._special = re.compile(f"({either or '(?!)'})")
        self._frame = lru_cache(maxsize=4096)(self._encode_frame)
        self._chat = self.template and ChatTemplate(
            *self.template, [t.content for t in added if t.special], str(path))

    def __reduce__(self):
        return ChatTokenizer, (self.path,)  # worker processes open the file themselves

    @property
    def vocab_size(self) -> int:
        """Rows that an embedding needs: the largest token id plus one."""
        return max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def end_id(self) -> int | None:
        """Id of the special token that ends an assistant's turn; None if the template has none."""
        ids, learnt, _ = self.tokenize([Turn("user", ("a",), False),
                                        Turn("assistant", ("b",), True)])
        added = self.tokenizer.get_added_tokens_decoder()
        return next((i for i in reversed(ids[learnt].tolist()) if i in added), None)

    @property
    def digest(self) -> str:
        """Changes with anything that changes token ids."""
        content = self.path.read_bytes() + json.dumps(self.template).encode()
        return hashlib.sha256(content).hexdigest()[:16]

    def encode(self, text: str) -> list[int]:
        """Ids of plain text; special tokens in it are read as text."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ids, special tokens included."""
        return self.tokenizer.decode([int(t) for t in token_ids], skip_special_tokens=False)

    def tokenize(self, turns: Sequence[Turn]) -> Tokenized:
        """(token ids, learnt, segments) of a conversation; text is one segment between media, empty
        text none. Raises RowError for text or turns that cannot be tokenized."""
        [tokenized] = self.tokenize_batch([turns])
        if isinstance(tokenized, RowError):
            raise tokenized
        return tokenized

    def tokenize_batch(
        self, conversations: Sequence[Sequence[Turn]]
    ) -> list[Tokenized | RowError]:
        """`tokenize` of many conversations together; a RowError in place of those that cannot
        be."""
        rendered: list[list | RowError] = []
        for turns in conversations:
            try:
                rendered.append(self._frames(turns))
            except RowError as error:
                rendered.append(error)
        texts = [item.text for frames in rendered if isinstance(frames, list)
                 for item in frames if isinstance(item, Text)]
        ids = iter(self.tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        return [frames if isinstance(frames, RowError) else _merge(frames, ids)
                for frames in rendered]

    def _frames(self, turns: Sequence[Turn]) -> list[_Encoded | Span]:
        spans = _chatml(turns) if self._chat is None else self._chat.spans(turns)
        return [self._frame(s.text, s.learnt) if isinstance(s, Text) and not s.of_data else s
                for s in spans]

    def _encode_frame(self, text: str, supervised: str) -> _Encoded:
        """Template text; special tokens in it are meant."""
        ids: list[int] = []
        learnt = 0
        for part in self._special.split(text):
            special = self.tokenizer.token_to_id(part) if self._special.fullmatch(part) else None
            if special is not None:
                if supervised == END and not learnt:
                    learnt = len(ids) + 1
                ids.append(special)
            elif part:
                ids += self.encode(part)
        if supervised == ALL:
            return _Encoded(tuple(ids), len(ids))
        first = self._special.search(text)
        ends = first is not None and not text[: first.start()].strip()
        return _Encoded(tuple(ids), learnt if ends else 0)


def _chatml(turns: Sequence[Turn]) -> list[Span]:
    if any([turn.role in ("tool", "tools") or turn.calls for turn in turns]):
        raise RowError("tools need the chat template of the model; put its chat_template.jinja or "
                       "tokenizer_config.json beside the tokenizer")
    if not turns or turns[0].role != "system":
        turns = [Turn("system", (DEFAULT_SYSTEM,), False), *turns]
    spans: list[Span] = []
    for turn in turns:
        spans.append(Text(f"{IM_START}{turn.role}\n", NONE))
        spans += spans_of(turn.parts, turn.supervised)
        spans.append(Text(f"{IM_END}\n", END if turn.supervised else NONE))
    return spans


def _merge(frames: list[_Encoded | Span], encoded) -> Tokenized:
    """encoded: encodings of the data's texts in their order."""
    ids, learnt = array("i"), bytearray()
    segments: list[tuple[int, int]] = []
    start = 0  # of the text since the last medium
    for item in frames:
        if isinstance(item, Medium):
            segments += [(TEXT, len(ids) - start)] if len(ids) > start else []
            segments.append((item.modality, 0))
            start = len(ids)
        elif isinstance(item, Text):
            tokens = next(encoded).ids
            ids.extend(tokens)
            learnt += (b"\1" if item.learnt == ALL else b"\0") * len(tokens)
        else:
            ids.extend(item.ids)
            learnt += b"\1" * item.num_learnt + b"\0" * (len(item.ids) - item.num_learnt)
    segments += [(TEXT, len(ids) - start)] if len(ids) > start else []
    return np.array(ids, np.int32), np.frombuffer(learnt, bool), segments


def _read_template(folder: Path) -> tuple[str, dict[str, str]] | None:
    """(template, special tokens by name) of the model beside tokenizer.json. Raises ValueError for
    a template that writes a token that no file names."""
    config = _read_json(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # as transformers does
        config |= _read_json(folder / "special_tokens_map.json")
    template = config.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if isinstance(template, list):  # several by name
        template = next((t["template"] for t in template if t.get("name") == "default"), None)
    if not template:
        return None
    for name in ("bos_token", "eos_token"):
        if name not in config and name in undeclared(template):
            raise ValueError(
                f"{folder}: the chat template writes {name}, which neither tokenizer_config.json "
                f'nor special_tokens_map.json names: copy them from the model, or put "{name}" '
                "(null if it has none) into tokenizer_config.json")
    tokens = {k: v["content"] if isinstance(v, dict) else v for k, v in config.items()
              if k.endswith("_token") and isinstance(v, str | dict)}
    return template, tokens


def _read_json(path: Path) -> dict:
    """What a file holds; nothing where there is none. Raises ValueError."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
