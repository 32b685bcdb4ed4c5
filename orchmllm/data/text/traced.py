"""Texts that know where their characters are from, through what a chat template does with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping

# Of the code of a character: its text of the data, from 1 (0: the template wrote it); the turn that
# a loop was at, from 1 (0: none); whether that was at a call of a tool, and whether
# {% generation %} is around it.
SOURCE, TURN, CALL, BLOCK = (1 << 28) - 1, 1 << 28, 1 << 60, 1 << 61


class Traced(str):
    """A text with the codes of its characters: runs of (number of characters, their code), none of
    them empty. What other methods than those below make of it (format, upper) is a plain string,
    which reads as the template's."""

    def __new__(cls, text: str, runs: list[tuple[int, int]]) -> Traced:
        made = super().__new__(cls, text)
        made.runs = runs
        return made

    def __str__(self) -> Traced:
        return self

    def __getitem__(self, key: int | slice) -> Traced:
        part = super().__getitem__(key)
        if not isinstance(key, slice):
            key = slice(key, key + 1 or None)
        start, stop, step = key.indices(len(self))
        if step != 1:
            each = [(1, code) for count, code in self.runs for _ in range(count)]
            return Traced(part, each[key])
        runs, end = [], 0
        for count, code in self.runs:
            begin, end = end, end + count
            if (there := min(end, stop) - max(begin, start)) > 0:
                runs.append((there, code))
        return Traced(part, runs)

    def __add__(self, other: str) -> str:
        return joined((self, other))

    def __radd__(self, other: str) -> str:
        return joined((other, self))

    def replace(self, old: str, new: str, count: int = -1) -> str:
        return joined(between(new, self.split(old, count))) if old in self else self


def _in_parts(name: str):
    """A method of strings that gives one part of the string, or several one after the other."""
    def method(self: Traced, *args, **keys):
        found = getattr(str, name)(self, *args, **keys)
        parts, end = [], 0
        for part in [found] if isinstance(found, str) else found:
            start = self.find(part, end)
            end = start + len(part)
            parts.append(self[start:end])
        return parts[0] if isinstance(found, str) else type(found)(parts)

    return method


for _name in ("strip", "lstrip", "rstrip", "removeprefix", "removesuffix", "split", "rsplit",
              "splitlines", "partition", "rpartition"):
    setattr(Traced, _name, _in_parts(_name))


def traced(text: str, code: int) -> Traced:
    return Traced(text, [(len(text), code)] if text else [])


def runs_of(text: str) -> list[tuple[int, int]]:
    """Those of a Traced text; a plain one is the template's."""
    return text.runs if isinstance(text, Traced) else traced(text, 0).runs


def recoded(text: str, change: Callable[[int], int]) -> Traced:
    """The text with other codes."""
    return Traced(text, [(count, change(code)) for count, code in runs_of(text)])


def joined(texts: Iterable[str]) -> str:
    """"".join(texts) with the codes, if there are any."""
    texts = list(texts)
    if not any(isinstance(text, Traced) for text in texts):
        return "".join(texts)
    return Traced("".join(texts), [run for text in texts for run in runs_of(text)])


def between(sep: str, texts: Iterable[str]) -> list[str]:
    """The texts with `sep` between each two."""
    return [part for text in texts for part in (sep, text)][1:]


def as_json(value: object, ensure_ascii: bool = False, indent: int | None = None,
            separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """transformers' tojson. All of it is from where the first text in it is from."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)
    found = [value]
    while found:
        first = found.pop(0)
        if isinstance(first, Traced) and first:
            return traced(text, first.runs[0][1])
        if isinstance(first, Mapping):
            found[:0] = [*first.keys(), *first.values()]
        elif isinstance(first, list | tuple):
            found[:0] = first
    return text
