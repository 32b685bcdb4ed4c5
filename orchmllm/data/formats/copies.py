"""What is kept of data files in the index folder: scans of large ones, and plain copies of
compressed ones."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from orchmllm.data.formats.rows import File, sizes
from orchmllm.data.storage.cache import written
from orchmllm.data.storage.remote import RemoteFile

PACKED = {".gz": "gzip", ".zst": "zstd"}  # around JSON and tars
MAPPED_BYTES = 1 << 20  # of an array that is read from the disk when it is needed


def digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]


def suffix_of(path: File) -> str:
    """Without that of a compression."""
    return Path(path.stem).suffix if path.suffix in PACKED else path.suffix


def unpacked(path: File, cache_dir: Path) -> File:
    """`path`, or a copy of a compressed file below cache_dir in which rows can be found by their
    position. Raises ValueError."""
    if path.suffix not in PACKED:
        return path
    copy = cache_dir / f"unpacked-{digest(list(sizes([path])))}{suffix_of(path)}"
    if not copy.is_file():
        try:
            with (path.open("rb") as file, written(copy) as plain,
                  _decompressing(file, path.suffix) as packed):
                shutil.copyfileobj(packed, plain, 8 << 20)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{path}: not a whole {PACKED[path.suffix]} file, or no room for its "
                             f"{copy} ({error})") from error
    return copy


def _decompressing(file: BinaryIO, suffix: str) -> BinaryIO:
    """The plain bytes of a file that ends in .gz or .zst."""
    if suffix == ".gz":
        return gzip.GzipFile(fileobj=file)
    import pyarrow

    return pyarrow.input_stream(file, compression="zstd")


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
