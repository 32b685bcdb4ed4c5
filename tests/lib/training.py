"""Runs of the trainer inside a rank of `run_ranks`."""

from __future__ import annotations

from collections.abc import Callable

from orchmllm.config import Recipe
from orchmllm.trainer import Trainer


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
