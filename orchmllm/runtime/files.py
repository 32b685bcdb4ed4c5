"""Files that are on disk when they are said to be, and what identifies them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def identify(path: Path) -> dict:
    """Size and SHA-256 of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def write_text(path: Path, text: str) -> None:
    """Writes a file; returns when it is on disk."""
    with path.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def fsync(path: Path) -> None:
    """Returns when a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
