"""Checkpoints that are either complete or not there, and can be read on any number of ranks.

A checkpoint is a folder `step_00000042` with sharded safetensors (torch's Hugging Face storage),
state.json and manifest.json (size and SHA-256 of every file, and which save of which run it is: see
orchmllm.runtime.lineage). It is staged under another name and renamed when all ranks' files are on
disk; `latest` names the one saved last. Nothing is pickled, and nothing but safetensors and JSON is
read.

Save: copy to CPU -> (thread) write shards -> fsync -> hash -> agree -> manifest -> rename a folder
of that name out of the way -> rename -> pointer -> set other runs' checkpoints aside -> retention.
Restore: newest first, verify against the manifest, fall back to the one before in the same run.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from orchmllm.batch import on_this_device
from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.runtime.files import fsync, identify, write_text
from orchmllm.runtime.host_copies import HostCopies
from orchmllm.runtime.lineage import (
    VERSION,
    candidates,
    clear_leftovers,
    delete,
    line_after,
    list_saved,
    new_line,
    next_sequence,
    problem_of,
    read_saved,
    set_aside,
    surplus,
)
from orchmllm.runtime.shards import fill, local_parts, write_shard

THREAD = "orchmllm-checkpoint"  # that a save is written in


class CheckpointError(AgreedError):
    """A checkpoint that could not be written or used; raised on all ranks."""

    saves = False


@contextmanager
def waited_for() -> Iterator[None]:
    """Within it the watchdog waits for this thread as for one that saves: a checkpoint is read for
    as long as its disk takes (see orchmllm.runtime.health)."""
    thread = threading.current_thread()
    name, thread.name = thread.name, THREAD
    try:
        yield
    finally:
        thread.name = name


class Checkpointer:
    """Saves and restores one run's checkpoints; construction and every method are collective.

    root: folder of the checkpoints, on storage that all ranks see. gather: CPU groups used by
    nobody else (the saving thread owns them while it runs). writers: ranks that hold all shards
    (with hybrid sharding one replica; default all). log: told what is saved, and what is renamed
    out of the way. `saved`: the newest checkpoint of the run, None before there is one.

    What is saved belongs to a run of its own, and to that of a checkpoint once it was loaded.
    """

    def __init__(
        self, root: Path, config: CheckpointConfig, gather: RowGather, *,
        writers: list[int] | None = None, log: Callable[[str], None] = print,
    ) -> None:
        self.root, self.config, self._gather = root, config, gather
        # Rank 0's counts: only that rank looks at them. sequence: of the save before.
        self._line, self._sequence = new_line(), 0
        self.saved: Path | None = None
        self._named: Path | None = None  # the checkpoint that the user asked for: stays
        self._problems: dict[Path, str] = {}  # of what was verified; the same on all ranks
        self.rank = gather.rank
        self._log = log if self.rank == 0 else lambda text: None
        self._writers = writers or list(range(gather.world_size))
        self._number = 1 + self.rank % len(self._writers)  # of the file that has this rank's parts
        self._copies = HostCopies()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict,
             optional: bool = False) -> None:
        """Saves `tensors` (DTensors or equal on all ranks) and the JSON-able `state`; returns when
        copies are made if the configuration says so. The tensors may have any shapes. optional: is
        told, not raised, where it fails. After a save that failed this one has to succeed: it is
        not optional, and is waited for. Raises CheckpointError where it fails before it returns."""
        started = time.perf_counter()
        before = self.settle()
        optional = optional and not before
        parts, copied = local_parts(tensors, self.rank == self._writers[0]) if (
            self.rank in self._writers) else {}, None
        try:
            if self.config.asynchronous:
                parts, copied = self._together(step, lambda: self._copies.make(parts))
            self._thread = threading.Thread(
                target=on_this_device(self._run), name=THREAD, daemon=True,
                args=(step, tensors, parts, copied, json.dumps(state, sort_keys=True), optional))
            self._held_s, self._started = time.perf_counter() - started, started
            self._thread.start()
            if before or not self.config.asynchronous:
                self.wait()
        except CheckpointError as e:
            if not optional:
                raise CheckpointError(f"{e}{before}") from e
            self._log(f"warning: {e}; the run goes on")

    def wait(self) -> None:
        """Until the save in progress is complete. Raises its CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def settle(self) -> str:
        """Until the save in progress is complete. Where it failed, that is told, not raised, and
        returned as the end of the next one's error, else ''."""
        try:
            self.wait()
        except CheckpointError as e:  # on all ranks
            self._log(f"warning: {e}")
            return f"; the save before failed as well: {e}"
        return ""

    def _run(self, step: int, tensors: Mapping[str, Tensor], parts: dict[str, Tensor],
             copied: torch.cuda.Event | None, state: str, optional: bool) -> None:
        try:
            if copied is not None:
                copied.synchronize()
            self._save(step, tensors, parts, state)
        except BaseException as e:  # raised by the next wait(), in the training thread
            if optional and isinstance(e, CheckpointError):  # on all ranks
                self._log(f"warning: {e}; the run goes on")
            else:
                self._error = e

    def _save(self, step: int, tensors: Mapping[str, Tensor], parts: dict[str, Tensor],
              state: str) -> None:
        """tensors: as they train, for their shapes alone. parts: what is written of them."""
        final, staged = (self.root / f"{prefix}step_{step:08d}" for prefix in ("", ".staged_"))
        if self._from_first(step, lambda: self._line.holds(read_saved(final))) and (
                not self._verify(final)):
            self.saved = final
            return self._log(f"checkpoint {final} is there already and sound: not saved again")
        self._together(step, lambda: self._stage(staged))
        files = self._together(step, lambda: self._write(staged, tensors, parts))
        saved, hashes = zip(*map(json.loads, gather_texts(self._gather, json.dumps(
            [sum(part.numel() for part in parts.values()), files]))), strict=True)
        if sum(saved) != (whole := sum(x.numel() for x in tensors.values())):
            raise CheckpointError(f"checkpoint {step}: the parts of all ranks have {sum(saved)} "
                                  f"numbers, and the tensors {whole}: nothing was saved")
        self._together(step, lambda: self._publish(
            step, staged, final, {k: v for h in hashes for k, v in h.items()}, state))
        self._problems[final], self.saved = "", final
        self._retain(step)
        took_s = time.perf_counter() - self._started
        held_s = self._held_s if self.config.asynchronous else took_s
        self._log(f"saved step {step}: {final} ({took_s:.1f} s, training waited {held_s:.2f} s)")

    def _stage(self, staged: Path) -> None:
        if self.rank == 0:
            clear_leftovers(self.root)
            staged.mkdir(parents=True)

    def _write(self, staged: Path, tensors: Mapping[str, Tensor],
               parts: dict[str, Tensor]) -> dict[str, dict]:
        """Writes this rank's parts -> {file: its size and hash}, or nothing without parts."""
        if not parts:
            return {}
        staged.mkdir(exist_ok=True)  # the file system of another node may not show it yet
        path = write_shard(staged, self._number, tensors, parts)
        fsync(path)
        return {path.name: identify(path)}

    def _publish(
        self, step: int, staged: Path, final: Path, files: dict[str, dict], state: str
    ) -> None:
        if self.rank != 0:
            return
        # What this run saved before may have been moved elsewhere.
        saved = list_saved(self.root)
        self._sequence = max(next_sequence(saved), self._sequence + 1)
        write_text(staged / "state.json", state)
        files["state.json"] = identify(staged / "state.json")
        write_text(staged / "manifest.json", json.dumps(
            {"version": VERSION, "step": step, "world_size": self._gather.world_size,
             "run": self._line.run, "sequence": self._sequence,
             "ancestors": self._line.ancestors, "files": files}, indent=1, sort_keys=True))
        fsync(staged)
        if final.exists():  # of another run, or not sound
            self._set_aside(final)
        os.rename(staged, final)
        fsync(self.root)
        write_text(self.root / ".latest", final.name)
        os.rename(self.root / ".latest", self.root / "latest")
        fsync(self.root)
        for other in saved:
            if not (other.is_aside or self._line.holds(other)) and other.path != final:
                self._set_aside(other.path)
        fsync(self.root)

    def _set_aside(self, path: Path) -> None:
        aside = set_aside(read_saved(path))
        self._log(f"warning: checkpoint {path} is of another run or branch, or damaged: it is now "
                  f"{aside}; delete it when nobody needs it")

    def _retain(self, step: int) -> None:
        """Deletes what is older than the keep_last newest sound checkpoints of the run."""
        names = self._from_first(step, lambda: [
            s.path.name for s in list_saved(self.root) if self._line.holds(s) and s.is_named_here])
        too_many = surplus(
            [self.root / name for name in names], self.config.keep_last,
            lambda path: not (
                self._problems[path] if path in self._problems else self._verify(path)))

        def drop() -> None:
            for path in map(self.root.joinpath, names if self.rank == 0 else ()):
                if path in too_many and path.resolve() != self._named:
                    delete(path, self._log)
                elif self._problems.get(path):
                    self._set_aside(path)

        self._together(step, drop)

    def find(self, where: str, *, own: bool = False) -> tuple[Path | None, dict]:
        """(folder, its state) of the newest sound checkpoint of the run (`auto`), or of those that
        were saved since a run branched off at path `where`, or else the one there; (None, {}) if
        `auto` finds none. What is wrong with newer ones is said. own: `auto` looks at what this
        process saved or started from, not at the newest of the folder.

        Raises CheckpointError on all ranks if `where` is not sound, or if the run has checkpoints
        but none of them is."""
        # Rank 0 looks: another node may not yet see what was just renamed.
        saved, paths = self._from_first(where, lambda: self._list(where, own))
        others = [p for p in saved if p not in paths]
        if where != "auto":
            self._named = Path(where).resolve()
        rejected = []
        for path in map(Path, paths):
            problem = self._verify(path)
            if not problem:
                state = json.loads(self._from_first(where, (path / "state.json").read_text))
                for line in rejected:
                    self._log(f"warning: {line}; using the one before")
                return path, state
            rejected.append(f"checkpoint {path}: {problem}")
        if rejected:
            raise CheckpointError(
                "no sound checkpoint to resume from: " + "; ".join(rejected)
                + ("; of other runs there are " + ", ".join(others) + ": give one as run.resume, or"
                   if others else ";") + " set run.resume=never to start from scratch")
        return None, {}

    def _list(self, where: str, own: bool) -> list[list[str]]:
        """[folders of all checkpoints, those that `find` tries]."""
        saved = list_saved(self.root)
        tried = candidates(saved, None if where == "auto" else read_saved(Path(where)),
                           self._line if own else None)
        return [[str(s.path) for s in group] for group in (saved, tried)]

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Fills `tensors` in place from a folder that `find` returned, whatever the number of ranks
        it was saved on. Raises CheckpointError if it lacks one or has another shape."""

        def read() -> None:
            fill(path, tensors)
            if self.rank == 0:
                start = read_saved(path)
                self._line = line_after(start, list_saved(self.root),
                                        branch=path.resolve() == self._named)
                self._sequence = max(self._sequence, start.sequence)

        self._together(path.name, read)
        self.saved = path

    def _verify(self, path: Path) -> str:
        """What is wrong with a checkpoint, '' for a sound one; every rank reads its share of it."""
        problems = gather_texts(self._gather, problem_of(path, self.rank, self._gather.world_size))
        self._problems[path] = next((p for p in problems if p), "")
        return self._problems[path]

    def _from_first(self, step: int | str, work: Callable):
        """What work() returns on rank 0 (JSON), on all ranks; raises as `_together`."""
        mine = self._together(step, lambda: work() if self.rank == 0 else None)
        return json.loads(self._gather.from_first(json.dumps(mine).encode()))

    def _together(self, step: int | str, work: Callable):
        """Runs work() on all ranks; if it fails on one, raises the same CheckpointError on all."""
        error, result = "", None
        try:
            result = work()
        except Exception as e:  # shared, then raised on all ranks
            error = f"{type(e).__name__}: {e}"
        failures = [(r, t) for r, t in enumerate(gather_texts(self._gather, error)) if t]
        if failures:
            raise CheckpointError(f"checkpoint {step}: rank {failures[0][0]} failed: "
                                  f"{failures[0][1]}; earlier checkpoints in {self.root} are "
                                  "untouched")
        return result
