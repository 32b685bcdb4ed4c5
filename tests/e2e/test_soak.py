"""Thousands of steps with random stalls: no deadlock; memory, descriptors and threads stay flat.

    python -m pytest -m slow tests/e2e/test_soak.py"""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

import psutil
import pytest

from orchmllm import BalancedDataLoader
from orchmllm.config.balance import BalanceConfig
from orchmllm.trainer import Trainer
from tests.lib.dropin import Texts, collate, token_count
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

STEPS = 3000


class Stalling(SyntheticDataset):
    """Loading now and then takes long, on any rank."""

    def load(self, i, **how):
        if random.random() < 0.002:
            time.sleep(random.random() * 0.2)
        return super().load(i, **how)


def soak(world, run) -> list[tuple[int, int, int, int]]:
    """(step, RSS in bytes, descriptors, threads) every 500 steps."""
    random.seed(world.rank)
    trainer = Trainer(run, world, dataset=Stalling())
    process, seen = psutil.Process(os.getpid()), []
    for step in trainer.loader():
        trainer.train_step(step)
        if random.random() < 0.005:
            time.sleep(random.random() * 0.1)
        if (step.index + 1) % 500 == 0:
            seen.append((step.index + 1, process.memory_info().rss, process.num_fds(),
                         process.num_threads()))
    return seen


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_flat_over_3000_steps(num_workers):
    base = recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=1))
    run = replace(base, data=replace(base.data, prefetch=2, num_workers=num_workers),
                  fsdp=replace(base.fsdp, param_dtype="float32"),
                  train=replace(base.train, num_steps=STEPS, batch_size=1))
    for seen in run_ranks(soak, 2, run, timeout_s=3500):
        print(seen)
        (_, rss, fds, threads), last = seen[1], seen[-1]  # after 1000 steps everything is warm
        assert last[0] == STEPS
        assert last[1] - rss < 0.03 * rss, seen
        for _, _, f, t in seen[1:-1]:
            assert abs(f - fds) <= 2 and abs(t - threads) <= 2, seen
        # At the last step prefetching has ended, and with it its thread and its workers' pipes.
        assert last[2] - fds <= 2 and last[3] - threads <= 2, seen


class StallingTexts(Texts):
    def __getitem__(self, i):
        if random.random() < 0.0005:
            time.sleep(random.random() * 0.1)
        return super().__getitem__(i % 997)


def drop_in(world, num_steps: int) -> list[tuple[int, int, int, int]]:
    """Examples move every step; (step, RSS in bytes, descriptors, threads) every tenth of them."""
    random.seed(world.rank)
    loader = BalancedDataLoader(StallingTexts(4 * 3 * num_steps), 3, collate_fn=collate,
                                length_fn=token_count, policy="greedy")
    process, seen = psutil.Process(os.getpid()), []
    for k, _ in enumerate(loader, 1):
        if random.random() < 0.002:
            time.sleep(random.random() * 0.05)
        if k % (num_steps // 10) == 0:
            seen.append((k, process.memory_info().rss, process.num_fds(), process.num_threads()))
    return seen


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_drop_in_is_flat_over_5000_steps():
    for seen in run_ranks(drop_in, 4, 5000, timeout_s=3500):
        print(seen)
        (_, rss, fds, threads), last = seen[2], seen[-1]
        assert last[0] == 5000
        assert last[1] - rss < 0.03 * rss, seen
        # At the last step prefetching has ended, and with it its thread and its workers' pipes.
        assert max(s[2] for s in seen) - fds <= 2 and max(s[3] for s in seen) - threads <= 2, seen
