"""CSV and TSV files, LibriSpeech's folders, and the rows that stand in the rows of a file:
segments, and those of a split."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.columns import nothing_in, parse_spec
from orchmllm.data.formats.rows import JsonRows, RowStore
from orchmllm.data.formats.scanned import File, Scans, digest
from orchmllm.data.formats.scans import scan_lines
from orchmllm.data.media.kinds import modality_of
from orchmllm.data.media.medium import RowError


class TableRows(JsonRows):
    """CSV, with , or ;, in which a text in quotes may hold line breaks; TSV, and tables with |,
    which have no quotes. The first line names the columns, or they are numbered from 0: has_names
    says which, None that the line itself does. An empty cell is no value. Raises ValueError."""

    def __init__(self, path: File, max_row_bytes: int, scans: Scans, *,
                 has_names: bool | None = None) -> None:
        self.max_row_bytes, self.files, self.root = max_row_bytes, [path], path.parent
        self.separator = _separator(path)
        self.is_csv = self.separator in ",;"
        self.data, self.spans, self.numbers = scans(
            "rows", path, lambda: scan_lines(path, self.is_csv))
        if not len(self.spans):
            raise ValueError(f"{path}: no line names its columns")
        self.names = self._cells(0)
        self.first = int(not any(map(_is_value, self.names)) if has_names is None else has_names)
        if not self.first:
            self.names = list(map(str, range(len(self.names))))
        self.names[0] = self.names[0] or "0"  # of pandas, the number of the row
        if len(set(self.names)) < len(self.names) or "" in self.names:
            raise ValueError(f"{path}: its first line must name its columns, each once, and has "
                             f"{', '.join(self.names):.300}; where it is a row, name columns by "
                             'their numbers from 0 (columns: {text: "1"})')

    @property
    def kind(self) -> str:
        return "CSV" if self.is_csv else "TSV"

    def __len__(self) -> int:
        return len(self.spans) - self.first

    def row(self, i: int) -> dict:
        cells = self._cells(i + self.first)
        if len(cells) != len(self.names):
            raise RowError(f"{len(cells)} cells in a table of {len(self.names)} columns")
        return {name: cell for name, cell in zip(self.names, cells, strict=True) if cell}

    def place(self, i: int) -> tuple[File, int]:
        return super().place(i + self.first)

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
                return _unquoted(text.split(self.separator))
            csv.field_size_limit(max(csv.field_size_limit(), self.max_row_bytes))
            [cells] = csv.reader([text], delimiter=self.separator, strict=True)
        except (UnicodeDecodeError, csv.Error) as error:
            raise RowError(f"not {self.kind}: {error}; a cell that holds a quote or a line break "
                           'must stand in quotes, with each of its quotes written twice ("")'
                           ) from error
        return cells


def _is_value(cell: str) -> bool:
    """Whether a cell of a first line is no name of a column."""
    return (cell.isdecimal() or len(cell) > 60 or "://" in cell
            or modality_of(cell) is not None)


def _separator(path: File) -> str:
    """What stands between cells: a tab in a .tsv, else | or ; where all of the first lines have as
    many of them."""
    if path.suffix == ".tsv":
        return "\t"
    with path.open("rb") as file:
        lines = list(islice(file, 10))
    return next((mark for mark in "|;" if len(counts := {
        line.count(mark.encode()) for line in lines}) == 1 and counts != {0}), ",")


def _unquoted(cells: list[str]) -> list[str]:
    """Raises RowError for a cell that was written with the quotes of CSV: one that begins with a
    quote and has others only in pairs, also where a line break in it cut off its end. One such as
    "plain", in which there are none, is read with its quotes."""
    for cell in cells:
        if cell[:1] == '"' and re.fullmatch('"(?![^"]+"$)([^"]|"")*"?', cell):
            raise RowError(f"a cell is {cell!r:.80}, with the quotes of CSV, which a TSV has not: "
                           "write the table as .csv, with commas")
    return cells


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
            for number, line in enumerate(path.read_bytes().decode("utf-8-sig").split("\n"), 1):
                if line.strip():
                    self._rows.append((path, number, line.strip()))

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
    them; of these, and of the rows, those of the source's split. Rows that cannot be read stay, so
    that they are told of. store: of one file. split_names: that the rows have."""

    def __init__(self, store: RowStore, config: SourceConfig, scans: Scans) -> None:
        columns = config.columns
        self.store, self.wanted = store, config.split
        self.segments, self.split = parse_spec(columns.segments), parse_spec(columns.split)
        self.kind, self.files, self.root = store.kind, store.files, store.root
        self.splits = store.splits
        chosen = digest([columns.rows, columns.segments, columns.split, config.split,
                         config.max_row_bytes])
        _, self.places, splits = scans(f"picked-{chosen}", store.files[0], self._scan)
        self.split_names: list[str] = json.loads(splits.tobytes())

    def _scan(self) -> tuple[np.ndarray, np.ndarray]:
        """(n, 2) [row, element or -1], and the splits as JSON bytes."""
        places, seen = [], {}
        for i in range(len(self.store)):
            try:
                for k, row in self._elements(i):
                    splits = _splits(self.split.find(row)[1]) if self.split.text else [self.wanted]
                    seen |= dict.fromkeys(splits)
                    if not self.wanted or self.wanted in splits:
                        places.append((i, k))
            except RowError:
                places.append((i, -1))
        return (np.array(places, np.int64).reshape(-1, 2),
                np.frombuffer(json.dumps(list(seen)).encode(), np.uint8))

    def _elements(self, i: int) -> Sequence[tuple[int, dict]]:
        row, spec = self.store.row(i), self.segments
        if not spec.text:
            return [(-1, row)]
        if not spec.optional and not spec.is_in(row):
            raise nothing_in(spec, "segments", row)
        around = {key: value for key, value in row.items() if key != spec.text}
        found = spec.find(row)[1] or []
        if not isinstance(found, list) or not all(isinstance(one, dict) for one in found):
            raise RowError(f"{spec.text!r} (segments) must be a list of objects")
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
