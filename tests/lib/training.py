"""Runs of the trainer inside a rank of `run_ranks`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from orchmllm.config.recipe import Recipe
from orchmllm.runtime.display import RunDisplay
from orchmllm.trainer import Trainer


def listened() -> list[str]:
    """What all runs of this process say from now on, beside their progress; on every rank."""
    said: list[str] = []
    RunDisplay.note = lambda _, text: said.append(text)
    return said


def size_of_weights(model: nn.Module) -> float:
    """The sum of their absolute values, in one collective of all ranks."""
    sums = [p.detach().to_local().double().abs().sum() for p in model.parameters()]
    total = torch.stack(sums).sum()
    dist.all_reduce(total)
    return float(total)


def train(world, run: Recipe, dataset=None, on_step: Callable | None = None) -> list[dict]:
    """Trains to the end of the recipe; returns the rows of metrics. dataset: instead of the
    recipe's; on_step: see Trainer."""
    trainer = Trainer(run, world, dataset=dataset, on_step=on_step)
    try:
        rows: list[dict] = []
        trainer.run(rows)
        return rows
    finally:
        trainer.close()


def watched(world, run: Recipe, of_step: Callable, stop_after: int = -1, dataset=None) -> list:
    """What of_step(step, row of metrics) says of every step that is trained. stop_after: the step
    after which an error ends the run; -1: none."""
    found: list = []

    def record(step, row: dict) -> None:
        found.append(of_step(step, row))
        if step.index == stop_after:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        train(world, run, dataset, on_step=record)
    return found
