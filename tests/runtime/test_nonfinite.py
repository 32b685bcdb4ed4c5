"""A loss or gradient that is not finite: one decision on all ranks, before the optimizer step."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import CheckpointConfig
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


def poisoned_run(world, run, calls: tuple[int, ...] = (BAD,)) -> list[tuple]:
    """[(step, nonfinite, sum of |parameters| after it)]. calls: the steps, counted as they are
    trained, whose loss is not finite on the last rank."""
    seen: list[tuple] = []
    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=lambda step, row: seen.append(
        (step.index, row["nonfinite"], total())))
    forward = trainer.model.forward

    def poisoned(batch):
        bad = len(seen) in calls and world.rank == world.world_size - 1
        return forward(batch) * (float("nan") if bad else 1.0)

    def total() -> float:
        return sum(float(p.detach().full_tensor().abs().sum()) for p in trainer.model.parameters())

    trainer.model.forward = poisoned
    trainer.run()
    assert math.isfinite(total())
    return seen


def test_raise(tmp_path):
    with pytest.raises(RankFailure) as failure:
        run_ranks(poisoned_run, 2, run_recipe(tmp_path, "raise"))
    texts = {e[1] for e in failure.value.errors.values()}
    assert len(failure.value.errors) == 2 and len(texts) == 1
    assert f"step {BAD}: loss" in texts.pop()
    (line,) = (tmp_path / "nonfinite.jsonl").read_text().splitlines()
    assert len(json.loads(line)["example_ids"]) == 4 and json.loads(line)["step"] == BAD


def story(seen: list[tuple]) -> str:
    """The steps as they were trained, each with a letter for the weights after it. !: not finite.
    """
    letter = dict(zip(dict.fromkeys(weights for *_, weights in seen), "abcdef", strict=False))
    return " ".join(f"{step}{'!' * bad}{letter[weights]}" for step, bad, weights in seen)


def test_a_rollback_leaves_out_each_step_that_was_not_finite(tmp_path):
    """When it comes again and is not finite then, either. One that is finite then, and a second
    rollback: tests/runtime/test_absence.py."""
    ranks = run_ranks(poisoned_run, 2, run_recipe(tmp_path, "rollback"), (3, 5))
    assert ranks[0] == ranks[1] and story(ranks[0]) == "0a 1b 2c 3!c 2c 3!c 4d"


def poisoned_on_all(world, run, bad: set[int], empty: int) -> str:
    """How a run ends in which the loss of some steps is nan; step `empty` has no targets."""
    def compute(step) -> tuple:
        if step.index == empty:
            step.num_global_targets = 0
        return computed(step)

    trainer = Trainer(run, world, dataset=SyntheticDataset())
    forward, computed = trainer.model.forward, trainer._compute
    trainer._compute = compute
    trainer.model.forward = lambda batch: forward(batch) * (
        float("nan") if trainer.progress.step in bad else 1.0)
    try:
        trainer.run()
    except NonFiniteError as e:
        return str(e)
    return "finished"


def test_a_run_that_has_diverged_ends(tmp_path):
    """Steps without targets neither count nor end the row; an update does, but not one that is
    made again after a rollback."""
    run = run_recipe(tmp_path, "rollback")
    run = replace(run, train=replace(run.train, num_steps=10, max_skipped_in_a_row=4))
    (told, same) = run_ranks(poisoned_on_all, 2, run, {2, 5, 7, 8, 9}, 6)
    assert told == same and told.startswith("step 9: loss nan"), told
    assert "steps in a row without an update: 4 (" in told
    newest = tmp_path / "checkpoints" / "step_00000008"
    assert told.endswith(f"; checkpoint: {newest}; the same command goes on from it")
    other = replace(run, run=replace(run.run, dir=str(tmp_path / "other")))
    assert run_ranks(poisoned_on_all, 1, other, {2, 3, 4, 6, 7, 8}, 1) == ["finished"]


def test_no_rollback_to_a_checkpoint_of_another_run(tmp_path):
    """The folder holds the last step of an older run, with which the new one would be finished."""
    run = run_recipe(tmp_path, "skip")
    run_ranks(poisoned_run, 1, run)
    new = replace(run, run=replace(run.run, resume="never"),
                  checkpoint=replace(run.checkpoint, every_steps=100),
                  train=replace(run.train, nonfinite="rollback"))
    with pytest.raises(RankFailure, match="no checkpoint yet to roll back to"):
        run_ranks(poisoned_on_one_rank, 1, new)


def test_a_rollback_says_why_newer_checkpoints_were_rejected(tmp_path):
    run = run_recipe(tmp_path, "rollback")
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=1))
    (said,) = run_ranks(poisoned_on_one_rank, 1, run, "step_00000003/manifest.json")
    at = said.index("rolled back to step 2; step 3 will be skipped")
    assert "step_00000003: JSONDecodeError: " in said[at - 1]
    assert said[at - 1].endswith("; using the one before")


def poisoned_on_one_rank(world, run, damaged: str = "") -> list[str]:
    """What is said of checkpoints. damaged: a file of them that is half-written when step BAD is
    done."""
    said: list[str] = []

    def damage(step, row: dict) -> None:
        if damaged and row["nonfinite"]:
            (run.run.folder / "checkpoints" / damaged).write_text("{")

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=damage)
    forward = trainer.model.forward
    trainer.model.forward = lambda batch: forward(batch) * (
        float("nan") if trainer.progress.step == BAD else 1.0)
    trainer.checkpointer._log = said.append
    trainer.run()
    return said
