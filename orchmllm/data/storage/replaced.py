"""A folder that takes the place of another one."""

from __future__ import annotations

import shutil
from pathlib import Path


def aside(folder: Path) -> Path:
    """Where a folder is until another one has its name."""
    return folder.with_name(f".old_{folder.name}")


def settle(folder: Path) -> None:
    """Ends what a kill has cut off: what is aside gets its name back, or goes."""
    old = aside(folder)
    if old.exists() and not folder.exists():
        old.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def put_in_place(staged: Path, folder: Path) -> None:
    """Renames `staged` to `folder`, and deletes what was there. Raises OSError; `folder` is then
    what it was."""
    settle(folder)
    if folder.exists():
        folder.rename(aside(folder))
    try:
        staged.rename(folder)
    finally:
        settle(folder)
