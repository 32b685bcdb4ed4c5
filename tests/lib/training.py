"""Runs of the trainer inside a rank of `run_ranks`."""

from __future__ import annotations

from collections.abc import Callable

from orchmllm.config.recipe import Recipe
from orchmllm.runtime.display import RunDisplay
from orchmllm.trainer import Trainer


def listened() -> list[str]:
    """What all runs of this process say from now on, beside their progress; on every rank."""
    said: list[str] = []
    RunDisplay.note = lambda _, text: said.append(text)
    return said


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
