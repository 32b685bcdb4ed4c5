"""What of a run its checkpoints hold, beside the tensors of model and optimizer, and how a run goes
on from one of them."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import RowGather
from orchmllm.config.job import Job
from orchmllm.data.dataset import ConversationDataset
from orchmllm.runtime.attempts import read_attempts, recorded, settings_of
from orchmllm.runtime.checkpoint import Checkpointer, CheckpointError, waited_for
from orchmllm.runtime.init_from import mismatch, other_kind
from orchmllm.runtime.lineage import START_CURE, start_of
from orchmllm.runtime.preflight import SPARE_BYTES
from orchmllm.runtime.profile import exhausted_before
from orchmllm.runtime.resumable import (
    check_resumable,
    class_of,
    describe_changes,
    describe_end,
    differences,
)
from orchmllm.runtime.run_state import VERSION, NonFiniteError, Progress
from orchmllm.runtime.shards import fill


class RunCheckpoints(Checkpointer):
    """The checkpoints of one run, and which of them this attempt goes on from. tensors: gives what
    is saved, and filled from a checkpoint, of any shapes; optimizer: gives the one whose count of
    steps becomes that of the run; neither is asked by the construction. weights: fingerprint of
    those that the run starts from. Construction and every method are collective; see Checkpointer.
    Raises CheckpointError or ValueError on all ranks if the run cannot go on where the recipe says.

    kept_batch: examples a step of the checkpoint, 0 without one. memory: what the run knows of its
    memory, at first what the checkpoint says, and the run folder of memory that ran out; it is
    saved as it is then."""

    def __init__(self, job: Job, gather: RowGather, dataset: ConversationDataset,
                 optimizer: Callable[[], torch.optim.Optimizer],
                 tensors: Callable[[], Mapping[str, Tensor]], log: Callable[[str], None],
                 weights: int = 0) -> None:
        recipe = job.recipe
        super().__init__(
            recipe.run.folder / "checkpoints", recipe.checkpoint, gather, log=log,
            writers=list(range(job.shard_size)))
        self._recipe, self._optimizer, self._tensors = recipe, optimizer, tensors
        self._saved_at, self._first = time.monotonic(), 0  # of this start: its first step
        # Of the data as the run has opened it, whatever becomes of the files until a save.
        settings = self._from_first("of the data", lambda: settings_of(
            job, dataset, weights))
        last = self._from_first("of the attempts", lambda: read_attempts(recipe.run.folder)[-1:])
        self._attempt = {
            "attempt": 1 + max((a["attempt"] for a in last), default=0), "resumed_from": None,
            "changed": differences(last[0]["settings"], settings) if last else {},
            "settings": settings}
        self._start, self._state = (None, {}) if recipe.run.resume == "never" else (
            self.find(self._from_first("of run.resume", lambda: recipe.run.start)))
        self.kept_batch = self._state.get("global_batch_size", 0)
        self.memory = {**self._state.get("memory", {}), "ran_out": self._from_first(
            "of its memory", lambda: exhausted_before(recipe.run.folder))}
        if self._start is not None:
            self._attempt |= self._going_on(self._start, self._state)
        elif recipe.run.init_from:
            self._attempt["init_from"] = self._starting_from(Path(recipe.run.init_from))

    def save_run(self, progress: Progress, *, optional: bool = False) -> None:
        """A checkpoint of the steps done so far; none with checkpoint.every_steps=-1. optional:
        one that cannot be written is told, not raised."""
        if self.config.every_steps < 0:
            return
        self._saved_at = time.monotonic()
        state = {
            **progress.to_json(), "model": asdict(self._recipe.model), "memory": self.memory,
            "attempt": self._attempt, "world_size": self._gather.world_size,
            "rng": torch.get_rng_state().tolist()}  # of the CPU: nothing draws per rank
        self.save(progress.step, self._tensors(), state, optional)

    def is_due(self) -> bool:
        """On rank 0: whether checkpoint.every_minutes have gone by without a save, and the disk has
        room for this one and for that of the end. False on the other ranks, which are told."""
        minutes = self.config.every_minutes
        if self.rank or self.config.every_steps < 0 or not minutes or (
                time.monotonic() - self._saved_at < 60 * minutes):
            return False
        try:
            free = shutil.disk_usage(self._recipe.run.folder).free
        except OSError:  # the folder was deleted: a save makes it again, or tells what is wrong
            return True
        needed = sum(t.numel() * t.element_size() for t in self._tensors().values())  # of all ranks
        if free >= 2 * needed + SPARE_BYTES:
            return True
        self._saved_at = time.monotonic()
        self._log(f"warning: no checkpoint after {minutes:g} minutes (checkpoint.every_minutes): "
                  f"the {free / 1e9:.3g} GB that are free are kept for that of the end")
        return False

    def keep(self, progress: Progress, error: AgreedError) -> None:
        """Before an error of all ranks ends the run: saves the steps that were done since it
        started, and tells in the error's text where the run can go on. What fails here is told,
        the error is raised nevertheless."""
        if error.saves and progress.step != self._first:
            try:
                self.save_run(progress)
                self.wait()
            except CheckpointError as e:
                self._log(f"warning: {e}")
        if self.saved is not None:
            where, _, then = describe_end(self.saved, self._recipe.run.resume).partition("; ")
            error.args = (f"{error}; checkpoint: {where}; once this is mended, {then}",)

    def rescue(self, progress: Progress) -> NoReturn:
        """Saves the steps done so far in a new folder beside run.dir, which another run has taken;
        raises AgreedError, which tells how to go on from there."""
        self.settle()  # the other run may delete what was being saved
        folder = Path(self._from_first("rescue", lambda: (  # of rank 0: only its run's name counts
            f"{self._recipe.run.folder.absolute()}.rescued_step_{progress.step}_{self._line.run}")))
        self.root = folder / "checkpoints"
        self.save_run(progress)
        self.wait()
        error = AgreedError(
            f"run.dir: {self._recipe.run.dir} was taken over by another run, so this one stopped "
            f"after step {progress.step}; " + (
                "nothing was saved (checkpoint.every_steps=-1)" if self.config.every_steps < 0 else
                f"its state is in {folder}: run.dir={folder} run.resume=auto goes on from there"))
        error.saves, self.saved = False, None
        raise error

    def attempt(self, *, trains: bool) -> AbstractContextManager[Callable[[str], None] | None]:
        """Within it the attempt runs: its start and its end are recorded in the run folder, unless
        it has nothing to do; see recorded. trains: whether a step is left."""
        writes = trains and self.rank == 0
        return recorded(self._recipe.run.folder, self._attempt) if writes else nullcontext()

    def _going_on(self, path: Path, state: dict) -> dict:
        """What the attempt records of the checkpoint that it goes on from. Raises ValueError if it
        may not."""
        if state.get("version") != VERSION:
            raise ValueError(f"the checkpoint's state has version {state.get('version')}, this "
                             f"code reads {VERSION}")
        before = attempt_of(path, state)
        changed = check_resumable(before["settings"], self._attempt["settings"],
                                  state["global_batch_size"])
        return {"attempt": max(self._attempt["attempt"], 1 + before["attempt"]), "resumed_from": {
            "checkpoint": str(path), "step": state["step"], "attempt": before["attempt"],
            "changed": changed}}

    def _starting_from(self, folder: Path) -> dict:
        """What the attempt records of the checkpoint that run.init_from names. Raises
        CheckpointError if it cannot be used."""
        path = Path(self._from_first("of run.init_from", lambda: str(start_of(folder).path)))
        if problem := self._verify(path):
            raise CheckpointError(f"run.init_from: {path} is no complete checkpoint ({problem}): "
                                  f"{START_CURE}")
        state = json.loads(self._from_first(path.name, (path / "state.json").read_text))
        if problem := other_kind(path, state["model"], self._recipe.model):
            raise CheckpointError(problem)
        before = attempt_of(path, state)
        changed = differences(before["settings"], self._attempt["settings"])
        if "model.weights" in changed:
            raise CheckpointError(f"run.init_from: {path} has adapters of other weights than those "
                                  "in the folder of model.pretrained: name the folder of that run")
        return {"checkpoint": str(path), "step": state["step"], "attempt": before["attempt"],
                "changed": {key: pair for key, pair in changed.items()
                            if class_of(key) not in ("start", "init")}}

    def _start_anew(self) -> None:
        """Reads the weights of run.init_from, if the recipe says so."""
        if "init_from" not in self._attempt:
            return
        start = self._attempt["init_from"]
        path = Path(start["checkpoint"])
        parameters = {name: tensor for name, tensor in self._tensors().items()
                      if name.startswith("model.")}
        if problem := self._from_first(path.name, lambda: mismatch(path, parameters)):
            raise CheckpointError(problem)
        self._together(path.name, lambda: fill(path, parameters))
        self._log(f"starting with the weights of {path}; optimizer, steps and the order of the "
                  "data start anew")
        if start["changed"]:
            self._log(f"changed since those: {describe_changes(start['changed'])}")

    def resume(self) -> Progress | None:
        """Starts where the recipe says; None from scratch, or with the weights of run.init_from.
        Raises CheckpointError on all ranks."""
        start, path, state = self._recipe.run.resume, self._start, self._state
        if path is None:
            self._start_anew()
            return None
        if self._recipe.run.init_from:
            self._log(f"run.init_from={self._recipe.run.init_from} gave the weights at the start "
                      "of this run, and is not read again")
        progress, was = self._load_run(path, state), state["world_size"]
        self._first = progress.step
        ranks = "" if was == self._gather.world_size else (
            f" (saved on {was} ranks, now {self._gather.world_size}; still "
            f"{progress.global_batch_size} examples a step)")
        self._log(f"resuming at step {progress.step} from {path}{ranks}")
        if changed := self._attempt["resumed_from"]["changed"]:
            self._log(f"changed since the checkpoint: {describe_changes(changed)}")
        if start != "auto" and Path(start) != path:
            self._log(f"this run branched off at {start} before, so it goes on with what it saved "
                      "since; to branch there once more, choose another run.dir")
        return progress

    def roll_back(self, progress: Progress, bad_step: int) -> Progress:
        """Back to the last checkpoint; `bad_step` will be skipped when it comes again. Raises
        NonFiniteError where there is none."""
        self.settle()
        with waited_for():
            path, state = self.find("auto", own=True)
            if path is None:
                raise NonFiniteError(f"step {bad_step}: loss or gradient is not finite, and there "
                                     "is no checkpoint yet to roll back to")
            back = self._load_run(path, state)
        back.nonfinite_in_a_row = progress.nonfinite_in_a_row
        back.skip = sorted({*back.skip, *progress.skip, bad_step})
        self._log(f"rolled back to step {back.step}; step {bad_step} will be skipped")
        return back

    def _load_run(self, path: Path, state: dict) -> Progress:
        self.load(path, self._tensors())
        progress = Progress.from_json(state)
        for of_parameter in self._optimizer().state.values():
            of_parameter["step"].fill_(progress.step - progress.skipped_steps)
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))
        return progress


def attempt_of(path: Path, state: Mapping) -> dict:
    """The attempt that saved a checkpoint. Raises CheckpointError where none was recorded."""
    found = state.get("attempt", {})
    if "settings" not in found:
        raise CheckpointError(f"checkpoint {path}: its state.json records no attempt, so it is "
                              "older than 0.1.0: set run.resume=never, or name another checkpoint")
    return found
