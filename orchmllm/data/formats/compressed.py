"""JSON lines and tars that are compressed as a whole, whose rows can be read in order alone."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, partial
from itertools import groupby, islice
from typing import BinaryIO

from orchmllm.data.formats.rows import OrderedUnit, RowStore, StreamRow, parse_json, too_long
from orchmllm.data.formats.scanned import File, Scans, scanned
from orchmllm.data.formats.tars import SEVERAL_TARS, TRUNCATED, key_of, row_of
from orchmllm.data.media.medium import MAX_MEMBER_BYTES, Medium, RowError
from orchmllm.data.storage.clients import StorageError
from orchmllm.plan.layout import TEXT

NUM_FIRST = 20  # rows that can be asked for by their numbers
CURES = {".gz": "gunzip", ".zst": "unzstd"}


class CompressedRows(RowStore):
    """One file. Only its first rows can be asked for, to tell the layout; its length is theirs. The
    media of a tar are in memory as long as their row."""

    is_counted = splits = False

    def __init__(self, path: File, max_row_bytes: int, scans: Scans) -> None:
        self.data, self.max_row_bytes = scanned(path), max_row_bytes
        self.files, self.root = [path], path.parent
        self._rows = _tar_rows if ".tar." in path.name else _json_rows
        self.kind = f"compressed {'tar' if self._rows is _tar_rows else 'JSONL'}"

    @cached_property
    def _first(self) -> list[StreamRow]:
        return list(islice(self.rows(0), NUM_FIRST))

    def __len__(self) -> int:
        return len(self._first)

    def row(self, i: int) -> dict:
        return self._first[i].read()

    def place(self, i: int) -> tuple[File, int]:
        return self._first[i][:2]

    def rows(self, start: int) -> Iterator[StreamRow]:
        """Raises ValueError where the file is damaged, and StorageError where it has changed."""
        path = self.files[0]
        with _decompressed(self.data, path) as file:
            for number, read in islice(self._rows(file, path, self.max_row_bytes), start, None):
                yield StreamRow(path, number, read)

    def pieces(self, parts: int) -> list[OrderedUnit]:
        return [OrderedUnit(self.rows, self.files)]


@contextmanager
def _decompressed(data, path: File) -> Iterator[BinaryIO]:
    try:
        with data.open("rb") as raw:
            if path.suffix == ".gz":
                yield gzip.GzipFile(fileobj=raw)
            else:
                import pyarrow as pa

                yield io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(raw), "zstd"))
    except (StorageError, MemoryError):
        raise
    except Exception as error:  # each library has types of its own
        raise ValueError(f"{path}: damaged or truncated: {error}; fetch it again") from error


def _json_rows(file: BinaryIO, path: File, max_row_bytes: int
               ) -> Iterator[tuple[int, Callable[[], dict]]]:
    """(Number of the line, what reads it) of each line that is not blank."""
    number, begins = 0, True
    while line := file.readline(max_row_bytes + 1):
        number += begins
        is_cut = not line.endswith(b"\n") and len(line) > max_row_bytes
        if begins and is_cut:
            yield number, partial(too_long, max_row_bytes)
        elif begins and line.strip():
            yield number, partial(parse_json, line)
        begins = not is_cut


def _tar_rows(file: BinaryIO, path: File, max_row_bytes: int
              ) -> Iterator[tuple[int, Callable[[], dict]]]:
    """(Number of the row, what reads it) of the members that share a key."""
    with tarfile.open(fileobj=file, mode="r|") as tar:
        members = (info for info in tar if not info.isdir())
        for number, (_, infos) in enumerate(groupby(members, lambda info: key_of(info.name)), 1):
            found = [(info.name, _member(tar, info)) for info in infos]
            tar.members.clear()  # tarfile keeps every header it has seen
            yield number, partial(row_of, found, path, max_row_bytes)
        if tar.fileobj.tell() <= tar.offset:
            raise RowError(TRUNCATED)
        while block := tar.fileobj.read(1 << 20):
            if block.strip(b"\0"):
                raise RowError(SEVERAL_TARS.format(tar.offset))


def _member(tar: tarfile.TarFile, info: tarfile.TarInfo) -> Medium | None:
    """None for one that is no plain file; of one that is too large no content."""
    if not info.isreg() or info.issparse():
        return None
    is_read = info.size <= MAX_MEMBER_BYTES
    return Medium(TEXT, "", size=info.size,
                  data=tar.extractfile(info).read() if is_read else b"")
