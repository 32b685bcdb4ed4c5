"""The logs of a run: one JSON object a line."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

from orchmllm.config.recipe import Recipe, to_yaml
from orchmllm.runtime.files import fsync
from orchmllm.runtime.log_schema import ALL_RANKS_EVERY, ALL_RANKS_UP_TO, SCHEMA_VERSION

METRICS, SAMPLES = "metrics.jsonl", "samples.jsonl"
LEDGERS = "ledgers.json"
LOGS = (METRICS, "quarantine.jsonl", "nonfinite.jsonl", SAMPLES)  # of a run folder
MAX_ROW_BYTES = 2**24  # of one row; those that tell of all ranks grow with their number


class JsonLines:
    """A file of JSON objects, one a line; written by one rank, appended to what is there. synced: a
    row is on disk when it was written. late: it is begun while a run trains. first: what every row
    begins with.

    Raises ValueError at construction, but for a late file, if it cannot be written. Later on a
    write that fails (the disk is full) costs the row and not the run: `lost` counts them. A file
    that was deleted is made again, with a warning."""

    def __init__(self, path: Path, *, synced: bool = False, late: bool = False, **first: object
                 ) -> None:
        self.path, self.lost, self._synced, self._first = path, 0, synced, first
        self._file: io.FileIO | None = None
        try:
            self._open()
        except OSError as e:
            if late:
                return
            raise ValueError(f"run.dir: {path.parent} cannot be written ({e}); choose another "
                             "folder") from e

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_line(self.path)
        self._file = self.path.open("ab", buffering=0)

    def write(self, row: dict) -> None:
        """row: numbers that JSON does not have become null."""
        text = json.dumps(_finite(self._first | row), allow_nan=False)
        data, start = f"{text}\n".encode(), None
        try:
            if self._file is None:
                self._open()
            elif not self.path.exists():
                self._open()
                print(f"warning: {self.path} was deleted: its rows so far are lost, and a new file "
                      "is begun", file=sys.stderr, flush=True)
            start = self._file.seek(0, os.SEEK_END)
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if self._synced:
                os.fsync(self._file.fileno())
                fsync(self.path.parent)
        except OSError as e:
            if start is not None:
                try:
                    self._file.truncate(start)
                except OSError:
                    self._file = None  # opened again, which drops the torn line
            if not self.lost:
                print(f"warning: {self.path}: {e.strerror}: rows are lost, the run goes on",
                      file=sys.stderr, flush=True)
            self.lost += 1

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def metrics_log(folder: Path) -> JsonLines:
    """metrics.jsonl of a run in `folder` (orchmllm.runtime.log_schema)."""
    return JsonLines(folder / METRICS, schema=SCHEMA_VERSION)


def as_logged(row: dict) -> dict:
    """What is written of a row: few rows of a run of many ranks have the numbers of all of them."""
    if row.get("num_ranks", 0) <= ALL_RANKS_UP_TO or row["step"] % ALL_RANKS_EVERY == 0:
        return row
    return {name: value for name, value in row.items() if name != "cpu_s"}


def open_log(recipe: Recipe, log: Callable[[str], None], ledgers: str = "") -> JsonLines:
    """metrics.jsonl of a run, with the merged recipe and the ledgers of its data beside it. Tells
    which logs of earlier runs were set aside."""
    folder = recipe.run.folder
    for line in set_logs_aside(folder) if recipe.run.resume == "never" else ():
        log(line)
    log = metrics_log(folder)
    (folder / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    if ledgers:
        staged = folder / f".{LEDGERS}"
        staged.write_text(ledgers, encoding="utf-8")
        staged.rename(folder / LEDGERS)
    return log


def set_logs_aside(folder: Path) -> list[str]:
    """Renames what earlier runs logged in a run folder, for a run that starts from scratch there;
    returns a line on each file."""
    lines = []
    for path in (folder / name for name in LOGS):
        if path.is_file() and path.stat().st_size:
            names = (path.with_name(f"aside_{n}_{path.name}") for n in count(1))
            aside = next(name for name in names if not name.exists())
            path.rename(aside)
            lines.append(f"run.resume=never: {path} of an earlier run is now {aside}")
    return lines


def read_rows(path: Path) -> list[dict]:
    """Rows of a file, which may not be there. A last line without its end is left out: a run is
    writing it, or was killed meanwhile. Raises ValueError naming a line that is no JSON object."""
    rows = []
    data = path.read_bytes() if path.is_file() else b""
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        try:
            rows.append(dict(json.loads(line)))
        except (ValueError, TypeError) as e:
            raise ValueError(f"{path}: line {number} is damaged ({e}); delete that line, or move "
                             "the file away") from None
    return rows


def has_row(path: Path, step: int, key: str) -> bool:
    """Whether one of the last rows of a log, which may not be there, is of `step` and has `key`,
    and was written since the step before was trained. A damaged line has not."""
    lines: list[bytes] = []
    with suppress(OSError), path.open("rb") as f:
        f.seek(max(0, f.seek(0, os.SEEK_END) - MAX_ROW_BYTES))
        lines = f.read().split(b"\n")
    for line in reversed(lines):
        with suppress(ValueError, TypeError):
            row = dict(json.loads(line))
            if row.get("step") == step and key in row:
                return True
            if row.get("step") == step - 1 and "loss" in row:
                return False
    return False


def _finite(value: object) -> object:
    """value with None for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_torn_line(path: Path) -> None:
    """Cuts off a last line without its end: what a killed run was writing."""
    if not path.is_file():
        return
    with path.open("rb+") as f:
        end = f.seek(0, os.SEEK_END)
        f.seek(max(0, end - MAX_ROW_BYTES))
        tail = f.read()
        if torn := len(tail) - tail.rfind(b"\n") - 1:
            f.truncate(end - torn)
