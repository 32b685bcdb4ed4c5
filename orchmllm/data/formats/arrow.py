"""Hugging Face datasets, parquet and arrow files, by the `datasets` library: read as raw Arrow, so
that images and audio stay encoded. No code of a dataset is run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.rows import RowStore, StreamRow
from orchmllm.data.formats.scanned import File
from orchmllm.data.storage.remote import RemoteFile


class ArrowRows(RowStore):
    """A map-style dataset. parts: (file, rows in it) one after the other, for error messages."""

    def __init__(
        self, dataset, kind: str, files: Sequence[Path], root: Path, parts: Sequence[tuple]
    ) -> None:
        self.dataset, self.kind = dataset.with_format("arrow"), kind
        self.files, self.root, self._parts = list(files), root, [path for path, _ in parts]
        self._start = np.concatenate([[0], np.cumsum([count for _, count in parts])])

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, i: int) -> dict:
        return clean(self.dataset[int(i)].slice(0, 1).to_pylist()[0])

    def place(self, i: int) -> tuple[File, int]:
        part = int(np.searchsorted(self._start, i, side="right")) - 1
        return self._parts[part], int(i - self._start[part]) + 1


class StreamRows(RowStore):
    """A `datasets.IterableDataset`; only its first rows can be asked for, to tell the layout."""

    kind = "stream of `datasets`"

    def __init__(self, dataset, files: Sequence[Path], label: Path) -> None:
        self.dataset, self.files, self.label = dataset, list(files), label
        self.root = files[0].parent if files else Path()
        tables = self.dataset.with_format("arrow")
        self._first = [clean(t.slice(0, 1).to_pylist()[0]) for t in islice(tables, 3)]

    def __len__(self) -> int:
        return len(self._first)

    def row(self, i: int) -> dict:
        return self._first[i]

    def place(self, i: int) -> tuple[File, int]:
        return self.label, i + 1

    def units(self, num: int) -> list:
        """Its shards (files)."""
        from pyarrow.parquet import read_metadata

        count = self.dataset.num_shards
        files = self.files if len(self.files) == count else [None] * count
        return [IterableUnit(self.dataset.shard(num_shards=count, index=k), file or self.label,
                             file and read_metadata(file).num_rows)
                for k, file in enumerate(files)]


@dataclass
class IterableUnit:
    """A shard of a `datasets.IterableDataset`, read as raw Arrow. num_rows: None where no file
    tells it, until somebody reached its end."""

    dataset: object
    label: Path
    num_rows: int | None = None
    files = ()

    def rows(self, start: int) -> Iterator[StreamRow]:
        number = start
        for table in self.dataset.skip(start).with_format("arrow"):
            for k in range(len(table)):
                number, row = number + 1, table.slice(k, 1)
                yield StreamRow(self.label, number, lambda row=row: clean(row.to_pylist()[0]))


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


def open_files(files: Sequence[Path], root: Path, cache_dir: Path) -> ArrowRows:
    """Parquet or arrow files; of remote ones copies stay in cache_dir. Raises ValueError."""
    import datasets
    import pyarrow.parquet

    kind = "parquet" if files[0].suffix == ".parquet" else "arrow"
    names = [str(f.copied(cache_dir) if isinstance(f, RemoteFile) else f) for f in files]
    with _reading(f"{names[0]}: not {kind} that can be read"):
        if kind == "arrow":
            each = [datasets.Dataset.from_file(name) for name in names]
            dataset, counts = datasets.concatenate_datasets(each), [len(d) for d in each]
        else:  # parquet has no random access: `datasets` keeps a memory-mapped copy
            counts = [pyarrow.parquet.read_metadata(name).num_rows for name in names]
            dataset = datasets.load_dataset(
                "parquet", data_files={"train": names}, split="train",
                cache_dir=str(cache_dir / "parquet"))
    return ArrowRows(dataset, f"{kind} file" if len(files) == 1 else f"{kind} files", files, root,
                     list(zip(files, counts, strict=True)))


def open_saved(path: Path, config: SourceConfig) -> ArrowRows:
    """A folder written by save_to_disk. Raises ValueError."""
    import datasets

    with _reading(f"{path}: not a saved dataset that can be read"):
        dataset = datasets.load_from_disk(str(path))
    folder = path
    if isinstance(dataset, datasets.DatasetDict):
        split = config.split or ("train" if list(dataset) == ["train"] else "")
        if split not in dataset:
            raise ValueError(f"{path}: split {split!r} is not there; name one of "
                             f"{', '.join(dataset)}")
        dataset, folder = dataset[split], path / split
    return ArrowRows(dataset, "saved datasets folder", sorted(folder.glob("*.arrow")), path,
                     [(folder, len(dataset))])


def open_hub(config: SourceConfig, cache_dir: Path) -> ArrowRows:
    """Downloaded by `datasets` into cache_dir. Raises ValueError."""
    dataset = _load_hub(config, cache_dir=str(cache_dir / "hub"))
    files = [Path(f["filename"]) for f in dataset.cache_files]
    return ArrowRows(dataset, "Hugging Face hub dataset", files, cache_dir,
                     [(Path(config.path), len(dataset))])


def open_stream(config: SourceConfig, files: Sequence[Path]) -> StreamRows:
    """The hub's dataset (no files), or parquet files, without a copy on disk. Raises ValueError."""
    import datasets

    if not files:
        return StreamRows(_load_hub(config, streaming=True), files, Path(config.path))
    with _reading(f"{config.path}: not parquet that can be streamed"):
        stream = datasets.load_dataset("parquet", data_files={"train": [str(f) for f in files]},
                                       split="train", streaming=True)
        return StreamRows(stream, files, Path(config.path))


def _load_hub(config: SourceConfig, **how):
    import datasets

    split = config.split or "train"
    with _reading(f"{config.path}: `datasets` cannot load it (subset {config.subset!r}, "
                  f"split {split!r})"):
        return datasets.load_dataset(config.path.removeprefix("hf:"), config.subset or None,
                                     split=split, **how)
