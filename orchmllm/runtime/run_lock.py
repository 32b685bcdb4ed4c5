"""One run at a time writes a run folder: rank 0 holds a lock on `run.lock` in it.

The lock is the operating system's, so it ends with the process that holds it, however that ends;
also on storage that several hosts share, if its file system has locks. The file says who holds it.
It is a POSIX record lock, which a forked process does not hold too: a data worker that outlives its
rank does not keep the folder.

A file server may keep the lock of a host that died. Therefore a holder renews the time of the file
every RENEW_S. Who finds the lock of another host waits until it is renewed, which means that its
holder lives, or until it was not renewed for STALE_S, and then takes it over. A holder that finds
the lock of another run is told so: its host had only been away. Where the file was deleted, or a
file server does not show it for a moment, the holder makes it again.
"""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from orchmllm.launch import machine

NAME = "run.lock"
RENEW_S, STALE_S = 20.0, 300.0
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderInUse(ValueError):
    """Another run writes the folder, or nobody can; the message is for the user."""


def lock_folder(
    folder: Path, patience_s: float = 0.0, *, renew_s: float = RENEW_S, stale_s: float = STALE_S,
    taken: Callable[[], object],
) -> Callable[[], None]:
    """Locks a run folder, made if need be, for this process; returns what unlocks it. patience_s:
    how long to wait for a holder that is about to end. A holder on another machine is waited for
    until it shows that it lives, or for stale_s. taken: called once, from a thread, if another run
    has taken the folder over.

    Raises FolderInUse naming the process that holds it, or why the folder cannot be written."""
    path, done = folder / NAME, threading.Event()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = _taken(path, time.monotonic() + patience_s, stale_s)
        _sign(descriptor)
    except OSError as e:
        raise FolderInUse(f"run.dir: {folder} cannot be written ({e}); choose another folder"
                          ) from e

    mine = _holder(descriptor)

    def renew() -> None:
        nonlocal descriptor
        while not done.wait(renew_s):
            try:
                if not _is_at(path, descriptor):
                    # The old one stays open: if the file is the same, to close it would end the
                    # new lock too.
                    descriptor = _made_again(path, mine)
                os.utime(descriptor)
            except FolderInUse:
                return taken()
            except OSError:  # the file server may come back
                continue

    thread = threading.Thread(target=renew, name="orchmllm-lock", daemon=True)
    thread.start()

    def unlock() -> None:
        done.set()
        thread.join()
        with suppress(OSError):  # the lock ends with the process
            if _is_at(path, descriptor):
                path.unlink()
        os.close(descriptor)

    return unlock


def _taken(path: Path, deadline: float, stale_s: float) -> int:
    """The descriptor of the locked file. stale_s: math.inf where no lock is taken over. Raises
    FolderInUse after the deadline, OSError."""
    first = None
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        locked = _lock(descriptor, path)
        if locked and _is_at(path, descriptor):
            return descriptor
        stale = not locked and _is_at(path, descriptor) and _stale(descriptor, path, stale_s)
        message, renewed = _told(descriptor, path), os.fstat(descriptor).st_mtime
        may_be_dead = first in (None, renewed) and stale_s < math.inf and _elsewhere(descriptor)
        os.close(descriptor)
        if stale:
            print(f"warning: {stale}", file=sys.stderr, flush=True)
            path.unlink(missing_ok=True)
        elif not locked:
            if time.monotonic() >= deadline and not may_be_dead:
                raise FolderInUse(message)
            if first is None and may_be_dead:
                print(f"{message}. It may be dead: waiting until its lock is renewed, or for "
                      f"{stale_s:.0f} s without that", file=sys.stderr, flush=True)
            first = renewed if first is None else first
            time.sleep(0.2)


def _made_again(path: Path, mine: dict[str, str]) -> int:
    """The descriptor of the lock in place of one whose file is gone. mine: what that file said.
    Raises FolderInUse, OSError."""
    what = path if path.parent.exists() else f"{path.parent}, with all that was in it,"
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _taken(path, 0.0, math.inf)
    if _holder(descriptor) not in ({}, mine):
        raise FolderInUse(_told(descriptor, path))
    _sign(descriptor)
    print(f"warning: {what} was deleted during the run; the lock is made again, and the run goes "
          "on", file=sys.stderr, flush=True)
    return descriptor


def check_folder(folder: Path, *, elsewhere: bool = True) -> None:
    """Raises FolderInUse if another process holds the lock; changes nothing. elsewhere: also one on
    another machine, which may be dead."""
    path = folder / NAME
    try:
        descriptor = os.open(path, os.O_RDWR)
    except OSError:  # there is none, or the run will tell why it cannot be written
        return
    try:
        if not (_lock(descriptor, path) or not elsewhere and _elsewhere(descriptor)
                or _stale(descriptor, path, STALE_S)):
            raise FolderInUse(_told(descriptor, path))
    finally:
        os.close(descriptor)  # and with it the lock


def is_locked(folder: Path) -> bool:
    """Whether a run writes the folder, as far as this process may find out."""
    path = folder / NAME
    try:
        check_folder(folder)
    except FolderInUse:
        return True
    return path.exists() and not os.access(path, os.W_OK)


def _sign(descriptor: int) -> None:
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "machine": machine()}
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _lock(descriptor: int, path: Path) -> bool:
    """Whether this process now holds the lock."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        if e.errno not in _NO_LOCKS:
            return False
        print(f"warning: {path}: the file system has no locks ({e.strerror}): nothing keeps two "
              "runs from writing this folder", file=sys.stderr, flush=True)
    return True


def _holder(descriptor: int) -> dict[str, str]:
    """host, pid and machine that the file names; nothing where it cannot be read."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return {"host": str(holder["host"]), "pid": str(holder["pid"]),
                "machine": str(holder.get("machine", ""))}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _elsewhere(descriptor: int) -> bool:
    """Whether the lock is another machine's. One of this machine is its process's for certain; a
    pod may have the name of the one before it."""
    holder = _holder(descriptor)
    key, here = ("machine", machine()) if holder.get("machine") else ("host", socket.gethostname())
    return holder.get(key, here) != here


def _stale(descriptor: int, path: Path, stale_s: float) -> str:
    """What is said of the lock of another machine that was not renewed for stale_s; '' if it
    was."""
    still_s = _now(path.parent) - os.fstat(descriptor).st_mtime
    if still_s < stale_s or not _elsewhere(descriptor):
        return ""
    return (f"run.dir: {path.parent} is locked by host {_holder(descriptor)['host']}, which has "
            f"not renewed the lock for {still_s:.0f} s: it is taken to be dead")


def _now(folder: Path) -> float:
    """By the clock of the file system, which sets the times of its files: that of this host may be
    wrong."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            return os.fstat(file.fileno()).st_mtime
    except OSError:  # nothing can be written
        return time.time()


def _is_at(path: Path, descriptor: int) -> bool:
    """Whether an open file is still the one at `path`: its last holder may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError as e:  # a file server has forgotten a file that another host removed
        if e.errno not in (errno.ENOENT, errno.ESTALE):
            raise
        return False


def _told(descriptor: int, path: Path) -> str:
    holder = _holder(descriptor)
    who = f"process {holder['pid']} on host {holder['host']}" if holder else "another process"
    return (f"run.dir: {path.parent} is being written by another run ({who}): wait for it, stop "
            "it, or choose another run.dir")
