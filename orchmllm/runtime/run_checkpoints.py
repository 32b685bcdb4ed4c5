"""What of a run its checkpoints hold, beside the tensors of model and optimizer, and how a run goes
on from one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import RowGather
from orchmllm.config.job import Job
from orchmllm.config.recipe import Recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.sampler import lengths_digest
from orchmllm.plan.assign import PHASES
from orchmllm.runtime.checkpoint import Checkpointer, CheckpointError
from orchmllm.runtime.lineage import candidates, list_saved, read_saved
from orchmllm.runtime.resumable import check_resumable, resume_keys
from orchmllm.runtime.run_state import NonFiniteError, Progress


def kept_batch(recipe: Recipe, gather: Callable) -> int:
    """Examples a step of the run that will be resumed, 0 where there is none. Collective: rank 0
    looks, and what is wrong with a checkpoint is said when it is resumed. gather: values of every
    rank."""
    if recipe.run.resume == "never":
        return 0
    return int(gather([_kept_batch(recipe) if dist.get_rank() == 0 else 0])[0, 0])


def _kept_batch(recipe: Recipe) -> int:
    """By the newest checkpoint whose state can be read; those that led to it have the same."""
    start = recipe.run.resume
    with suppress(OSError):
        saved = list_saved(recipe.run.folder / "checkpoints")
        for one in candidates(saved, None if start == "auto" else read_saved(Path(start))):
            with suppress(OSError, ValueError, LookupError, TypeError):
                state = json.loads((one.path / "state.json").read_text(encoding="utf-8"))
                return int(state["global_batch_size"])
    return 0


def _describe_data(recipe: Recipe, dataset: ConversationDataset) -> dict:
    """What is recorded of the data, with the lengths that capped mini-batches follow from."""
    capped = recipe.data.batching == "capped"
    return dataset.fingerprint() | ({"lengths": lengths_digest(dataset)} if capped else {})


class RunCheckpoints(Checkpointer):
    """The checkpoints of one run. tensors: returns what is saved, and filled from a checkpoint, of
    any shapes; optimizer: its count of steps becomes that of the run. Construction and every method
    are collective; see Checkpointer."""

    def __init__(self, job: Job, gather: RowGather, dataset: ConversationDataset,
                 optimizer: torch.optim.Optimizer, tensors: Callable[[], Mapping[str, Tensor]],
                 log: Callable[[str], None]) -> None:
        recipe = job.recipe
        super().__init__(
            recipe.run.folder / "checkpoints", recipe.checkpoint, gather, log=log,
            timeout_s=recipe.launch.timeout_s,
            writers=list(range(job.shard_size)))
        self._recipe, self._optimizer, self._tensors = recipe, optimizer, tensors
        self._model = resume_keys(recipe)["model"]
        # The data that the run has opened, whatever becomes of the files until a save.
        self._data = self._from_first("of the data", lambda: _describe_data(recipe, dataset))

    def save_run(self, progress: Progress) -> None:
        """A checkpoint of the steps done so far; none with checkpoint.every_steps=-1."""
        if self.config.every_steps < 0:
            return
        self.save(progress.step, self._tensors(), {
            **progress.to_json(), **resume_keys(self._recipe), "model": self._model,
            "world_size": self._gather.world_size, "data": self._data,
            "rng": torch.get_rng_state().tolist()})  # of the CPU: nothing draws per rank

    def newest(self) -> Path | None:
        """The newest checkpoint of the run, that of a save in progress included."""
        self.wait()
        return self.saved

    def rescue(self, progress: Progress) -> NoReturn:
        """Saves the steps done so far in a new folder beside run.dir, which another run has taken;
        raises AgreedError, which tells how to go on from there."""
        try:
            self.wait()
        except CheckpointError as e:  # the other run may delete what was being saved
            self._log(f"warning: {e}")
        folder = Path(self._from_first("rescue", lambda: (  # of rank 0: only its run's name counts
            f"{self._recipe.run.folder.absolute()}.rescued_step_{progress.step}_{self._line.run}")))
        self.root = folder / "checkpoints"
        self.save_run(progress)
        self.wait()
        raise AgreedError(
            f"run.dir: {self._recipe.run.dir} was taken over by another run, so this one stopped "
            f"after step {progress.step}; " + (
                "nothing was saved (checkpoint.every_steps=-1)" if self.config.every_steps < 0 else
                f"its state is in {folder}: run.dir={folder} run.resume=auto goes on from there"))

    def resume(self) -> Progress | None:
        """Starts where the recipe says; None from scratch. Raises CheckpointError or ValueError on
        all ranks."""
        start = self._recipe.run.resume
        if start == "never":
            return None
        path, state = self.find(start)
        if path is None:
            return None
        check_resumable(state, self._recipe, self._data)
        for part in PHASES:  # `pretrained` may be left empty now, but an export asks for it
            started = state["model"][part].get("pretrained", "")
            self._model[part]["pretrained"] = self._model[part]["pretrained"] or started
        progress, was = self._load_run(path, state), state["world_size"]
        ranks = "" if was == self._gather.world_size else (
            f" (saved on {was} ranks, now {self._gather.world_size}; still "
            f"{progress.global_batch_size} examples a step)")
        self._log(f"resuming at step {progress.step} from {path}{ranks}")
        if start != "auto" and Path(start) != path:
            self._log(f"this run branched off at {start} before, so it goes on with what it saved "
                      "since; to branch there once more, choose another run.dir")
        return progress

    def roll_back(self, progress: Progress, bad_step: int) -> Progress:
        """Back to the last checkpoint; `bad_step` will be skipped when it comes again. Raises
        NonFiniteError where there is none."""
        self.wait()
        path, state = self.find("auto", own=True)
        if path is None:
            raise NonFiniteError(f"step {bad_step}: loss or gradient is not finite, and there is "
                                 "no checkpoint yet to roll back to")
        back = self._load_run(path, state)
        back.nonfinite_in_a_row = progress.nonfinite_in_a_row
        back.skip = sorted({*back.skip, *progress.skip, bad_step})
        self._log(f"rolled back to step {back.step}; step {bad_step} will be skipped")
        return back

    def _load_run(self, path: Path, state: dict) -> Progress:
        self.load(path, self._tensors())
        progress = Progress.from_json(state)
        for of_parameter in self._optimizer.state.values():
            of_parameter["step"].fill_(progress.optimizer_steps)
        torch.set_rng_state(torch.tensor(state["rng"], dtype=torch.uint8))
        return progress
