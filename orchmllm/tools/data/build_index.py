"""Writes the length index of a source, with processes that read rows and headers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.open import DataSource, open_source
from orchmllm.data.index import LengthIndex, index_folder, open_index
from orchmllm.data.lengths import LengthReader
from orchmllm.data.storage.remote import Storage
from orchmllm.plan.layout import BatchLayout

CHUNK = 256  # rows a worker is given at a time
ALONE_BELOW = 2000  # rows that are indexed faster than worker processes start


class Part(NamedTuple):
    """Rows of a chunk. table: (s, 7) int64 [modality, rows, attn_len, num_tokens, t, h, w];
    counts, targets: (n,) segments and labels of each row; problems: row, file, reason, segment,
    modality; sizes: of the images, where a processor of transformers made the lengths."""

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
    those that were unusable. progress: called with the number of rows done. Raises ValueError for a
    source without rows."""
    if not len(source):
        raise ValueError(f"{source.config.path}: there are no rows to index")
    folder = index_folder(source, reader, index_dir)
    old = None if fresh else open_index(source, reader, index_dir)
    if old is not None and not old.problems:
        progress(len(old))
        return old, 0
    # Written aside and renamed: a reader sees a whole one or none.
    new = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    shutil.rmtree(new, ignore_errors=True)  # of a killed process with the same number
    new.mkdir(parents=True)
    counts, num_read = [np.zeros(1, np.int64)], 0
    try:
        with (open(new / "table.i64", "wb") as table, open(new / "targets.i64", "wb") as targets,
              open(new / "problems.jsonl", "w", encoding="utf-8") as problems,
              open(new / "sizes.i64", "wb") as sizes):
            for part, count in _parts(source, reader, index_dir, old, num_workers):
                part.table.tofile(table)
                part.targets.tofile(targets)
                np.array(part.sizes, np.int64).tofile(sizes)
                problems.writelines(json.dumps(problem) + "\n" for problem in part.problems)
                counts.append(part.counts)
                num_read += count
                progress(len(part.counts))
        np.cumsum(np.concatenate(counts)).tofile(new / "start.i64")
        if folder.is_dir():
            shutil.rmtree(folder)
        new.replace(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return LengthIndex(folder), num_read


def _parts(
    source: DataSource, reader: LengthReader, index_dir: Path, old: LengthIndex | None,
    num_workers: int,
) -> Iterator[tuple[Part, int]]:
    chunks = [range(k, min(k + CHUNK, len(source))) for k in range(0, len(source), CHUNK)]
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
    sizes = [size for row in rows if reader.has_sizes
             for size in (planned[row].sizes if row in planned else old.sizes(row))]
    return Part(table, every.segments_per_example, every.num_targets, problems, sizes), len(planned)
