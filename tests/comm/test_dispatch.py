"""Three ways for inputs to reach their rank, one result; and nothing to move, nothing sent."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.comm import exchange as comm
from orchmllm.config.balance import BalanceConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.plan.assign import PhasePolicy
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe

pytestmark = pytest.mark.dist


@contextmanager
def counted():
    """[calls, bytes received] of all-to-alls in the block."""
    original, seen = comm.all_to_all, [0, 0]

    def wrapped(*args):
        out = original(*args)
        seen[0] += 1
        seen[1] += out.numel() * out.element_size()
        return out

    comm.all_to_all = wrapped
    try:
        yield seen
    finally:
        comm.all_to_all = original


def batches_of_each(world, accumulation: int) -> list[tuple[list, int]]:
    return [batches(world, dispatch, accumulation) for dispatch in ("load", "bytes", "tensors")]


def batches(world, dispatch: str, accumulation: int) -> tuple[list, int]:
    data = SyntheticDataset()
    # Policies that look at home ranks plan differently for `load`: there the LLM comes first.
    greedy = PhasePolicy("greedy")
    run = recipe(balance=BalanceConfig(dispatch=dispatch, ranks_per_node=2, vision=greedy,
                                       audio=greedy, llm=greedy))
    trainer = Trainer(run, world, dataset=data)
    loader = StepLoader(data, GlobalSampler(range(24), 12, seed=1), trainer.orchestrator,
                        num_steps=3, accumulation_steps=accumulation, feed=trainer._feed)
    out = []
    with counted() as seen:
        for step in loader:
            for micro in step.micro:
                out.append([step.num_global_targets])
                loader.orchestrator.dispatch(micro).moved(lambda x: out[-1].append(x.numpy()) or x)
    return out, seen[1]


@pytest.mark.parametrize("accumulation", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_same_batches_bit_for_bit(accumulation):
    load, moved, tensors = zip(*run_ranks(batches_of_each, 3, accumulation), strict=True)
    assert [sent for _, sent in load] == [0, 0, 0]
    assert all(sent > 0 for _, sent in moved + tensors)
    for ways in zip(load, moved, tensors, strict=True):
        for steps in zip(*(b for b, _ in ways), strict=True):
            for parts in zip(*steps, strict=True):
                for other in parts[1:]:
                    np.testing.assert_array_equal(parts[0], other, strict=True)


class Alike(SyntheticDataset):
    """All examples have the same lengths: as sampled, every phase is balanced."""

    def _segments(self, i: int):
        return super()._segments(0)


def collectives(world, policy: str) -> int:
    phase = PhasePolicy(policy)
    run = recipe(balance=BalanceConfig(vision=phase, audio=phase, llm=phase))
    run = replace(run, data=replace(run.data, prefetch=2),
                  train=replace(run.train, num_steps=3, batch_size=2))
    trainer = Trainer(run, world, dataset=Alike(kinds=["TVAT"]))
    with counted() as seen:
        for step in trainer.loader():
            trainer.train_step(step)
    return seen[0]


def test_nothing_to_move_nothing_sent():
    assert run_ranks(collectives, 3, "least_move") == [0, 0, 0]
