"""CSV and TSV files, LibriSpeech's folders, and the rows that stand in the rows of a file:
segments, and those of a split."""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from orchmllm.data.formats.columns import parse_spec
from orchmllm.data.formats.rows import JsonRows, RowStore
from orchmllm.data.formats.scanned import File, cached, digest, scanned
from orchmllm.data.media.medium import RowError

_BLOCK = 8 << 20  # bytes that are scanned at a time


class TableRows(JsonRows):
    """CSV, in which a text in quotes may hold line breaks; or TSV, which has no quotes. The first
    line names the columns; an empty cell is no value. Raises ValueError."""

    def __init__(self, path: File, max_row_bytes: int, cache_dir: Path) -> None:
        self.data, self.max_row_bytes = scanned(path), max_row_bytes
        self.files, self.root, self.is_csv = [path], path.parent, path.suffix == ".csv"
        self.spans, self.numbers = cached(
            cache_dir, "lines", path, lambda: scan_table(path, self.is_csv))
        if not len(self.spans):
            raise ValueError(f"{path}: no line names its columns")
        self.names = self._cells(0)
        if len(set(self.names)) < len(self.names) or "" in self.names:
            raise ValueError(f"{path}: its first line must name its columns, each once, and has "
                             f"{', '.join(self.names):.300}")

    @property
    def kind(self) -> str:
        return "CSV" if self.is_csv else "TSV"

    def __len__(self) -> int:
        return len(self.spans) - 1

    def row(self, i: int) -> dict:
        cells = self._cells(i + 1)
        if len(cells) != len(self.names):
            raise RowError(f"{len(cells)} cells in a table of {len(self.names)} columns")
        return {name: cell for name, cell in zip(self.names, cells, strict=True) if cell}

    def place(self, i: int) -> tuple[File, int]:
        return super().place(i + 1)

    def _cells(self, i: int) -> list[str]:
        data = self._bytes(i)
        if not data.endswith(b"\n"):
            raise RowError("the last line has no end, so it may have been cut off; write the line "
                           "break if the file is whole")
        try:
            text = data.decode("utf-8-sig" if i == 0 else "utf-8").rstrip("\r\n")
            if "\0" in text:
                raise RowError("a line holds NUL bytes: it is damaged, or the file is not UTF-8")
            if not self.is_csv:
                return text.split("\t")
            [cells] = csv.reader([text], strict=True)
        except (UnicodeDecodeError, csv.Error) as error:
            raise RowError(f"not {self.kind}: {error}") from error
        return cells


def scan_table(path: File, quoted: bool) -> tuple[np.ndarray, np.ndarray]:
    """(n, 2) byte spans, with the line break, and (n,) line numbers of the rows of a table that are
    not blank. quoted: line breaks between quotes end no row."""
    ends, lines, size, open_quotes, line = [np.zeros(1, np.int64)], [], 0, 0, 1
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            data = np.frombuffer(block, np.uint8)
            breaks = np.flatnonzero(data == ord("\n"))
            lines.append(line + np.arange(len(breaks)))
            if quoted:
                quotes = open_quotes + np.cumsum(data == ord('"'))
                is_end = quotes[breaks] % 2 == 0
                lines[-1], open_quotes = lines[-1][is_end], int(quotes[-1])
                ends.append(breaks[is_end] + size + 1)
            else:
                ends.append(breaks + size + 1)
            size, line = size + len(block), line + len(breaks)
    bounds = np.concatenate([*ends, [size]])
    spans = np.stack([bounds[:-1], bounds[1:]], axis=1)
    last = np.concatenate([*lines, [line]])[: len(spans)]
    kept = np.diff(spans, axis=1)[:, 0] > 0
    with path.open("rb") as file:
        for k in np.flatnonzero(np.diff(spans, axis=1)[:, 0] <= 2).tolist():
            kept[k] = os.pread(file.fileno(), 2, int(spans[k, 0])).strip() != b""
    return spans[kept], np.concatenate([[1], last[:-1] + 1])[kept]


class TranscriptRows(RowStore):
    """LibriSpeech's folders: <speaker>/<chapter>/<speaker>-<chapter>.trans.txt, a line per clip,
    beside <id>.flac. split: how the names of the folders that are read begin. Raises ValueError for
    one that is not there."""

    kind = "LibriSpeech folder"

    def __init__(self, folder: Path, split: str) -> None:
        self.root = folder
        there = sorted(p for p in folder.iterdir() if p.is_dir())
        chosen = [p for p in there if p.name.startswith(split)] if split else [folder]
        if not chosen:
            raise ValueError(f"{folder}: no folder's name begins with {split!r} (split); there "
                             f"are: {', '.join(p.name for p in there)}")
        self.files = sorted(file for base in chosen for file in base.rglob("*.trans.txt"))
        self._rows: list[tuple[Path, int, str]] = []  # file, line, text
        for path in self.files:
            for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
                if line.strip():
                    self._rows.append((path, number, line))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, i: int) -> dict:
        path, _, line = self._rows[i]
        name, _, text = line.partition(" ")
        return {"audio": str((path.parent / f"{name}.flac").relative_to(self.root)), "text": text}

    def place(self, i: int) -> tuple[File, int]:
        return self._rows[i][:2]


class PickedRows(RowStore):
    """Rows in the rows of a store: the elements of the list `segments` of each, with what is around
    them; of these, and of the rows, those of a split. split: its column, and which one is read.
    Rows that cannot be read stay, so that they are told of. Raises ValueError for a split that is
    not there, and where there are several and none is named."""

    def __init__(self, store: RowStore, segments: str, split: tuple[str, str], cache_dir: Path
                 ) -> None:
        self.store, self.segments, self.split = store, segments, split
        self.kind, self.files, self.root = store.kind, store.files, store.root
        kind = f"picked-{digest([segments, split])}"
        self.places, _ = cached(cache_dir, kind, store.files[0], self._scan) if (
            len(store.files) == 1) else self._scan()

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        """(n, 2) [row, element or -1], and nothing."""
        column, wanted = self.split
        places, seen = [], {}
        for i in range(len(self.store)):
            try:
                for k, row in self._elements(i):
                    splits = _splits(parse_spec(column).find(row)[1]) if column else [wanted]
                    seen |= dict.fromkeys(splits)
                    if not wanted or wanted in splits:
                        places.append((i, k))
            except RowError:
                places.append((i, -1))
        if column and (wanted not in seen if wanted else len(seen) > 1):
            said = f"split is {wanted!r}, which no row has" if wanted else "it holds several splits"
            raise ValueError(f"{self.files[0]}: {said}; set split of the source to one of "
                             f"{', '.join(map(str, seen))}")
        return np.array(places, np.int64).reshape(-1, 2), np.zeros(0)

    def _elements(self, i: int) -> Sequence[tuple[int, dict]]:
        row = self.store.row(i)
        if not self.segments:
            return [(-1, row)]
        around = {key: value for key, value in row.items() if key != self.segments}
        found = parse_spec(self.segments).find(row)[1] or []
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise RowError(f"{self.segments!r} (segments) must be a list of objects")
        return [(k, around | one) for k, one in enumerate(found)]

    def __len__(self) -> int:
        return len(self.places)

    def row(self, i: int) -> dict:
        row, k = self.places[i].tolist()
        return self._elements(row)[max(k, 0)][1]

    def place(self, i: int) -> tuple[File, int]:
        return self.store.place(int(self.places[i, 0]))


def _splits(value: object) -> list:
    """What a row says of its split; GigaSpeech writes {XL}."""
    return [str(one).strip("{}") for one in (value if isinstance(value, list) else [value])]
