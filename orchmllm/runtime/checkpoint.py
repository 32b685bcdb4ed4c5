"""Checkpoints that are either complete or not there, and can be read on any number of ranks.

A checkpoint is a folder `step_00000042` with sharded safetensors (torch's Hugging Face storage),
state.json and manifest.json (size and SHA-256 of every file). It is staged under another name and
renamed when all ranks' files are on disk; `latest` names the newest. Nothing is pickled, and
nothing but safetensors and JSON is read.

Save: copy to CPU -> (thread) write shards -> fsync -> hash -> agree -> manifest -> rename ->
pointer -> retention. Restore: newest first, verify against the manifest, fall back to the one
before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import (
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
)

from orchmllm.comm.errors import AgreedError
from orchmllm.comm.exchange import RowGather, gather_texts
from orchmllm.config import CheckpointConfig

VERSION = 1
STAGES = ("staged", "written", "synced", "manifest", "renamed", "pointer", "retention")


class CheckpointError(AgreedError):
    """A checkpoint that could not be written or used; raised on all ranks."""


class Checkpointer:
    """Saves and restores one run's checkpoints; construction and every method are collective.

    root: folder of the checkpoints, on storage that all ranks see. gather: CPU groups used by
    nobody else (the saving thread owns them while it runs). writers: ranks that hold all shards
    (with hybrid sharding one replica; default all). on_stage: called with each of STAGES and
    the step as this rank passes it, for fault injection.
    """

    def __init__(
        self, root: Path, config: CheckpointConfig, gather: RowGather, *,
        writers: list[int] | None = None, timeout_s: float = 600.0,
        on_stage: Callable[[str, int], None] = lambda stage, step: None,
    ) -> None:
        self.root, self.config, self._gather, self._on_stage = root, config, gather, on_stage
        self.rank = gather.rank
        self._writers = writers or list(range(gather.world_size))
        # One group on every rank, for the reason given in RowGather.
        self._group = dist.new_group(
            self._writers if self.rank in self._writers else [self.rank], backend="gloo",
            timeout=timedelta(seconds=timeout_s), use_local_synchronization=True)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def save(self, step: int, tensors: Mapping[str, Tensor], state: dict) -> None:
        """Saves `tensors` (DTensors or equal on all ranks) and the JSON-able `state`; returns when
        copies are made if the configuration says so. Raises CheckpointError for a failed earlier
        save, or for this one where it is not asynchronous."""
        self.wait()
        copies = {k: t.detach().to("cpu", copy=True) for k, t in tensors.items()}
        self._thread = threading.Thread(
            target=self._run, args=(step, copies, json.dumps(state, sort_keys=True)),
            name="orchmllm-checkpoint", daemon=True)
        self._thread.start()
        if not self.config.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Until the save in progress is complete. Raises its CheckpointError."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        try:
            self._save(step, tensors, state)
        except BaseException as e:  # raised by the next wait(), in the training thread
            self._error = e

    def _save(self, step: int, tensors: dict[str, Tensor], state: str) -> None:
        final, staged = self.root / name_of(step), self.root / f".staged_{name_of(step)}"
        self._together(step, lambda: self._stage(step, staged))
        files = self._together(step, lambda: self._write(step, staged, tensors))
        hashes = [json.loads(f) for f in self._share_text(json.dumps(files))]
        self._together(step, lambda: self._publish(
            step, staged, final, {k: v for h in hashes for k, v in h.items()}, state))

    def _stage(self, step: int, staged: Path) -> None:
        if self.rank == 0:
            shutil.rmtree(staged, ignore_errors=True)  # left by a save that was cut off
            staged.mkdir(parents=True)
        self._on_stage("staged", step)

    def _write(
        self, step: int, staged: Path, tensors: dict[str, Tensor]
    ) -> dict[str, dict]:
        """Writes this rank's shards -> {file: size and hash} of them."""
        if self.rank not in self._writers:
            return {}
        dcp.save(tensors, process_group=self._group, no_dist=False,
                 storage_writer=HuggingFaceStorageWriter(str(staged), save_distributed=True))
        self._on_stage("written", step)
        mine = sorted(staged.glob(f"shard-{self._writers.index(self.rank) + 1:05d}-*"))
        for path in mine:
            _fsync(path)
        self._on_stage("synced", step)
        return {path.name: _identify(path) for path in mine}

    def _publish(
        self, step: int, staged: Path, final: Path, files: dict[str, dict], state: str
    ) -> None:
        if self.rank != 0:
            return
        _write_text(staged / "state.json", state)
        files["state.json"] = _identify(staged / "state.json")
        _write_text(staged / "manifest.json", json.dumps(
            {"version": VERSION, "step": step, "world_size": self._gather.world_size,
             "files": files}, indent=1, sort_keys=True))
        _fsync(staged)
        self._on_stage("manifest", step)
        if final.exists():  # the same step again, after a rollback or a corrupted copy
            shutil.rmtree(final)
        staged.rename(final)
        _fsync(self.root)
        self._on_stage("renamed", step)
        _write_text(self.root / ".latest", final.name)
        (self.root / ".latest").rename(self.root / "latest")
        _fsync(self.root)
        self._on_stage("pointer", step)
        for old in self.steps()[: -self.config.keep_last]:
            shutil.rmtree(self.root / name_of(old))
        self._on_stage("retention", step)

    def steps(self) -> list[int]:
        """Steps that have a complete checkpoint, ascending (soundness is checked by restore)."""
        return sorted(int(p.parent.name.removeprefix("step_"))
                      for p in self.root.glob("step_*/manifest.json"))

    def find(self, where: str) -> tuple[Path | None, dict, list[str]]:
        """(folder, its state, why newer ones were rejected) of the newest sound checkpoint of the
        run (`auto`), or of the one at path `where`; (None, {}, ...) if `auto` finds none.

        Raises CheckpointError on all ranks if `where` is not sound, or if the run has checkpoints
        but none of them is."""
        if where == "auto":
            # Rank 0 looks: another node may not yet see what was just renamed.
            listing = json.loads(self._share_text(json.dumps(self.steps()))[0])
            candidates = [self.root / name_of(s) for s in reversed(listing)]
        else:
            candidates = [Path(where)]
        rejected = []
        for path in candidates:
            problems = [p for p in self._share_text(
                problem_of(path, self.rank, self._gather.world_size)) if p]
            if not problems:
                state = json.loads((path / "state.json").read_text(encoding="utf-8"))
                return path, state, rejected
            rejected.append(f"checkpoint {path}: {problems[0]}")
        if rejected:
            raise CheckpointError("no sound checkpoint to resume from: " + "; ".join(rejected)
                                  + "; set run.resume=never to start from scratch")
        return None, {}, []

    def load(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        """Fills `tensors` in place from a folder that `find` returned, whatever the number of ranks
        it was saved on. Raises CheckpointError if it lacks one or has another shape."""

        def read() -> None:
            dcp.load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(path)))

        self._together(path.name, read)

    def _share_text(self, text: str) -> list[str]:
        return gather_texts(self._gather, text)

    def _together(self, step: int | str, work: Callable):
        """Runs work() on all ranks; if it fails on one, raises the same CheckpointError on all."""
        error, result = "", None
        try:
            result = work()
        except (Exception, CheckpointException) as e:  # shared, then raised on all ranks
            cause = _root_cause(e)
            error = f"{type(cause).__name__}: {cause}"
        failures = [(r, t) for r, t in enumerate(self._share_text(error)) if t]
        if failures:
            raise CheckpointError(f"checkpoint {step}: rank {failures[0][0]} failed: "
                                  f"{failures[0][1]}; earlier checkpoints are untouched")
        return result


def name_of(step: int) -> str:
    return f"step_{step:08d}"


def problem_of(path: Path, part: int = 0, parts: int = 1) -> str:
    """What is wrong with a checkpoint's files, of which this is share `part` of `parts`; or ''."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
        if manifest["version"] != VERSION:
            return f"manifest.json: version {manifest['version']}, this code reads {VERSION}"
        for name, recorded in sorted(manifest["files"].items())[part::parts]:
            if Path(name).name != name:
                return f"manifest.json: {name!r} is not a file name"
            if _identify(path / name) != recorded:
                return f"{name} is not what was saved (size or SHA-256 differs)"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        return f"{type(e).__name__}: {e}"
    return ""


def state_tensors(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Tensor]:
    """What has to be saved: parameters as model.NAME, Adam's moments as exp_avg.NAME and
    exp_avg_sq.NAME (created where the optimizer has not run yet). The tensors are the live ones."""
    out = {}
    for name, p in model.named_parameters():
        name = name.replace("_checkpoint_wrapped_module.", "")
        out[f"model.{name}"] = p.detach()
        if not p.requires_grad:
            continue
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        for key in ("exp_avg", "exp_avg_sq"):
            out[f"{key}.{name}"] = state[key].detach()
    return out


def _root_cause(error: BaseException) -> BaseException:
    """torch wraps errors in a CheckpointException (a BaseException) that holds all ranks' ones."""
    failures = getattr(error, "failures", None)
    if failures:
        error = next(iter(failures.values()))
        error = error[0] if isinstance(error, tuple) else error
    return error


def _identify(path: Path) -> dict:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _write_text(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def pack_rng() -> list[int]:
    """torch's CPU generator state as integers (the same on all ranks: nothing draws per rank)."""
    return torch.get_rng_state().tolist()


def unpack_rng(state: list[int]) -> None:
    torch.set_rng_state(torch.tensor(state, dtype=torch.uint8))
