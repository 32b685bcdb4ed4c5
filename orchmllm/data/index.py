"""A length index: the lengths of every row of a source, built once, read by memory map.

    <index_dir>/<source>-<key>/  table.i64 start.i64 targets.i64 sizes.i64 problems.jsonl

The key is the size and time of the source's files, the tokenizer, the geometry of the media and
what the recipe says of the source: whatever changes lengths, changes the key. The arrays are int64
without a header: table (s, 7) [modality, rows, attn_len, num_tokens, t, h, w]; start (n + 1, 2):
the first segment and the first medium of each row; targets (n,); sizes (k, 2) of the media, see
orchmllm.data.media.shapes.Size. Nothing is read before it is asked for: an index may be larger than
the memory. orchmllm.tools.data.build_index writes it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from orchmllm.data.formats.open import DataSource
from orchmllm.data.formats.scanned import digest, sizes
from orchmllm.data.lengths import LengthReader
from orchmllm.data.media.medium import MediaError
from orchmllm.data.storage.replaced import aside
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.rearrange import ranges

VERSION = 12
ROWS_AT_ONCE = 100_000  # of an index that is read as a whole


class LengthIndex:
    """The lengths of a source's rows (memory-mapped) and its unusable rows. Raises OSError or
    ValueError where its files are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table, start, self.targets, self._sizes = (
            _mapped(folder / f"{name}.i64").reshape(shape) for name, shape in (
                ("table", (-1, 7)), ("start", (-1, 2)), ("targets", -1), ("sizes", (-1, 2))))
        self.start, self._media = start.T
        if [len(self.table), len(self._sizes)] != start[-1].tolist() or (
                len(self.targets) != len(start) - 1):
            raise ValueError("its files do not have the same rows")
        with (folder / "problems.jsonl").open(encoding="utf-8") as f:
            self.problems = {p.pop("row"): MediaError(p.pop("file"), **p)
                             for p in map(json.loads, f)}

    def __len__(self) -> int:
        return len(self.targets)

    def sizes(self, row: int) -> list[tuple[int, int]]:
        """Sizes of the media of a row."""
        start, end = self._media[row: row + 2].tolist()
        return list(map(tuple, self._sizes[start:end].tolist()))

    def layout(self, rows: np.ndarray, example_ids: np.ndarray) -> BatchLayout:
        """Lengths of rows of the source. rows, example_ids: (n,) int64."""
        start, counts = self.start[rows], self.start[rows + 1] - self.start[rows]
        return BatchLayout.from_table(example_ids, self.targets[rows], counts,
                                      self.table[ranges(start, counts)])


def _mapped(path: Path) -> np.ndarray:
    """A file of int64; one of nothing cannot be mapped."""
    return np.asarray(np.memmap(path, np.int64, "r")) if path.stat().st_size else np.empty(0, int)


def usable(indexes: Sequence[LengthIndex], examples: Sequence[int]) -> np.ndarray:
    """Those of examples (n,) of sources that follow each other that can be used."""
    firsts = np.cumsum([0, *map(len, indexes)]).tolist()
    wrong = [first + row for first, index in zip(firsts, indexes, strict=False)
             for row in index.problems]
    return np.setdiff1d(examples, wrong, assume_unique=True)


def usable_rows(indexes: Sequence[LengthIndex], examples: Sequence[int]) -> Iterator[BatchLayout]:
    """Lengths of those that are `usable`, ROWS_AT_ONCE or fewer at a time."""
    bounds, left = np.cumsum([0, *map(len, indexes)]), usable(indexes, examples)
    for start in range(0, len(left), ROWS_AT_ONCE):
        part = left[start: start + ROWS_AT_ONCE]
        yield joined_layouts(indexes, bounds, part, [len(part)])


def joined_layouts(
    indexes: Sequence[LengthIndex | None], bounds: np.ndarray, examples: np.ndarray,
    examples_per_rank: Sequence[int],
    measure: Callable[[list[int]], Iterable[BatchLayout]] = lambda examples: (),
) -> BatchLayout:
    """Lengths of examples (n,), in that order, of sources that follow each other. bounds (sources +
    1,): the first example of each source; examples_per_rank: how many each rank has of them;
    measure: gives the layouts of those that no index knows."""
    parts, places, rest = [], [], np.arange(len(examples))
    for k, index in enumerate(indexes):
        if index is not None:
            here = (bounds[k] <= examples[rest]) & (examples[rest] < bounds[k + 1])
            places.append(rest[here])
            parts.append(index.layout(examples[rest[here]] - bounds[k], examples[rest[here]]))
            rest = rest[~here]
    joined = BatchLayout.concat([*parts, *measure(examples[rest].tolist())], examples_per_rank)
    order = np.concatenate([*places, rest])
    if np.array_equal(order, np.arange(len(order))):
        return joined
    return joined.taken(np.argsort(order), joined.examples_per_rank)


def index_folder(source: DataSource, reader: LengthReader, index_dir: Path) -> Path:
    """Where the source's index is or would be."""
    key = digest([VERSION, list(sizes(source.store.files)), len(source), source.root.path,
                  source.settings, *reader.identity])
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in source.name)
    return index_dir / f"{safe}-{key}"


def open_index(source: DataSource, reader: LengthReader, index_dir: Path) -> LengthIndex | None:
    """The source's index if there is one that fits it. Raises ValueError if it is damaged."""
    folder = index_folder(source, reader, index_dir)
    wrong: Exception = OSError("it changes again and again")
    for place in (folder, aside(folder), folder):  # another process may renew it meanwhile
        try:
            before = place.stat().st_ino
            index = LengthIndex(place)
            if place.stat().st_ino == before:  # all of its files are of the same one
                return index
        except (OSError, ValueError, LookupError) as error:
            wrong = error
    if not folder.is_dir():
        return None
    raise ValueError(f"{folder}: damaged index ({wrong}); delete it") from wrong
