"""Checkpoints without training, and what a folder holds by its files alone."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch

from orchmllm.comm.exchange import RowGather
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.runtime.checkpoint import Checkpointer
from tests.lib.resume import flip


class Run:
    """What a process that trains does with its checkpoints, without the training. A checkpoint
    holds its tag. resume: as run.resume."""

    def __init__(self, root: Path, resume: str, keep_last: int) -> None:
        self.said: list[str] = []
        self.keeper = Checkpointer(
            root, CheckpointConfig(keep_last=keep_last, asynchronous=False), RowGather(8),
            log=self.said.append)
        self.start = ""
        if resume == "never":
            return
        path, state = self.keeper.find(resume)
        if path is not None:
            tensors = {"tag": torch.zeros(64, dtype=torch.uint8)}
            self.keeper.load(path, tensors)
            self.start = bytes(tensors["tag"].tolist()).rstrip(b"\0").decode()
            assert state["tag"] == self.start

    def save(self, step: int, tag: str) -> Run:
        data = torch.tensor(list(tag.encode().ljust(64, b"\0")), dtype=torch.uint8)
        self.keeper.save(step, {"tag": data}, {"tag": tag})
        return self


def sound_tags(root: Path) -> dict[str, str]:
    """folder name -> tag of what is a complete checkpoint by its files; hidden ones are not."""
    found = {}
    for folder in sorted(root.iterdir()):
        if folder.name.startswith(".") or not (folder / "manifest.json").is_file():
            continue
        files = json.loads((folder / "manifest.json").read_text())["files"]
        if all((folder / name).is_file() and hashlib.sha256(
                (folder / name).read_bytes()).hexdigest() == f["sha256"]
                for name, f in files.items()):
            found[folder.name] = json.loads((folder / "state.json").read_text())["tag"]
    return found


def live(root: Path) -> list[str]:
    return sorted(p.name for p in root.glob("step_*"))


def spoil(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        flip(path)
