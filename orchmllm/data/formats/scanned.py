"""Files in which rows are found by their positions: they have to stay what they were, and what
scanning found in them is kept in the index folder."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from orchmllm.data.storage.cache import written
from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import RemoteFile

File = Path | RemoteFile
MAPPED_BYTES = 1 << 20  # of an array that is read from the disk when it is needed
LONG_S = 0.05  # of scanning a file, from which on what was found in it is kept
TOGETHER = 16  # files of a source; what was found in fewer is kept for each alone
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


class Scans:
    """What scanning finds in the files of a source, `num` arrays of each. It is kept below `folder`
    where it took LONG_S, and of TOGETHER local files or more in one piece, so that who opens the
    source next opens none of them."""

    def __init__(self, folder: Path, files: Sequence[File] = ()) -> None:
        self.folder, self._files = folder, files
        self._found: dict[str, dict[File, Sequence[np.ndarray]]] = {}

    @cached_property
    def _many(self) -> tuple[dict[File, tuple], str]:
        """(What `sizes` says of each of many local files before the first one is opened, a digest
        of it.)"""
        many = len(self._files) >= TOGETHER and not isinstance(self._files[0], RemoteFile)
        stamps = dict(zip(self._files, sizes(self._files), strict=True)) if many else {}
        return stamps, digest([*stamps.values()])

    def __call__(self, kind: str, path: File, build: Callable, num: int = 2) -> tuple:
        """(The file, build()'s arrays.) Raises what build does."""
        stamps, key = self._many
        if not stamps:
            return scanned(path), *self._of_one(kind, path, build, num)
        base, found = self.folder / f"all-{kind}-{key}", self._found.setdefault(kind, {})
        if not found and (joined := _read(base, num + 1)):
            pieces = map(np.split, joined[:num], joined[num])
            found |= {path: of_it for path, *of_it in zip(stamps, *pieces, strict=True)}
        if path not in found:
            found[path] = self._of_one(kind, path, build, num, math.inf)
            if len(found) == len(stamps) and [*stamps.values()] == [*sizes([*stamps])]:
                of_all = [*zip(*map(found.get, stamps), strict=True)]
                ends = np.cumsum([[*map(len, arrays)] for arrays in of_all], axis=1)[:, :-1]
                _write(base, [*map(np.concatenate, of_all), ends])
        return ScannedFile(str(path), stamps[path][1:]), *found[path]

    def _of_one(self, kind: str, path: File, build: Callable, num: int,
                mapped: float = MAPPED_BYTES) -> Sequence[np.ndarray]:
        """Of a file by itself; a remote one need not be fetched where it is kept. mapped: see
        _read."""
        base = self.folder / f"{kind}-{digest(list(sizes([path])))}"
        found, started = _read(base, num, mapped), time.monotonic()
        if found is None:
            found = build()
            if isinstance(path, RemoteFile) or time.monotonic() - started >= LONG_S:
                _write(base, found)
        return found


def _paths(base: Path, num: int) -> list[Path]:
    return [base.with_suffix(f".{k}.npy") for k in range(num)]


def _read(base: Path, num: int, mapped: float = MAPPED_BYTES) -> list[np.ndarray] | None:
    """What _write wrote, None where it is not there. mapped: bytes from which on an array is not in
    memory; its file stays open, of which a process may not have many thousands."""
    paths = _paths(base, num)
    return [np.asarray(np.load(p, mmap_mode="r" if p.stat().st_size > mapped else None,
                               allow_pickle=False))
            for p in paths] if all(p.is_file() for p in paths) else None


def _write(base: Path, arrays: Sequence[np.ndarray]) -> None:
    try:
        for path, array in zip(_paths(base, len(arrays)), arrays, strict=True):
            if not path.is_file():  # another process may have mapped it meanwhile
                with written(path) as f:
                    np.save(f, array, allow_pickle=False)
    except OSError as error:
        warnings.warn(f"what was found in files cannot be kept in {base.parent}, so it is looked "
                      f"for at each start: {error.strerror or error}", stacklevel=2)
