"""A length index: the lengths of every row of a source, built once, read by memory map.

    <index_dir>/<source>-<key>/  table.i64 start.i64 targets.i64 stamps.i64 problems.jsonl

The key is the size and time of the source's files, the tokenizer, the geometry of the media and
what the recipe says of the source: whatever changes lengths, changes the key. The arrays are int64
without a header; their shapes are those of Part. stamps.i64 holds the size and time of every media
file, by which a later build finds those that changed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import media_of
from orchmllm.data.formats.copies import digest
from orchmllm.data.formats.open import DataSource, open_source
from orchmllm.data.formats.rows import sizes
from orchmllm.data.lengths import LengthReader
from orchmllm.data.media.medium import MediaError
from orchmllm.data.storage.remote import RemoteFile, Storage
from orchmllm.plan.layout import BatchLayout
from orchmllm.plan.rearrange import ranges

VERSION = 5
CHUNK = 256  # rows a worker is given at a time
ALONE_BELOW = 2000  # rows that are indexed faster than worker processes start


class Part(NamedTuple):
    """Rows of a chunk. table: (s, 7) int64 [modality, rows, attn_len, num_tokens, t, h, w];
    counts, targets: (n,) segments and labels of each row; stamps: (n, 2) int64 bytes of the row's
    media files and their latest time in ns; problems: row, file, reason, segment, modality."""

    table: np.ndarray
    counts: np.ndarray
    targets: np.ndarray
    stamps: np.ndarray
    problems: list[dict]


class LengthIndex:
    """The lengths of a source's rows (memory-mapped) and its unusable rows. Raises OSError or
    ValueError where its files are damaged."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.table, self.start, self.targets, self.stamps = (
            np.asarray(np.memmap(folder / f"{name}.i64", np.int64, "r")).reshape(shape)
            for name, shape in (("table", (-1, 7)), ("start", -1), ("targets", -1),
                                ("stamps", (-1, 2))))
        if not (len(self.table) == self.start[-1]
                and len(self.targets) == len(self.stamps) == len(self.start) - 1):
            raise ValueError("its files do not have the same rows")
        with (folder / "problems.jsonl").open(encoding="utf-8") as f:
            self.problems = {p.pop("row"): _problem(**p) for p in map(json.loads, f)}

    def __len__(self) -> int:
        return len(self.targets)

    def layout(self, rows: np.ndarray, example_ids: np.ndarray) -> BatchLayout:
        """Lengths of rows of the source. rows, example_ids: (n,) int64."""
        start, counts = self.start[rows], self.start[rows + 1] - self.start[rows]
        return BatchLayout.from_table(example_ids, self.targets[rows], counts,
                                      self.table[ranges(start, counts)])


def joined_layouts(
    indexes: Sequence[LengthIndex | None], bounds: np.ndarray, examples: np.ndarray,
    measure: Callable[[list[int]], Iterable[BatchLayout]] = lambda examples: (),
    examples_per_rank: Sequence[int] | None = None,
) -> BatchLayout:
    """Lengths of examples (n,), in that order, of sources that follow each other. bounds (sources +
    1,): the first example of each source; measure: gives the layouts of those that no index knows;
    examples_per_rank: as of BatchLayout.from_table."""
    parts, places, rest = [], [], np.arange(len(examples))
    for k, index in enumerate(indexes):
        if index is not None:
            here = (bounds[k] <= examples[rest]) & (examples[rest] < bounds[k + 1])
            places.append(rest[here])
            parts.append(index.layout(examples[rest[here]] - bounds[k], examples[rest[here]]))
            rest = rest[~here]
    joined = BatchLayout.from_examples([*parts, *measure(examples[rest].tolist())],
                                       examples_per_rank)
    order = np.concatenate([*places, rest])
    if np.array_equal(order, np.arange(len(order))):
        return joined
    return joined.taken(np.argsort(order), joined.examples_per_rank)


def _problem(file: str, reason: str, segment: int | None, modality: int) -> MediaError:
    problem = MediaError(file, reason, segment)
    problem.modality = modality
    return problem


def index_folder(source: DataSource, planner: LengthReader, index_dir: Path) -> Path:
    """Where the source's index is or would be."""
    key = digest([VERSION, list(sizes(source.store.files)), len(source), source.root.path,
                  source.settings, planner.tokenizer.digest, asdict(planner.vision),
                  asdict(planner.audio), planner.max_example_tokens])
    safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in source.name)
    return index_dir / f"{safe}-{key}"


def open_index(source: DataSource, planner: LengthReader, index_dir: Path) -> LengthIndex | None:
    """The source's index if there is one that fits it. Raises ValueError if it is damaged."""
    folder = index_folder(source, planner, index_dir)
    if not folder.is_dir():
        return None
    try:
        index = LengthIndex(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: damaged index ({error}); delete it") from error
    if len(index) != len(source):
        raise ValueError(f"{folder}: {len(index)} rows for a source of {len(source)}; delete it")
    return index


def build_index(
    source: DataSource, planner: LengthReader, index_dir: Path, *, num_workers: int,
    progress: Callable[[int], object] = lambda count: None,
) -> tuple[LengthIndex, int]:
    """(the index, rows that had to be read): all of them the first time; later those whose media
    changed, or that were unusable. progress: called with the number of rows done. Raises ValueError
    for a source without rows."""
    if not len(source):
        raise ValueError(f"{source.config.path}: there are no rows to index")
    folder = index_folder(source, planner, index_dir)
    old = open_index(source, planner, index_dir)
    # Written aside and renamed: a reader sees a whole one or none.
    new = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(new, ignore_errors=True)  # of a killed process with the same number
    new.mkdir(parents=True)
    counts, num_read = [np.zeros(1, np.int64)], 0
    try:
        with (open(new / "table.i64", "wb") as table, open(new / "targets.i64", "wb") as targets,
              open(new / "stamps.i64", "wb") as stamps,
              open(new / "problems.jsonl", "w", encoding="utf-8") as problems):
            for part, count in _parts(source, planner, index_dir, old, num_workers):
                part.table.tofile(table)
                part.targets.tofile(targets)
                part.stamps.tofile(stamps)
                problems.writelines(json.dumps(problem) + "\n" for problem in part.problems)
                counts.append(part.counts)
                num_read += count
                progress(len(part.counts))
        if old is not None and not num_read:
            return old, 0
        np.cumsum(np.concatenate(counts)).tofile(new / "start.i64")
        if folder.is_dir():
            shutil.rmtree(folder)
        new.replace(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return LengthIndex(folder), num_read


def _parts(
    source: DataSource, planner: LengthReader, index_dir: Path, old: LengthIndex | None,
    num_workers: int,
) -> Iterator[tuple[Part, int]]:
    chunks = [range(k, min(k + CHUNK, len(source))) for k in range(0, len(source), CHUNK)]
    if num_workers < 2 or len(source) < ALONE_BELOW:
        for chunk in chunks:
            yield _index_chunk(source, planner, old, chunk)
        return
    state = (source.config, index_dir, source.root.storage, planner, old.folder if old else None)
    # spawn: threads of tokenizers and pyarrow do not survive a fork
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, state) as pool:
        yield from pool.map(_work, chunks)


_worker: dict[str, object] = {}  # a worker process's own source, opened once


def _start_worker(config, index_dir: Path, storage: Storage, planner: LengthReader,
                  old: Path | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    _worker["run"] = partial(_index_chunk, open_source(config, index_dir, storage), planner,
                             LengthIndex(old) if old else None)


def _work(chunk: range) -> tuple[Part, int]:
    return _worker["run"](chunk)


def _index_chunk(
    source: DataSource, planner: LengthReader, old: LengthIndex | None, chunk: range
) -> tuple[Part, int]:
    rows = list(chunk)
    if old is None:
        stamps, stale = {}, rows
    else:
        stamps = {row: tuple(old.stamps[row].tolist()) for row in rows}
        stale = [row for row in rows
                 if row in old.problems or _stamp_now(source, row) != stamps[row]]
    planned = dict(zip(stale, planner.plan(source.conversation, stale, stale), strict=True))
    stamps |= {row: _stamp(p.media) for row, p in planned.items()}
    every = BatchLayout.from_examples([planned[row].layout if row in planned else
                                       old.layout(*np.array([[row], [row]])) for row in rows])
    problems = [{"row": row, "file": p.path, "reason": p.reason, "segment": p.segment,
                 "modality": p.modality}
                for row, p in ((row, found.problem) for row, found in planned.items()) if p]
    table = np.column_stack(
        [every.modality, every.rows, every.attn_len, every.num_tokens, every.grid])
    return Part(table, every.segments_per_example, every.num_targets,
                np.array([stamps[r] for r in rows], np.int64), problems), len(planned)


def _stamp_now(source: DataSource, row: int) -> tuple[int, int]:
    try:
        return _stamp(media_of(source.conversation(row)))
    except ValueError:
        return -1, -1


def _stamp(media) -> tuple[int, int]:
    """(bytes, latest time in ns) of an example's media files; remote ones are taken to stay what
    they are."""
    total, latest = 0, 0
    for medium in media:
        if medium.path and medium.size < 0 and not isinstance(medium.path, RemoteFile):
            try:
                info = os.stat(medium.path)
            except OSError:
                return -1, -1
            total, latest = total + info.st_size, max(latest, info.st_mtime_ns)
    return total, latest
