"""Runs on synthetic examples that are cut off and resumed, and their checkpoints."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import CheckpointConfig, Recipe
from orchmllm.runtime.attempts import settings_of
from orchmllm.trainer import Trainer
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.training import listened

STEPS, BATCH = 8, 6  # the dataset's 24 examples are an epoch of 4 steps


def run_recipe(folder: Path, **changes) -> Recipe:
    """A checkpoint after every step. changes: keys of the checkpoint section, or train (a dict),
    num_workers and dtype."""
    base = recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=2))
    train = {"num_steps": STEPS, "lr": 1e-2, "global_batch_size": BATCH,
             **changes.pop("train", {})}
    data = {"prefetch": 2, "num_workers": changes.pop("num_workers", 0)}
    return replace(
        base, run=replace(base.run, dir=str(folder)), data=replace(base.data, **data),
        fsdp=replace(base.fsdp, param_dtype=changes.pop("dtype", "float32")),
        train=replace(base.train, **train),
        checkpoint=CheckpointConfig(**{"every_steps": 1, "keep_last": 3, **changes}))


def train_recorded(world, run: Recipe, kill_at: int | None = None) -> list[tuple]:
    """[(step, loss, example ids)] of what this call trained. kill_at: rank 0 is SIGKILLed after
    that step, before its checkpoint."""
    seen = []

    def record(step, row: dict) -> None:
        seen.append((step.index, row["loss"], step.example_ids.tolist()))
        if step.index == kill_at and world.rank == 0:
            trainer.checkpointer.wait()
            os.kill(os.getpid(), signal.SIGKILL)

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=record)
    try:
        trainer.run()
    finally:
        trainer.close()
    return seen


def settings(run: Recipe, dataset=None) -> dict:
    """What an attempt on one rank is compared by. dataset: instead of examples without files."""
    found = settings_of(resolve(run, 1, 1), SyntheticDataset() if dataset is None else dataset)
    return json.loads(json.dumps(found))


def find(world, run: Recipe) -> tuple[str, str]:
    """(folder of the checkpoint that `auto` takes, what is said of the first one that it
    rejects)."""
    said = listened()
    trainer = Trainer(run, world, dataset=SyntheticDataset())
    path, _ = trainer.checkpointer.find("auto")
    trainer.close()
    return path.name, next((x for x in said if "using the one before" in x), "")


def flip(path: Path) -> None:
    """Changes one bit of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
