"""Writes the length index of a source, with processes that read rows and headers."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.open import DataSource, open_source
from orchmllm.data.index import LengthIndex, index_folder, open_index
from orchmllm.data.lengths import LengthReader
from orchmllm.data.storage.remote import Storage
from orchmllm.data.storage.replaced import aside, put_in_place, settle
from orchmllm.plan.layout import BatchLayout

CHUNK = 256  # rows a worker is given at a time
ALONE_BELOW = 2000  # rows that are indexed faster than worker processes start
FILES = ("table.i64", "start.i64", "targets.i64", "sizes.i64", "problems.jsonl")
JOURNAL = "written.jsonl"


class Part(NamedTuple):
    """Rows of a chunk. table: (s, 7) int64 [modality, rows, attn_len, num_tokens, t, h, w];
    counts: (n, 2) segments and media of each row; targets: (n,) labels; problems: row, file,
    reason, segment, modality; sizes: of the media."""

    table: np.ndarray
    counts: np.ndarray
    targets: np.ndarray
    problems: list[dict]
    sizes: list[tuple[int, int]]


def build_index(
    source: DataSource, reader: LengthReader, index_dir: Path, *, num_workers: int,
    fresh: bool = False, progress: Callable[[int], object] = lambda count: None,
) -> tuple[LengthIndex, int]:
    """(the index, rows that had to be read): all of them the first time and with `fresh`; later
    those that were unusable. A build that was killed goes on where it was, and one that another
    process does is waited for. progress: called with the number of rows done. Raises ValueError for
    a source without rows."""
    if not len(source):
        raise ValueError(f"{source.config.path}: there are no rows to index")
    folder = index_folder(source, reader, index_dir)

    def opened() -> LengthIndex | None:
        return None if fresh else open_index(source, reader, index_dir)

    old = opened()
    if old is None or old.problems or aside(folder).exists():
        # Written apart and renamed: a reader sees a whole one or none.
        with _apart(folder, fresh) as new:
            settle(folder)
            old = opened()  # another process may have made it meanwhile
            if old is None or old.problems:
                new.mkdir(exist_ok=True)
                written = _Written(new)
                progress(written.rows)
                num_read = 0
                for part, count in _parts(source, reader, index_dir, old, num_workers,
                                          written.rows):
                    written.add(part)
                    num_read += count
                    progress(len(part.counts))
                written.close()
                (new / JOURNAL).unlink()
                put_in_place(new, folder)
                return LengthIndex(folder), num_read
    progress(len(old))
    return old, 0


@contextmanager
def _apart(folder: Path, fresh: bool) -> Iterator[Path]:
    """A folder for this process alone, once no other one builds this index: the one that a build
    has left which did not come to its end, unless `fresh`. It stays where this one does not
    either."""
    kept = folder.with_name(f"{folder.name}.part")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(kept.with_suffix(".lock"), "wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"{folder}: another process builds it, which is waited for", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:  # the file system has no locks
            kept = folder.with_name(f"{folder.name}.{os.getpid()}.part")
            fresh = True
        if fresh:
            shutil.rmtree(kept, ignore_errors=True)
        yield kept


class _Written:
    """What is written of an index, and its rows. The journal says after each part how long every
    file is then: what a killed build has written beyond its last line is cut off."""

    def __init__(self, folder: Path) -> None:
        self.rows, sizes = 0, [0] * len(FILES)
        for line in _lines(folder / JOURNAL):
            rows, *told = line
            if any(size > (folder / name).stat().st_size
                   for name, size in zip(FILES, told, strict=True)):
                break  # its disk had lost power
            self.rows, sizes = rows, told
        self._files = [open(folder / name, "ab") for name in FILES]
        for file, size in zip(self._files, sizes, strict=True):
            file.truncate(size)
        self._journal = open(folder / JOURNAL, "w", encoding="utf-8")
        self._end = np.array([sizes[0] // (7 * 8), sizes[3] // (2 * 8)])  # segments, media
        if self.rows:
            self._note()
        else:
            self._files[1].write(bytes(16))  # the first row begins at 0

    def add(self, part: Part) -> None:
        """Writes rows that follow."""
        start = self._end + np.cumsum(part.counts, axis=0)
        problems = "".join(json.dumps(problem) + "\n" for problem in part.problems)
        for file, data in zip(self._files, (
                part.table, start, part.targets, np.array(part.sizes, np.int64),
                problems.encode()), strict=True):
            file.write(data if isinstance(data, bytes) else data.astype(np.int64).tobytes())
        self.rows, self._end = self.rows + len(part.counts), start[-1]
        self._note()

    def _note(self) -> None:
        for file in self._files:
            file.flush()
        self._journal.write(json.dumps([self.rows, *(f.tell() for f in self._files)]) + "\n")
        self._journal.flush()

    def close(self) -> None:
        """Closes the files."""
        for file in (*self._files, self._journal):
            file.close()


def _lines(journal: Path) -> Iterator[list[int]]:
    """The whole lines of a journal; none where there is none."""
    text = journal.read_text(encoding="utf-8") if journal.exists() else ""
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def _parts(
    source: DataSource, reader: LengthReader, index_dir: Path, old: LengthIndex | None,
    num_workers: int, first: int,
) -> Iterator[tuple[Part, int]]:
    """The rows from `first` on."""
    chunks = [range(k, min(k + CHUNK, len(source))) for k in range(first, len(source), CHUNK)]
    if num_workers < 2 or len(source) < ALONE_BELOW:
        for chunk in chunks:
            yield _index_chunk(source, reader, old, chunk)
        return
    state = (source.config, index_dir, source.root.storage, reader, old.folder if old else None)
    # spawn: threads of tokenizers and pyarrow do not survive a fork
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _start_worker, state) as pool:
        yield from pool.map(_work, chunks)


_worker: dict[str, object] = {}  # a worker process's own source, opened once


def _start_worker(config, index_dir: Path, storage: Storage, reader: LengthReader,
                  old: Path | None) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core a worker
    _worker["run"] = partial(_index_chunk, open_source(config, index_dir, storage), reader,
                             LengthIndex(old) if old else None)


def _work(chunk: range) -> tuple[Part, int]:
    return _worker["run"](chunk)


def _index_chunk(
    source: DataSource, reader: LengthReader, old: LengthIndex | None, chunk: range
) -> tuple[Part, int]:
    rows = list(chunk)
    stale = rows if old is None else [row for row in rows if row in old.problems]
    planned = dict(zip(stale, reader.plan(source.conversation, stale), strict=True))
    every = BatchLayout.concat([planned[row].layout if row in planned else
                                old.layout(*np.array([[row], [row]])) for row in rows])
    problems = [{"row": row, "file": p.path, "reason": p.reason, "segment": p.segment,
                 "modality": p.modality}
                for row, p in ((row, found.problem) for row, found in planned.items()) if p]
    table = np.column_stack(
        [every.modality, every.rows, every.attn_len, every.num_tokens, every.grid])
    sizes = [planned[row].sizes if row in planned else old.sizes(row) for row in rows]
    counts = np.column_stack([every.segments_per_example, [*map(len, sizes)]])
    media = [size for found in sizes for size in found]
    return Part(table, counts, every.num_targets, problems, media), len(planned)
