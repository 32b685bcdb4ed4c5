"""Row stores: random access to the rows of a file or folder, whatever it is kept in.

A store knows nothing of conversations: row(i) is a dict as the file holds it, media in it are
paths, bytes, or slices of a tar. Rows are read when asked for; opening costs one scan at most.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import UnionType
from typing import Any, NamedTuple, NoReturn

import numpy as np

from orchmllm.data.formats.columns import check_depth
from orchmllm.data.formats.scanned import File, Scans, digest, read_bytes
from orchmllm.data.formats.scans import scan_array, scan_lines
from orchmllm.data.media.medium import RowError


class RowStore(ABC):
    """kind: what it is, for people. files: those whose change changes the rows. root: folder that
    media paths are relative to unless the recipe says otherwise. is_open: whether its rows have
    been counted, and is_counted whether opening it did. splits: whether parts of it can be read
    beside each other."""

    kind: str
    files: list[File]
    root: Path | str
    is_open = is_counted = splits = True

    @abstractmethod
    def __len__(self) -> int:
        """Number of rows."""

    @abstractmethod
    def row(self, i: int) -> dict:
        """Row i as its file holds it. Raises RowError if it cannot be read."""

    def later(self, i: int) -> Callable[[], dict]:
        """What reads row i, when a stream that has come to it in order needs it."""
        return lambda: self.row(i)

    def place(self, i: int) -> tuple[File, int]:
        """The file of row i, and its line or position in it from 1; of a store of one file."""
        return self.files[0], i + 1

    def parts(self) -> Sequence[RowStore]:
        """The stores that it consists of."""
        return [self]

    def units(self, num: int) -> list:
        """At least `num` pieces that a stream reads in order, where it can be divided that far."""
        stores = self.parts()
        parts = -(-num // len(stores)) if stores[0].splits else 1
        return [piece for one in stores for piece in one.pieces(parts)]

    def pieces(self, parts: int) -> list:
        """As many of this store, but for empty ones."""
        return [StoreUnit(self, part, parts) for part in range(parts)
                if parts == 1 or len(self) > part]


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
            yield StreamRow(*store.place(i), store.later(i))


@dataclass
class OrderedUnit:
    """A piece that can be read in order alone. rows: as StoreUnit's. num_rows: None until somebody
    reached its end."""

    rows: Callable[[int], Iterator[StreamRow]]
    files: Sequence[File] = ()
    num_rows: int | None = None


def _unique(pairs: list[tuple[str, object]]) -> dict:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise RowError(f"key {twice!r} is there twice; keep one of them")
    return out


_DECODER = json.JSONDecoder(object_pairs_hook=_unique)


def parse_json(data: bytes, kind: type | UnionType = dict) -> Any:
    """One row, a JSON value of such a type. Raises RowError."""
    try:
        row = _DECODER.decode(data.decode("utf-8-sig").strip())
        check_depth(row, data.count(b"[") + data.count(b"{"))
    except RowError:
        raise
    except RecursionError as error:
        raise RowError("not usable: JSON nested too deeply") from error
    except ValueError as error:  # UnicodeDecodeError is one
        raise RowError(f"not JSON: {error}") from error
    if not isinstance(row, kind):
        raise RowError(f"a row must be a JSON object, got {type(row).__name__}")
    return row


def too_long(max_row_bytes: int, size: str = "") -> NoReturn:
    """Raises RowError."""
    raise RowError(f"{size}more than max_row_bytes={max_row_bytes}; raise it in the recipe's "
                   "source if such rows are meant")


class JsonRows(RowStore):
    """JSONL, or a JSON array of objects. rows: the key of the array where the file is an object.
    spans: (n, 2) int64 first and last byte of each row in it."""

    def __init__(self, path: File, max_row_bytes: int, scans: Scans, rows: str = "") -> None:
        self.max_row_bytes, self.files, self.root = max_row_bytes, [path], path.parent
        kind = f"spans-{digest(rows)}" if rows else "spans"
        self.data, self.spans, self.numbers = scans(kind, path, lambda: (
            scan_array(path, rows) if rows or _is_array(path) else scan_lines(path)))

    @property
    def kind(self) -> str:
        return "JSON array" if _is_array(self.files[0]) else "JSONL"

    def __len__(self) -> int:
        return len(self.spans)

    def _bytes(self, i: int) -> bytes:
        start, end = self.spans[i].tolist()
        if end - start > self.max_row_bytes:
            too_long(self.max_row_bytes, f"{end - start} bytes: ")
        return read_bytes(self.data, start, end - start)

    def row(self, i: int) -> dict:
        return parse_json(self._bytes(i))

    def place(self, i: int) -> tuple[File, int]:
        return self.files[0], int(self.numbers[i])


def _is_array(path: File) -> bool:
    with path.open("rb") as f:
        head = f.read(4096)
    return head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"["


class LaterRows(RowStore):
    """A store that is opened when a row of it is needed: a stream fetches one shard after another.
    """

    is_counted = False

    def __init__(self, open_store: Callable[[], RowStore], path: File) -> None:
        self._open, self.files, self.root, self.is_open = open_store, [path], path.parent, False
        self.splits = path.suffix not in (".parquet", ".arrow")

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

    def later(self, i: int) -> Callable[[], dict]:
        return super().later(i) if self.splits else self._store.later(i)

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
