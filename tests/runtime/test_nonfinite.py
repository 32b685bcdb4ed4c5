"""A loss or gradient that is not finite: one decision on all ranks, before the optimizer step."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from orchmllm.config import CheckpointConfig
from orchmllm.plan.step import BalanceConfig
from orchmllm.runtime.run_state import NonFiniteError
from orchmllm.trainer import Trainer
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

pytestmark = pytest.mark.dist
BAD = 3


def run_recipe(folder, policy: str):
    base = recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=2))
    return replace(
        base, run=replace(base.run, dir=str(folder)),
        fsdp=replace(base.fsdp, param_dtype="float32"),
        checkpoint=CheckpointConfig(every_steps=2, asynchronous=False),
        train=replace(base.train, num_steps=5, nonfinite=policy))


def poisoned_run(world, run, where: str) -> tuple[list, list[float]]:
    """([(step, nonfinite)], sum of |parameters| before and after step BAD)."""
    def add_up(step, row: dict) -> None:
        if step.index in (BAD - 1, BAD):
            sums.append(total())

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=add_up)
    forward, sums = trainer.model.forward, []

    def poisoned(batch):
        out = forward(batch)
        bad = trainer.progress.step == BAD and world.rank == 1
        if where == "loss":  # on every rank: FSDP gathers in the order of the graph
            out = out * (float("nan") if bad else 1.0)
        elif bad:
            out.register_hook(lambda g: g * float("inf"))
        return out

    def total() -> float:
        return sum(float(p.detach().full_tensor().abs().sum()) for p in trainer.model.parameters())

    trainer.model.forward = poisoned
    rows: list[dict] = []
    trainer.run(rows)
    assert torch.isfinite(torch.tensor(total()))
    return [(r["step"], r["nonfinite"]) for r in rows], sums


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_raise(tmp_path, where):
    with pytest.raises(RankFailure) as failure:
        run_ranks(poisoned_run, 2, run_recipe(tmp_path, "raise"), where)
    texts = {e[1] for e in failure.value.errors.values()}
    assert len(failure.value.errors) == 2 and len(texts) == 1
    assert f"step {BAD}: loss" in texts.pop()
    (line,) = (tmp_path / "nonfinite.jsonl").read_text().splitlines()
    assert len(json.loads(line)["example_ids"]) == 4 and json.loads(line)["step"] == BAD


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_skip(tmp_path, where):
    steps, sums = run_ranks(poisoned_run, 2, run_recipe(tmp_path, "skip"), where)[0]
    assert steps == [(s, s == BAD) for s in range(5)]
    assert sums[0] == sums[1]


def test_rollback_skips_the_step_when_it_comes_again(tmp_path):
    results = run_ranks(poisoned_run, 2, run_recipe(tmp_path, "rollback"), "loss")
    assert results[0][0] == [(0, False), (1, False), (2, False), (3, True),
                             (2, False), (3, True), (4, False)]
    assert results[0][0] == results[1][0]


def poisoned_on_all(world, run, bad: set[int], empty: int) -> str:
    """How a run ends in which the loss of some steps is nan; step `empty` has no targets."""
    def train_step(step) -> dict:
        if step.index == empty:
            step.num_global_targets = 0
        return trained(step)

    trainer = Trainer(run, world, dataset=SyntheticDataset())
    forward, trained = trainer.model.forward, trainer.train_step
    trainer.train_step = train_step
    trainer.model.forward = lambda batch: forward(batch) * (
        float("nan") if trainer.progress.step in bad else 1.0)
    try:
        trainer.run()
    except NonFiniteError as e:
        return str(e)
    return "finished"


@pytest.mark.parametrize("policy", ["skip", "rollback"])
def test_a_run_that_has_diverged_ends(tmp_path, policy):
    """Steps without targets neither count nor end the row; an update does, but not one that is
    made again after a rollback."""
    run = run_recipe(tmp_path, policy)
    run = replace(run, train=replace(run.train, num_steps=10, max_skipped_in_a_row=4))
    (told, same) = run_ranks(poisoned_on_all, 2, run, {2, 5, 7, 8, 9}, 6)
    assert told == same and told.startswith("step 9: loss nan"), told
    assert "steps in a row without an update: 4 (" in told
    assert told.endswith(f"the newest checkpoint is {tmp_path / 'checkpoints' / 'step_00000008'}")
    other = replace(run, run=replace(run.run, dir=str(tmp_path / "other")))
    assert run_ranks(poisoned_on_all, 1, other, {2, 3, 4, 6, 7, 8}, 1) == ["finished"]


def test_no_rollback_to_a_checkpoint_of_another_run(tmp_path):
    """The folder holds the last step of an older run, with which the new one would be finished."""
    run = run_recipe(tmp_path, "skip")
    run_ranks(poisoned_run, 1, run, "loss")
    new = replace(run, run=replace(run.run, resume="never"),
                  checkpoint=replace(run.checkpoint, every_steps=100),
                  train=replace(run.train, nonfinite="rollback"))
    with pytest.raises(RankFailure, match="no checkpoint yet to roll back to"):
        run_ranks(poisoned_on_one_rank, 1, new)


def poisoned_on_one_rank(world, run) -> None:
    trainer = Trainer(run, world, dataset=SyntheticDataset())
    forward = trainer.model.forward
    trainer.model.forward = lambda batch: forward(batch) * (
        float("nan") if trainer.progress.step == BAD else 1.0)
    trainer.run()
