"""Whole remote files on a local disk, for all processes of a host, up to a size.

    <folder>/<2 digits>/<key>          a whole file; its time is that of its last use
    <folder>/<2 digits>/<key>.part     one that a process is fetching
    <folder>/locks/<3 digits>          locked by the process that fetches a file of such a key
    <folder>/size                      bytes of all whole files

A file appears by a rename when all of it is there. The key holds the version of a data file, so a
file that changed is another file.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from orchmllm.data.storage.clients import StorageError

FILL = 0.9  # of the limit, after old files were removed
STALE_PART_S = 3600.0  # without a byte: of a process that was killed


def below_home(folder: str, key: str) -> Path:
    """A folder that may begin with ~. Raises ValueError, with the key of the recipe, for a user
    who has no home."""
    try:
        return Path(folder).expanduser()
    except RuntimeError as error:
        raise ValueError(f"{key}: this user has no home folder, where {folder} would be: name "
                         "another") from error


@contextmanager
def written(path: Path) -> Iterator[BinaryIO]:
    """A file to write `path` with, which is there when all of it is: several ranks may write the
    same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


class DiskCache:
    """limit: bytes. wait_s: for another process that fetches the same file."""

    def __init__(self, folder: Path, limit: int, wait_s: float) -> None:
        self.folder, self.limit, self.wait_s = folder, limit, wait_s

    def open(self, key: str, fetch: Callable[[Path], None]) -> BinaryIO:
        """The file `key`, open, so that it may be removed meanwhile. fetch(part) writes it to the
        path `part` where it is not there. Raises StorageError if another process takes too long,
        and what fetch raises."""
        path = self.folder / key[:2] / key
        deadline = time.monotonic() + self.wait_s
        while True:
            try:
                file = path.open("rb")
            except FileNotFoundError:
                pass
            else:
                os.utime(file.fileno())
                return file
            with self._locked(self.folder / "locks" / key[:3], deadline):
                if not path.is_file():
                    self._fetch(path, fetch)

    def _fetch(self, path: Path, fetch: Callable[[Path], None]) -> None:
        path.parent.mkdir(exist_ok=True)
        part = path.with_name(path.name + ".part")
        try:
            fetch(part)
            with part.open("rb") as f:
                os.fsync(f.fileno())
            self._make_room(part.stat().st_size)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    def _make_room(self, size: int) -> None:
        """Counts a file of `size` bytes that is there, and removes others if all are too large."""
        with self._locked(self.folder / "size", time.monotonic() + self.wait_s) as number:
            total = int(os.pread(number, 32, 0) or 0) + size
            if total > self.limit:
                total = self._remove_oldest(int(self.limit * FILL))
            os.ftruncate(number, 0)
            os.pwrite(number, str(total).encode(), 0)

    def _remove_oldest(self, target: int) -> int:
        """Removes files that were used least lately until `target` bytes are left at most; returns
        how many there are."""
        found = []
        for folder in os.scandir(self.folder):
            for entry in os.scandir(folder) if len(folder.name) == 2 else ():
                with suppress(FileNotFoundError):  # another process has renamed it meanwhile
                    info = entry.stat()
                    found.append((info.st_mtime, info.st_size, entry.path))
        total, now = sum(size for _, size, _ in found), time.time()
        for used, size, path in sorted(found):
            stale = not path.endswith(".part") or now - used > STALE_PART_S
            if total > target and stale:
                os.unlink(path)
                total -= size
        return total

    @contextmanager
    def _locked(self, path: Path, deadline: float) -> Iterator[int]:
        """The file at `path`, open and locked for this thread alone; a process that dies unlocks
        it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    pass
                except OSError as error:
                    raise StorageError(f"{path} cannot be locked ({error}): set data.remote.cache "
                                       "to a folder on a local disk") from error
                if time.monotonic() > deadline:
                    raise StorageError(f"another process has locked {path} for {self.wait_s:g} s, "
                                       "in which it should have fetched its file; see what it "
                                       "waits for, or raise data.remote.deadline_s")
                time.sleep(0.02)
            yield number
        finally:
            fcntl.flock(number, fcntl.LOCK_UN)  # also for a process that was forked meanwhile
            os.close(number)
