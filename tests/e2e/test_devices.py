"""The threads of a run use the GPU of its rank. torch.cuda is a stand-in."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import torch

from orchmllm.runtime.display import RunDisplay
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.training import train


def threads_devices(world, folder: Path) -> dict[str, set[int]]:
    """The current GPUs of the threads of a run whose main thread has the fourth: a new thread has
    the first until it chooses another. torch.cuda is a stand-in."""
    current, seen = threading.local(), defaultdict(set)

    def note(*_) -> None:
        seen[threading.current_thread().name].add(getattr(current, "index", 0))

    class Noted(SyntheticDataset):
        def load(self, *args, **how):
            note()
            return super().load(*args, **how)

    torch.cuda.is_initialized = lambda: True
    torch.cuda.current_device = lambda: getattr(current, "index", 0)
    torch.cuda.set_device = lambda index: setattr(current, "index", index)
    torch.cuda.set_device(3)
    RunDisplay.note = note  # a save is told by the thread that writes it
    base = recipe(model=SHALLOW)
    train(world, replace(
        base, run=replace(base.run, dir=str(folder)), train=replace(base.train, num_steps=2),
        data=replace(base.data, prefetch=1)), Noted())
    return dict(seen)


def test_threads_use_the_gpu_of_their_rank(tmp_path):
    (seen,) = run_ranks(threads_devices, 1, tmp_path)
    assert seen == {name: {3} for name in (
        "MainThread", "orchmllm-prefetch", "orchmllm-checkpoint")}
