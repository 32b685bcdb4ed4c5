"""Texts that know where their characters are from, through what a chat template does with them.

The origin of a text is a string of the same length: its k-th character stands for the source of the
text's k-th. NOWHERE is the template; the characters below LEFT are the sources that the caller has
numbered from 1; LEFT and those above are events in what the template writes, see
orchmllm.data.text.template_engine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

NOWHERE = "\0"
LEFT, BEGUN, ENDED = 0x20000, 0x20001, 0x20002  # of a loop over turns; of a {% generation %} block
ENTERED = 0x20003  # + 2 * turn (+ 1: a call of it), where a loop comes to it


class Traced(str):
    """A text with an origin. What a method loses (format, upper) is a plain string, which reads as
    the template's."""

    def __new__(cls, text: str, origin: str) -> Traced:
        made = super().__new__(cls, text)
        made.origin = origin
        return made

    def __str__(self) -> Traced:
        return self

    def __getitem__(self, key: int | slice) -> Traced:
        return Traced(super().__getitem__(key), self.origin[key])

    def __add__(self, other: str) -> str:
        return joined((self, other))

    def __radd__(self, other: str) -> str:
        return joined((other, self))

    def lstrip(self, chars: str | None = None) -> Traced:
        return self[len(self) - len(super().lstrip(chars)):]

    def rstrip(self, chars: str | None = None) -> Traced:
        return self[: len(super().rstrip(chars))]

    def strip(self, chars: str | None = None) -> Traced:
        return self.lstrip(chars).rstrip(chars)

    def removeprefix(self, prefix: str) -> Traced:
        return self[len(self) - len(super().removeprefix(prefix)):]

    def removesuffix(self, suffix: str) -> Traced:
        return self[: len(super().removesuffix(suffix))]

    def split(self, sep: str | None = None, maxsplit: int = -1) -> list[Traced]:
        return self._cut(super().split(sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: int = -1) -> list[Traced]:
        return self._cut(super().rsplit(sep, maxsplit), sep)

    def splitlines(self, keepends: bool = False) -> list[Traced]:
        return self._cut(super().splitlines(keepends), None)

    def partition(self, sep: str) -> tuple[Traced, ...]:
        return tuple(self._cut(super().partition(sep), ""))

    def rpartition(self, sep: str) -> tuple[Traced, ...]:
        return tuple(self._cut(super().rpartition(sep), ""))

    def replace(self, old: str, new: str, count: int = -1) -> str:
        if old not in self:
            return self
        return joined(between(new, self.split(old, count))) if old else super().replace(
            old, new, count)

    def join(self, texts: Iterable[str]) -> str:
        return joined(between(self, texts))

    def _cut(self, pieces: Sequence[str], sep: str | None) -> list[Traced]:
        """Where `pieces` are. sep: what is between two of them, None for any space."""
        out, at = [], 0
        for piece in pieces:
            if sep is None:
                at = self.find(piece, at)
            out.append(self[at: at + len(piece)])
            at += len(piece) + len(sep or "")
        return out


def origin_of(text: str) -> str:
    return text.origin if isinstance(text, Traced) else NOWHERE * len(text)


def joined(texts: Iterable[str]) -> str:
    """"".join(texts) with the origins, if there are any."""
    texts = list(texts)
    text = "".join(texts)
    if not any(isinstance(t, Traced) for t in texts):
        return text
    return Traced(text, "".join(map(origin_of, texts)))


def between(sep: str, texts: Iterable[str]) -> list[str]:
    """The texts with `sep` between each two."""
    return [part for text in texts for part in (sep, text)][1:]


def as_json(value: object, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """transformers' tojson. All of it is from where the first text in it is from."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)
    origin = _first_origin(value)
    return Traced(text, origin * len(text)) if origin else text


def _first_origin(value: object) -> str:
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return next(filter(None, map(_first_origin, value)), "")
    return value.origin[:1] if isinstance(value, Traced) else ""
