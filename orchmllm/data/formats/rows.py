"""Row stores: random access to the rows of a file or folder, whatever it is kept in.

A store knows nothing of conversations: row(i) is a dict as the file holds it, media in it are
paths, bytes, or slices of a tar. Rows are read when asked for; opening costs one scan at most.
"""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.scanned import File, cached, digest, read_bytes, scanned
from orchmllm.data.media.medium import RowError

_BLOCK = 8 << 20  # bytes that are scanned at a time


class RowStore(ABC):
    """kind: what it is, for people. files: those whose change changes the rows. root: folder that
    media paths are relative to unless the recipe says otherwise. is_open: whether its rows have
    been counted."""

    kind: str
    files: list[File]
    root: Path | str
    is_open = True

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def row(self, i: int) -> dict:
        """Row i as its file holds it. Raises RowError if it cannot be read."""

    def place(self, i: int) -> tuple[File, int]:
        """The file of row i, and its line or position in it from 1; of a store of one file."""
        return self.files[0], i + 1

    def parts(self) -> Sequence[RowStore]:
        """The stores that it consists of."""
        return [self]

    def units(self, num: int) -> list:
        """At least `num` pieces that a stream reads in order, where it can be divided that far."""
        stores = self.parts()
        parts = -(-num // len(stores))
        return [StoreUnit(one, part, parts) for one in stores for part in range(parts)
                if parts == 1 or len(one) > part]


class StreamRow(NamedTuple):
    """A row before it is read. number: from 1. read: its dict."""

    file: File
    number: int
    read: Callable[[], dict]


@dataclass
class StoreUnit:
    """A piece of a source that is read in order: rows part, part + parts, ... of a store. num_rows:
    None until it is opened."""

    store: RowStore
    part: int = 0
    parts: int = 1

    @property
    def num_rows(self) -> int | None:
        if not self.store.is_open:
            return None
        return len(range(self.part, len(self.store), self.parts))

    @property
    def files(self) -> Sequence[File]:
        return self.store.files

    def rows(self, start: int) -> Iterator[StreamRow]:
        store = self.store
        for i in range(self.part + start * self.parts, len(store), self.parts):
            yield StreamRow(*store.place(i), lambda i=i: store.row(i))


def _unique(pairs: list[tuple[str, object]]) -> dict:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise RowError(f"key {twice!r} is there twice; keep one of them")
    return out


_KEY = re.compile(r'[\s,]*("(?:[^"\\]|\\.)*")\s*:\s*')
_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(data: bytes) -> dict:
    """One row. Raises RowError."""
    try:
        row = _DECODER.decode(data.decode("utf-8-sig").strip())
    except RowError:
        raise
    except RecursionError as error:
        raise RowError("not usable: JSON nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise RowError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RowError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


class JsonRows(RowStore):
    """JSONL, or a JSON array of objects. rows: the key of the array where the file is an object.
    spans: (n, 2) int64 first and last byte of each row in it."""

    def __init__(self, path: File, max_row_bytes: int, cache_dir: Path, rows: str = "") -> None:
        self.data, self.max_row_bytes = scanned(path), max_row_bytes
        self.files, self.root = [path], path.parent
        kind = f"spans-{digest(rows)}" if rows else "spans"
        self.spans, self.numbers = cached(cache_dir, kind, path, lambda: (
            scan_array(path, rows) if rows or _is_array(path) else scan_lines(path)))

    @property
    def kind(self) -> str:
        return "JSON array" if _is_array(self.files[0]) else "JSONL"

    def __len__(self) -> int:
        return len(self.spans)

    def _bytes(self, i: int) -> bytes:
        start, end = self.spans[i].tolist()
        if end - start > self.max_row_bytes:
            raise RowError(f"{end - start} bytes: more than max_row_bytes={self.max_row_bytes}; "
                           "raise it in the recipe's source if such rows are meant")
        return read_bytes(self.data, start, end - start)

    def row(self, i: int) -> dict:
        return parse_json(self._bytes(i))

    def place(self, i: int) -> tuple[File, int]:
        return self.files[0], int(self.numbers[i])


def _is_array(path: File) -> bool:
    with path.open("rb") as f:
        head = f.read(4096)
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


def scan_lines(path: File, quoted: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) byte spans, with the line break, and (n,) numbers of the lines that are not blank.
    quoted: line breaks between quotes end no line, which has the number of its first one."""
    ends, lines, size, open_quotes, line = [np.zeros(1, np.int64)], [], 0, 0, 1
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            data = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(data == ord("\n"))
            is_end = np.ones(len(breaks), bool)
            if quoted:
                quotes = open_quotes + np.cumsum(data == ord('"'))
                is_end, open_quotes = quotes[breaks] % 2 == 0, int(quotes[-1])
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
                    file.seek(-64, os.SEEK_END)
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


class LaterRows(RowStore):
    """A store that is opened when a row of it is needed: a stream fetches one shard after another.
    """

    def __init__(self, open_store: Callable[[], RowStore], path: File) -> None:
        self._open, self.files, self.root, self.is_open = open_store, [path], path.parent, False

    @cached_property
    def _store(self) -> RowStore:
        return self._open()

    @property
    def kind(self) -> str:
        return self._store.kind

    def __len__(self) -> int:
        if not self.is_open:
            self._num_rows, self.is_open = len(self._store), True
        return self._num_rows

    def row(self, i: int) -> dict:
        return self._store.row(i)

    def place(self, i: int) -> tuple[File, int]:
        return self._store.place(i)

    def close(self) -> None:
        """Keeps the number of its rows alone."""
        self.__dict__.pop("_store", None)


class JoinedRows(RowStore):
    """Several stores of one kind, one after the other."""

    def __init__(self, stores: Sequence[RowStore], root: Path) -> None:
        self.stores, self.kind, self.root = list(stores), stores[0].kind, root
        self.files = [f for s in stores for f in s.files]

    @cached_property
    def _start(self) -> np.ndarray:
        return np.concatenate([[0], np.cumsum([len(s) for s in self.stores])])

    def __len__(self) -> int:
        return int(self._start[-1])

    def parts(self) -> Sequence[RowStore]:
        return self.stores

    def _at(self, i: int) -> tuple[RowStore, int]:
        k = int(np.searchsorted(self._start, i, side="right")) - 1
        return self.stores[k], int(i - self._start[k])

    def row(self, i: int) -> dict:
        store, k = self._at(i)
        return store.row(k)

    def place(self, i: int) -> tuple[File, int]:
        store, k = self._at(i)
        return store.place(k)
