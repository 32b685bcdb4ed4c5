"""Files in which rows are found by their positions: they have to stay what they were, and scans of
large ones are kept in the index folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from orchmllm.data.storage.cache import written
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import RemoteFile

File = Path | RemoteFile
MAPPED_BYTES = 1 << 20  # of an array that is read from the disk when it is needed
# Of what is read of the files of a source to tell whether they are still the same.
SAMPLED_FILES, SAMPLED_BLOCKS, BLOCK_BYTES = 64, 16, 1 << 16


@dataclass(frozen=True)
class ScannedFile(os.PathLike):
    """A local file in which rows are found by their positions. stamp: its bytes and its time in ns
    before it was scanned. Opening it, also as a path, raises StorageError once the file is
    another."""

    path: str
    stamp: tuple[int, int]

    def __str__(self) -> str:
        return self.path

    def __fspath__(self) -> str:
        self.open().close()
        return self.path

    def open(self, mode: str = "rb") -> BinaryIO:
        try:
            file = open(self.path, mode, buffering=0)
        except FileNotFoundError:
            raise self._changed("it is no longer there") from None
        info = os.fstat(file.fileno())
        now = info.st_size, info.st_mtime_ns
        if now != self.stamp:
            file.close()
            raise self._changed("its bytes and its time in ns were {} and {}, and are {} and {}"
                                .format(*self.stamp, *now))
        return file

    def _changed(self, how: str) -> StorageError:
        return StorageError(
            f"{self.path} has changed since this run opened it ({how}): its rows are no longer "
            "where they were, and the order of examples means nothing any more; put the old file "
            "back and resume, or start a new run with the file as it is")


def scanned(path: File) -> ScannedFile | RemoteFile:
    """A file that is about to be scanned. A remote one has a version, which is compared already."""
    if isinstance(path, RemoteFile):
        return path
    info = os.stat(path)
    return ScannedFile(str(path), (info.st_size, info.st_mtime_ns))


def read_bytes(path: ScannedFile | RemoteFile, offset: int, size: int) -> bytes:
    """Part of a file. It is opened for each read: a source may have more shards than a process may
    have open files, and a remote file that stays open stays on the disk. Raises StorageError for a
    file that has changed."""
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def sizes(files: Sequence[File]) -> Iterator[tuple[str, int, int | str]]:
    """(real path, bytes, mtime in ns) of each file, or (URL, bytes, version): what a cache is keyed
    by."""
    for path in files:
        if isinstance(path, RemoteFile):
            yield path.url, path.num_bytes(), path.version
            continue
        info = os.stat(path)
        yield os.path.realpath(path), info.st_size, info.st_mtime_ns


def sampled(files: Sequence[File]) -> dict:
    """What tells the contents of files, in their order, from others, whatever the files are called:
    their number, their bytes, and a digest. It covers the size of every file, the version of every
    remote one that has one, and of SAMPLED_FILES of the others the first, the last and
    SAMPLED_BLOCKS more blocks; files that are no longer than that are read whole. Which files and
    blocks are read follows from their numbers alone."""
    found, lengths = hashlib.sha256(), [size for _, size, _ in sizes(files)]
    versions = [getattr(file, "version", "") for file in files]
    found.update(digest([lengths, versions]).encode())
    to_read = [k for k, version in enumerate(versions) if not version]
    for k in sorted(sorted(to_read, key=digest)[:SAMPLED_FILES]):
        with files[k].open("rb") as file:
            for start, size in _blocks(lengths[k]):
                file.seek(start)
                found.update(file.read(size))
    return {"files": len(files), "bytes": sum(lengths), "content": found.hexdigest()[:16]}


def _blocks(length: int) -> list[tuple[int, int]]:
    """(first byte, bytes) of the parts of a file of that length that are read."""
    if length <= (SAMPLED_BLOCKS + 2) * BLOCK_BYTES:
        return [(0, length)]
    last = length - BLOCK_BYTES
    width = last // SAMPLED_BLOCKS
    starts = [k * width + int(digest([length, k]), 16) % width for k in range(SAMPLED_BLOCKS)]
    return [(start, BLOCK_BYTES) for start in (0, *starts, last)]


def cached(cache_dir: Path, kind: str, file: File, build: Callable) -> tuple[np.ndarray, ...]:
    """build()'s two arrays, kept below cache_dir under the file's size and time where building took
    long enough to matter."""
    # Of a remote file they save fetching it.
    if not isinstance(file, RemoteFile) and file.stat().st_size < 4 << 20:
        return build()
    base = cache_dir / f"{kind}-{digest(list(sizes([file])))}"
    paths = [base.with_suffix(f".{k}.npy") for k in range(2)]
    if not all(p.is_file() for p in paths):
        for path, array in zip(paths, build(), strict=True):
            with written(path) as f:
                np.save(f, array, allow_pickle=False)
    # A mapped file is an open one, of which a process may not have many thousands.
    return tuple(np.load(p, mmap_mode="r" if p.stat().st_size > MAPPED_BYTES else None,
                         allow_pickle=False) for p in paths)
