"""Files in which rows are found by their positions: they have to stay what they were."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from orchmllm.data.storage.clients import StorageError
from orchmllm.data.storage.remote import RemoteFile


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
        now = _stamp(os.fstat(file.fileno()))
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


def scanned(path: Path | RemoteFile) -> ScannedFile | RemoteFile:
    """A file that is about to be scanned. A remote one has a version, which is compared already."""
    return path if isinstance(path, RemoteFile) else ScannedFile(str(path), _stamp(os.stat(path)))


def _stamp(info: os.stat_result) -> tuple[int, int]:
    return info.st_size, info.st_mtime_ns


def read_bytes(path: ScannedFile | RemoteFile, offset: int, size: int) -> bytes:
    """Part of a file. It is opened for each read: a source may have more shards than a process may
    have open files, and a remote file that stays open stays on the disk. Raises StorageError for a
    file that has changed."""
    with path.open("rb") as file:
        return os.pread(file.fileno(), size, offset)
