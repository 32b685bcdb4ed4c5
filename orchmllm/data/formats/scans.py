"""Where the rows of a text file are: one pass over its bytes, in blocks."""

from __future__ import annotations

import codecs
import json
import os
import re

import numpy as np

from orchmllm.data.formats.scanned import File

_BLOCK = 8 << 20  # bytes that are scanned at a time
_BEFORE = b',\n\r"'  # a quote that opens a cell, or does so again
_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')


def scan_lines(path: File, quoted: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) byte spans, with the line break, and (n,) numbers of the lines that are not blank.
    quoted: line breaks in cells in quotes end no line, which has the number of its first one."""
    ends, lines, before, open_quotes, line = [np.zeros(1, np.int64)], [], b"\n", 0, 1
    with path.open("rb") as file:
        size = file.seek(3 * (file.read(3) == codecs.BOM_UTF8))
        while block := file.read(_BLOCK):
            data = np.frombuffer(before + block, np.uint8)
            breaks = np.flatnonzero(data[1:] == ord("\n"))
            is_end = np.ones(len(breaks), bool)
            if quoted:
                data = _without_letters(data, open_quotes % 2)
                quotes = open_quotes + np.cumsum(data[1:] == ord('"'))
                is_end, open_quotes = quotes[breaks] % 2 == 0, int(quotes[-1])
            before = data[-1:].tobytes()
            ends.append(breaks[is_end] + size + 1)
            lines.append((line + np.arange(len(breaks)))[is_end])
            size, line = size + len(block), line + len(breaks)
        bounds = np.concatenate([*ends, [size]])
        spans = np.stack([bounds[:-1], bounds[1:]], axis=1)
        last = np.concatenate([*lines, [line]])[: len(spans)]
        lengths = np.diff(spans, axis=1)[:, 0]
        kept = lengths > 0
        for k in np.flatnonzero(lengths <= 64).tolist():
            kept[k] = os.pread(file.fileno(), 64, int(spans[k, 0]))[: lengths[k]].strip() != b""
    return spans[kept], np.concatenate([[1], last[:-1] + 1])[kept]


def _without_letters(data: np.ndarray, inside: int) -> np.ndarray:
    """A block of CSV, behind the byte before it, with 0 for quotes that neither open nor close a
    cell, but are letters of one, such as that of 5" disk. inside: whether it begins in quotes."""
    quotes = np.flatnonzero(data[1:] == ord('"')) + 1
    if np.isin(data[quotes[inside::2] - 1], list(_BEFORE)).all():
        return data
    out = bytearray(data)
    for k in quotes.tolist():
        if inside or out[k - 1] in _BEFORE:
            inside = not inside
        else:
            out[k] = 0
    return np.frombuffer(out, np.uint8)


def scan_array(path: File, key: str = "") -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) byte spans and (n,) positions, from 1, of the elements of a JSON array, read in
    blocks: the file may be larger than memory. key: of an object in whose first block the array
    begins. Raises ValueError where it is not one."""
    decoder, spans = json.JSONDecoder(), []
    between = re.compile(r"[ \t\r\n,]*")
    with path.open("rb") as file:
        def read(size: int) -> str:
            return file.read(size).decode("latin-1")  # a character for each byte

        text, begin = read(_BLOCK), 0  # begin: the place of `text` in the file
        at = _begin_of(text, key) if key else text.index("[") + 1
        if not at:
            raise ValueError(f"{path}: no list {key!r} (rows of columns) in its first {_BLOCK} "
                             f"bytes; its keys begin {text[:80]!r}")
        while True:
            at = between.match(text, at).end()
            if text[at: at + 1] == "]":
                if key:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 64))
                    if not read(64).rstrip().endswith("}"):
                        raise ValueError(f"{path}: truncated: the object that holds {key!r} does "
                                         "not end")
                elif (text[at + 1:] + read(_BLOCK)).strip():
                    raise ValueError(f"{path}: more follows the JSON array that ends at byte "
                                     f"{begin + at}; write one array, or one object a line "
                                     "(.jsonl)")
                break
            try:
                _, end = decoder.raw_decode(text, at)
            except (ValueError, RecursionError) as error:
                more = read(max(_BLOCK, len(text) - at))
                if not more:
                    raise ValueError(
                        f"{path}: element {len(spans) + 1} (byte {begin + at}) of the JSON array "
                        f"is not JSON ({error}); mend it, or write one object a line (.jsonl), "
                        "where a bad line costs only itself") from error
                text, begin, at = text[at:] + more, begin + at, 0
                continue
            spans.append((begin + at, begin + end))
            at = end
            if at > _BLOCK:
                text, begin, at = text[at:], begin + at, 0
    return np.array(spans, np.int64).reshape(-1, 2), np.arange(1, len(spans) + 1)


def _begin_of(text: str, key: str) -> int:
    """Where the elements of the list begin that an object has under `key`; 0 where it has none. A
    key of an object inside it does not count. text: its bytes as latin-1."""
    decoder, at = json.JSONDecoder(), text.find("{") + 1
    while match := _KEY.match(text, at):
        at = match.end()
        if json.loads(match[1]) == key.encode().decode("latin-1"):
            return at + 1 if text[at: at + 1] == "[" else 0
        try:
            _, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            return 0
    return 0
