"""What a rank's process holds of the host's memory, and gives back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchmllm.runtime.host_memory import TRIM_EVERY
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.training import train

pytestmark = pytest.mark.dist
FREED_GB = 0.2


stays: list[torch.Tensor] = []


def leave_freed_memory(step, row) -> None:
    """Frees tensors between others that stay, so that glibc keeps their memory."""
    if step.index == 1:
        parts = [torch.ones(4000) for _ in range(int(FREED_GB * 1e9 / 16_000))]
        stays.extend(parts[::100])


def memory_of_steps(world, folder: Path) -> list[float]:
    run = recipe()
    run = replace(run, run=replace(run.run, dir=str(folder)),
                  train=replace(run.train, num_steps=TRIM_EVERY + 2))
    rows = train(world, run, SyntheticDataset(), leave_freed_memory)
    return [row["host_memory_gb"] for row in rows]


def test_freed_memory_goes_back_to_the_system(tmp_path):
    (held,) = run_ranks(memory_of_steps, 1, tmp_path)
    assert held[TRIM_EVERY] - held[1] > 0.8 * FREED_GB
    assert held[TRIM_EVERY] - held[TRIM_EVERY + 1] > 0.8 * FREED_GB
