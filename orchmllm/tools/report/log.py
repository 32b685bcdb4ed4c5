"""The log of a run, metrics.jsonl, as columns: read while it is still written, in the time that its
lines need to be parsed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pydantic_core import from_json

from orchmllm.plan.assign import EVERY_PHASE
from orchmllm.plan.gain import Gain
from orchmllm.runtime.attempts import read_attempts
from orchmllm.runtime.log_schema import NUMBERS, PHASE_METRICS, SCHEMA_VERSION
from orchmllm.runtime.metrics import LEDGERS, SAMPLES, read_rows
from orchmllm.runtime.resumable import describe_changes
from orchmllm.runtime.run_lock import is_locked

MEASURED = ("imbalance", "slowest_s", "rank")
COLUMNS = (
    "offset", "step", *NUMBERS,
    *(f"{phase}.{name}" for phase in EVERY_PHASE for name in PHASE_METRICS),
    "measured.step", "exchange.slowest_s", *(f"measured.gain.{name}" for name in Gain._fields),
    *(f"{phase}.measured.{name}" for phase in EVERY_PHASE for name in MEASURED))
NOTHING_MEASURED = (np.nan,) * (2 + len(Gain._fields) + len(EVERY_PHASE) * len(MEASURED))


@dataclass(frozen=True)
class RunLog:
    """steps: column (see COLUMNS) -> (n,) float64, one for each step that counts, by step; nan
    where nothing was logged. measured.* belong to the step of their place. validations: (m, 2) of
    steps done and loss. restarts: (step where it went on, steps done again). quarantine,
    samples: lines of quarantine.jsonl and samples.jsonl. ledgers: where rows of the sources went
    (see orchmllm.data.ledger). settings: dotted key -> value of all that
    the run was started with last. changes: (step from which on, what changed). cut: the last line
    is still being written. failed: how the last attempt ended if that was no end of a run, else "".
    """

    folder: Path
    steps: dict[str, np.ndarray]
    validations: np.ndarray
    restarts: list[tuple[int, int]]
    quarantine: list[dict]
    samples: list[dict]
    ledgers: list[dict]
    settings: dict[str, Any]
    changes: list[tuple[int, str]]
    cut: bool
    written_at: float
    failed: str = ""

    def __getitem__(self, column: str) -> np.ndarray:
        return self.steps[column]

    @property
    def num_steps(self) -> int:
        return len(self["step"])

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def median(self, column: str) -> float:
        """Over the steps where it is known; nan if it is of none."""
        known = self[column][np.isfinite(self[column])]
        return float(np.median(known)) if len(known) else np.nan

    def row(self, index: int) -> dict:
        """The whole row of a step by its place in the columns."""
        with (self.folder / "metrics.jsonl").open("rb") as f:
            f.seek(int(self["offset"][index]))
            return json.loads(f.readline())


def read_run(folder: Path) -> RunLog:
    """Raises ValueError naming what is missing or wrong, and its cure."""
    path = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise ValueError(f"{folder}: {'a file' if folder.exists() else 'no such folder'}; give the "
                         "run.dir of a run")
    if not path.is_file():
        raise ValueError(f"{folder}: no metrics.jsonl in it; give the run.dir of a run, which "
                         "writes its first line after its first step or validation")
    rows, validations, cut = _read(path)
    attempts = read_attempts(folder)  # they also have versions, host and data
    columns, restarts = _rows_that_count(dict(zip(COLUMNS, rows.T, strict=True)))
    shown = {step for step, _ in restarts}
    restarts += [(step, 0) for step in _restarts(attempts) if step not in shown]
    return RunLog(
        folder, _measured_in_place(columns),
        np.array(sorted(validations.items()), float).reshape(-1, 2), sorted(restarts),
        read_rows(folder / "quarantine.jsonl"), read_rows(folder / SAMPLES),
        _read_ledgers(folder / LEDGERS),
        attempts[-1]["settings"] if attempts else {},
        _changes(attempts), cut, path.stat().st_mtime, _failed(folder, attempts))


def _read(path: Path) -> tuple[np.ndarray, dict[int, float | None], bool]:
    """(rows x COLUMNS, step -> validation loss, whether the file ends within a line)."""
    rows, validations, cut, offset = [], {}, False, 0
    with path.open("rb") as f:
        for line in f:
            if cut := not line.endswith(b"\n"):
                break
            try:
                row = from_json(line)
                version = row["schema"]
                if version == SCHEMA_VERSION and "validation_loss" in row:
                    validations[row["step"]] = row["validation_loss"]  # a later one counts
                elif version == SCHEMA_VERSION:
                    if rows and row["step"] <= rows[-1][1]:  # it went back: see _rows_that_count
                        validations = {s: v for s, v in validations.items() if s <= row["step"]}
                    rows.append(_numbers(offset, row))
            except (ValueError, KeyError, TypeError) as e:
                raise ValueError(f"{path}: what begins at byte {offset} is no line of a run's log "
                                 f"({type(e).__name__}: {e}); give the run.dir of a run, or delete "
                                 "that line") from None
            if version != SCHEMA_VERSION:
                raise ValueError(f"{path}: schema {version}, this version reads {SCHEMA_VERSION}; "
                                 "use the version of orchmllm that wrote the run")
            offset += len(line)
    return np.array(rows, float).reshape(-1, len(COLUMNS)), validations, cut


def _numbers(offset: int, row: dict) -> tuple[float | None, ...]:
    """In the order of COLUMNS; None, and what not every run logs, becomes nan."""
    phases, times = row["phases"], row["measured"]
    return (offset, row["step"], *[row.get(name) for name in NUMBERS],
            *[phases.get(p, {}).get(name) for p in EVERY_PHASE for name in PHASE_METRICS],
            *(_measured_numbers(times) if times else NOTHING_MEASURED))


def _measured_numbers(times: dict) -> list[float]:
    imbalance, slowest, who = times["imbalance"], times["slowest_s"], times.get("slowest", {})
    gain = times.get("gain") or {}
    out = [times["step"], slowest["exchange"], *(gain.get(name, np.nan) for name in Gain._fields)]
    for p in EVERY_PHASE:
        out += [imbalance.get(p, np.nan), slowest.get(p, np.nan),
                who[p]["rank"] if p in who else np.nan]
    return out


def _rows_that_count(columns: dict[str, np.ndarray]
                ) -> tuple[dict[str, np.ndarray], list[tuple[int, int]]]:
    """The rows that count, and where the run went back: it gave up all that it had done from there
    on, also what it has not done again yet."""
    step = columns["step"]
    back = np.flatnonzero(np.diff(step) < 1) + 1  # a gap: rows that were lost on a full disk
    restarts = [(int(step[i]), int(step[i - 1] - step[i] + 1)) for i in back]
    lowest_later = np.append(np.minimum.accumulate(step[::-1])[-2::-1], np.inf)
    keep = np.flatnonzero(step < lowest_later)
    return {name: values[keep] for name, values in columns.items()}, restarts


def _measured_in_place(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """On a GPU a row has the times of the step before: they move there."""
    step, of = columns["step"], columns["measured.step"]
    known = np.flatnonzero(np.isin(of, step))
    place = np.searchsorted(step, of[known])
    out = dict(columns)
    for name, values in columns.items():
        if "measured." in name or name == "exchange.slowest_s":
            out[name] = np.full(len(step), np.nan)
            out[name][place] = values[known]
    out["measured.at"] = np.full(len(step), np.nan)  # place of the row that has them
    out["measured.at"][place] = known
    return out


def _restarts(attempts: list[dict]) -> list[int]:
    """The steps at which attempts went on from one that had not finished."""
    return [now["resumed_from"]["step"] for before, now in pairwise(attempts)
            if now.get("resumed_from") and before.get("ended") != "finished"]


def _read_ledgers(path: Path) -> list[dict]:
    """Raises ValueError for a file that is cut off."""
    try:
        return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    except ValueError as e:
        raise ValueError(f"{path} is damaged ({e}): delete it; the report then does not show where "
                         "rows of the data went") from e


def _failed(folder: Path, attempts: list[dict]) -> str:
    """How the last of them ended; "" where it is done or stopped by a signal, or still runs."""
    ended = attempts[-1].get("ended") if attempts else "finished"
    if ended is None:
        return "" if is_locked(folder) else (
            "it was started, and no end is recorded: it was killed, or its machine failed")
    by_signal = ended.startswith(("Stopped: ", "KeyboardInterrupt: "))
    return "" if by_signal or ended == "finished" else f"it ended with an error ({ended})"


def _changes(attempts: list[dict]) -> list[tuple[int, str]]:
    """By step; a change that was given up when the run went back behind it is left out."""
    found, later = [], math.inf
    for attempt in reversed(attempts):
        start = attempt.get("resumed_from") or {"step": 0, "changed": {}}
        if start["changed"] and start["step"] < later:
            found.append((start["step"], describe_changes(start["changed"])))
        later = min(later, start["step"])
    return found[::-1]
