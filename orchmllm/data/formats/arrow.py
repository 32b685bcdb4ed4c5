"""Parquet and Arrow files, read by pyarrow a few rows at a time, folders of save_to_disk, and the
hub by the `datasets` library. Images and audio stay encoded, and no code of a dataset is run."""

from __future__ import annotations

import fcntl
import json
import math
import os
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.rows import JoinedRows, OrderedUnit, RowStore, StreamRow
from orchmllm.data.formats.scanned import File, Scans, digest, scanned
from orchmllm.data.media.medium import OUT_OF, RowError
from orchmllm.data.storage.cache import written
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import RemoteFile

ROWS_AT_ONCE = 16  # of a parquet file that are decoded together
# Bytes decoded per byte of a parquet file, of those that hold more than SMALL_BYTES.
MAX_EXPANSION, SMALL_BYTES = 400, 64 << 20
# That a thread keeps open, each with the rows that were decoded last: a process may often open
# 1,024 in all.
OPEN_FILES = 128


@dataclass
class _Place:
    """How far a group of a file has been read. batch: its rows from `first` on, decoded last; rest:
    the batches behind it."""

    group: int
    rest: Iterator
    batch: Sequence = ()
    first: int = 0


class _Recent(threading.local):
    """The files that each thread read last, in that order. They keep their places themselves, so
    that a data set that is dropped closes its files."""

    def __init__(self) -> None:
        self.files: WeakKeyDictionary[ArrowRows, None] = WeakKeyDictionary()


_RECENT = _Recent()


class ArrowRows(RowStore):
    """One file. counts: rows of each of its groups, which are read in order."""

    splits = False

    def __init__(self, path: File, max_row_bytes: int, scans: Scans) -> None:
        self.kind, self.files, self.root = f"{path.suffix[1:]} file", [path], path.parent
        self._here = threading.local()  # .place: of each thread
        with _reading(f"{path}: not {path.suffix[1:]} that can be read"):
            counts = self.open(path.copied(scans.folder) if isinstance(path, RemoteFile) else path,
                               scans)
            self._start = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])

    @abstractmethod
    def open(self, path: Path, scans: Scans) -> Sequence[int]:
        """Rows of each group."""

    @abstractmethod
    def batches(self, group: int) -> Iterator:
        """The record batches of a group."""

    def __len__(self) -> int:
        return int(self._start[-1])

    def row(self, i: int) -> dict:
        return clean(self._slice(i).to_pylist()[0])

    def later(self, i: int) -> Callable[[], dict]:
        try:
            row = self._slice(i)
        except RowError:
            return lambda: self.row(i)
        return lambda: clean(row.to_pylist()[0])

    def _slice(self, i: int):
        """Row i as a record batch, which keeps those that were decoded with it. Raises RowError."""
        group = int(np.searchsorted(self._start, i, side="right")) - 1
        offset, recent = int(i - self._start[group]), _RECENT.files
        here, self._here.place = getattr(self._here, "place", None), None
        if here is None or here.group != group or offset < here.first:
            here = _Place(group, self.batches(group))
        try:
            while offset >= here.first + len(here.batch):
                here.first += len(here.batch)
                here.batch = next(here.rest)
        except StorageError:
            raise
        except Exception as error:  # of pyarrow, on bad bytes
            if isinstance(error, OSError) and error.errno in OUT_OF:
                raise
            raise RowError(f"the {self.kind} is damaged: {error}") from error
        self._here.place = here
        recent.pop(self, None)
        recent[self] = None
        if len(recent) > OPEN_FILES:
            oldest = next(recent.keys())
            oldest._here.place = None
            del recent[oldest]
        return here.batch.slice(offset - here.first, 1)


class IpcRows(ArrowRows):
    """Arrow's own files, mapped into memory; batches that are compressed are read when they are
    needed, but for those of a stream."""

    def open(self, path: Path, scans: Scans) -> Sequence[int]:
        import pyarrow as pa

        self.data = scanned(path)
        mapped = pa.memory_map(str(self.data.__fspath__()))
        try:
            reader = pa.ipc.open_file(mapped)
            self._read, count = reader.get_batch, reader.num_record_batches
        except pa.ArrowInvalid:  # a stream, as `datasets` writes
            mapped.seek(0)
            batches = list(pa.ipc.open_stream(mapped))
            self._read, count = batches.__getitem__, len(batches)
        return [len(self._read(k)) for k in range(count)]

    def batches(self, group: int) -> Iterator:
        yield self._read(group)


class ParquetRows(ArrowRows):
    """Row groups, decoded up to the row that is asked for. Once as many rows as the file has were
    decoded in vain, as rows are asked for in no order, the file is kept as Arrow below cache_dir,
    where each row is found at once."""

    def open(self, path: Path, scans: Scans) -> Sequence[int]:
        self.data = path
        self.data, counts, num_bytes = scans("groups", path, self._groups)
        decoded = int(num_bytes.sum())
        self._limit = max(SMALL_BYTES, MAX_EXPANSION * self.data.stamp[0])
        if decoded > self._limit:
            raise ValueError(f"{self.data.stamp[0]} bytes hold {decoded}: more than the limit of "
                             f"{MAX_EXPANSION} times as many")
        self._copy, self._in_vain = None, 0
        # Of the file as it is now: others may have seen another one under its name.
        key = digest([os.path.realpath(path), self.data.stamp])
        self._path = scans.folder / f"rows-{key}.arrow"
        return counts

    def _groups(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows and bytes of each."""
        with self._file() as file:
            meta = file.metadata
        groups = [meta.row_group(k) for k in range(meta.num_row_groups)]
        return (np.array([group.num_rows for group in groups], np.int64),
                np.array([group.total_byte_size for group in groups], np.int64))

    def _slice(self, i: int):
        if self._copy is None and self._in_vain > len(self):
            self._copy = self._copied()
            self._here.place = None
        if self._copy is not None:
            return self._copy._slice(i)
        self._in_vain -= self._in_vain > 0
        return super()._slice(i)

    def batches(self, group: int) -> Iterator:
        with self._file() as file:
            for batch in file.iter_batches(ROWS_AT_ONCE, row_groups=[group], use_threads=False):
                self._in_vain += len(batch)
                yield batch

    def _file(self):
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(self.data.__fspath__(), pre_buffer=False)

    def _copied(self) -> IpcRows | None:
        """The file as Arrow, which one process of all writes; None, with a warning, where it cannot
        be kept, as rows are found without it."""
        path = self._path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.with_suffix(".lock").open("w") as lock:
                with suppress(OSError):  # without locks each process does the work
                    fcntl.flock(lock, fcntl.LOCK_EX)
                try:
                    if not path.is_file():
                        self._write(path)
                finally:
                    with suppress(OSError):  # also for a process that was forked meanwhile
                        fcntl.flock(lock, fcntl.LOCK_UN)
            return IpcRows(path, 0, Scans(path.parent))
        except Exception as error:  # a full disk, a row group that is damaged
            warnings.warn(f"{self.files[0]} cannot be kept as Arrow in {path.parent}, so each row "
                          f"that is asked for decodes those before it: {error}", stacklevel=2)
            self._in_vain = -math.inf
            return None

    def _write(self, path: Path) -> None:
        import pyarrow as pa

        with self._file() as file, written(path) as out, pa.ipc.new_file(
                out, file.schema_arrow) as writer:
            for batch in file.iter_batches(ROWS_AT_ONCE, use_threads=False):
                writer.write_batch(batch)
                if out.tell() > self._limit:
                    raise ValueError(f"it would have more than {self._limit} bytes")


class StreamRows(RowStore):
    """A `datasets.IterableDataset`; only its first rows can be asked for, to tell the layout."""

    kind, files, root = "stream of `datasets`", (), Path()

    def __init__(self, dataset, label: Path) -> None:
        self.dataset, self.label = dataset, label
        tables = self.dataset.with_format("arrow")
        self._first = [clean(t.slice(0, 1).to_pylist()[0]) for t in islice(tables, 3)]

    def __len__(self) -> int:
        return len(self._first)

    def row(self, i: int) -> dict:
        return self._first[i]

    def place(self, i: int) -> tuple[File, int]:
        return self.label, i + 1

    def pieces(self, parts: int) -> list:
        """Its shards (files)."""
        count = self.dataset.num_shards
        return [OrderedUnit(partial(_rows_of, self.dataset.shard(num_shards=count, index=k),
                                    self.label)) for k in range(count)]


def _rows_of(dataset, label: Path, start: int) -> Iterator[StreamRow]:
    """Of a `datasets.IterableDataset`, read as raw Arrow, from the row `start` on."""
    number = start
    for table in dataset.skip(start).with_format("arrow"):
        for k in range(len(table)):
            number, row = number + 1, table.slice(k, 1)
            yield StreamRow(label, number, lambda row=row: clean(row.to_pylist()[0]))


class HubRows(RowStore):
    """A dataset of the hub, which `datasets` has downloaded into a folder."""

    kind = "Hugging Face hub dataset"

    def __init__(self, config: SourceConfig, cache_dir: Path) -> None:
        self.dataset = _load_hub(config, cache_dir=str(cache_dir / "hub")).with_format("arrow")
        self.files, self.root = [Path(f["filename"]) for f in self.dataset.cache_files], cache_dir
        self.label = Path(config.path)

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, i: int) -> dict:
        return clean(self.dataset[int(i)].slice(0, 1).to_pylist()[0])

    def place(self, i: int) -> tuple[File, int]:
        return self.label, i + 1


def clean(value):
    """Without the nulls that Arrow adds to make rows alike (a struct has all keys of all rows)."""
    if isinstance(value, dict):
        return {k: clean(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [clean(v) for v in value]
    return value


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """pyarrow and datasets raise many types, on bad bytes, connections, authentication, layouts."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {error}") from error


def open_saved(path: Path, config: SourceConfig, cache_dir: Path) -> JoinedRows:
    """A folder written by save_to_disk. Raises ValueError."""
    folder = path
    with _reading(f"{path}: not a saved dataset that can be read"):
        if (path / "dataset_dict.json").is_file():
            splits = json.loads((path / "dataset_dict.json").read_text())["splits"]
            split = config.split or ("train" if splits == ["train"] else "")
            if split not in splits:
                raise ValueError(f"split {split!r} is not there; name one of {', '.join(splits)}")
            folder = path / split
        state = json.loads((folder / "state.json").read_text())
        if state.get("_indices_data_files"):
            raise ValueError("its rows are chosen by another file, as older versions of `datasets` "
                             "saved them: save it anew")
        files = [folder / file["filename"] for file in state["_data_files"]]
        rows = JoinedRows([IpcRows(file, 0, Scans(cache_dir)) for file in files], path)
    rows.kind = "saved datasets folder"
    return rows


def open_stream(config: SourceConfig) -> StreamRows:
    """The hub's dataset without a copy on disk. Raises ValueError."""
    return StreamRows(_load_hub(config, streaming=True), Path(config.path))


def _load_hub(config: SourceConfig, **how):
    import datasets

    split = config.split or "train"
    with _reading(f"{config.path}: `datasets` cannot load it (subset {config.subset!r}, "
                  f"split {split!r})"):
        return datasets.load_dataset(config.path.removeprefix("hf:"), config.subset or None,
                                     split=split, **how)
