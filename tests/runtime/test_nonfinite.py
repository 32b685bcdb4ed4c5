"""A loss or gradient that is not finite: one decision on all ranks, before the optimizer step."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.runtime.checkpoint import THREAD
from orchmllm.runtime.run_state import NonFiniteError
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.training import size_of_weights

pytestmark = pytest.mark.dist
BAD = 3


def run_recipe(folder, policy: str):
    base = recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=2))
    return replace(
        base, run=replace(base.run, dir=str(folder)),
        fsdp=replace(base.fsdp, param_dtype="float32"),
        checkpoint=CheckpointConfig(every_steps=2, asynchronous=False),
        train=replace(base.train, num_steps=5, nonfinite=policy))


def poisoned(
    world, run, calls: Collection[int] = (), steps: Collection[int] = (), empty: int = -1,
    damaged: str = "", unsaved: int = -1,
) -> tuple[list[tuple], list[str], str]:
    """([(step, nonfinite, size of the weights after it)], what is said of checkpoints, how the run
    ends). calls: steps, counted as they are trained, whose loss is not finite on the last rank;
    steps: those whose loss is finite on no rank, whenever they come; empty: one without targets;
    damaged: a file of the checkpoints that is half-written once a step was not finite; unsaved: a
    step whose checkpoint cannot be written."""
    def tell(step, row: dict) -> None:
        seen.append((step.index, row["nonfinite"], size_of_weights(trainer.model)))
        if damaged and row["nonfinite"]:
            (run.run.folder / "checkpoints" / damaged).write_text("{")

    def compute(step) -> tuple:
        if step.index == empty:
            step.num_global_targets = 0
        return computed(step)

    def publish(step: int, *arguments) -> None:
        if step == unsaved:
            raise OSError("the disk is gone")
        published(step, *arguments)

    def poison(batch) -> torch.Tensor:
        bad = len(seen) in calls and world.rank == world.world_size - 1
        return forward(batch) * (
            float("nan") if bad or trainer.progress.step in steps else 1.0)

    seen: list[tuple] = []
    said: list[str] = []
    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=tell)
    forward, computed = trainer.model.forward, trainer._compute
    trainer.model.forward, trainer._compute = poison, compute
    published, trainer.checkpointer._publish = trainer.checkpointer._publish, publish
    trainer.checkpointer._log = said.append
    trainer.checkpointer.load = partial(load, trainer.checkpointer.load)
    try:
        trainer.run()
    except NonFiniteError as e:
        return seen, said, str(e)
    assert all(math.isfinite(total) for *_, total in seen)
    return seen, said, "finished"


def load(read: Callable, path: Path, tensors: Mapping) -> None:
    """The watchdog waits for it."""
    assert threading.current_thread().name == THREAD
    read(path, tensors)


def story(seen: list[tuple]) -> str:
    """The steps as they were trained, each with a letter for the weights after it. !: not finite.
    """
    letter = dict(zip(dict.fromkeys(weights for *_, weights in seen), "abcdef", strict=False))
    return " ".join(f"{step}{'!' * bad}{letter[weights]}" for step, bad, weights in seen)


def test_a_rollback_leaves_out_each_step_that_was_not_finite(tmp_path):
    """When it comes again and is not finite then, either. One that is finite then, and a second
    rollback: tests/runtime/test_absence.py."""
    ranks = run_ranks(poisoned, 2, run_recipe(tmp_path, "rollback"), (3, 5))
    assert ranks[0][0] == ranks[1][0] and story(ranks[0][0]) == "0a 1b 2c 3!c 2c 3!c 4d"


def test_a_run_that_has_diverged_ends(tmp_path):
    """Steps without targets neither count nor end the row; an update does, but not one that is
    made again after a rollback."""
    run = run_recipe(tmp_path, "rollback")
    run = replace(run, train=replace(run.train, num_steps=10, max_skipped_in_a_row=4))
    (seen, _, told), (*_, same) = run_ranks(poisoned, 2, run, steps={2, 5, 7, 8, 9}, empty=6)
    weights = {step: size for step, _, size in seen}
    assert weights[3] != weights[4] == weights[6]  # no moment of Adam moves them either
    assert told == same and told.startswith("step 9: loss nan"), told
    assert "steps in a row without an update: 4 (" in told
    newest = tmp_path / "checkpoints" / "step_00000008"
    assert told.endswith(f"; checkpoint: {newest}; once this is mended, the same command "
                         "goes on from it")
    other = replace(run, run=replace(run.run, dir=str(tmp_path / "other")))
    assert run_ranks(poisoned, 1, other, steps={2, 3, 4, 6, 7, 8}, empty=1)[0][2] == "finished"


def test_no_rollback_to_a_checkpoint_of_another_run(tmp_path):
    """The folder holds the last step of an older run, with which the new one would be finished."""
    run = run_recipe(tmp_path, "skip")
    run_ranks(poisoned, 1, run)
    new = replace(run, run=replace(run.run, resume="never"),
                  checkpoint=replace(run.checkpoint, every_steps=100),
                  train=replace(run.train, nonfinite="rollback"))
    assert "no checkpoint yet to roll back to" in run_ranks(poisoned, 1, new, steps={BAD})[0][2]


def test_a_rollback_says_why_newer_checkpoints_were_rejected(tmp_path):
    run = run_recipe(tmp_path, "rollback")
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=1))
    ((_, said, _),) = run_ranks(
        poisoned, 1, run, steps={BAD}, damaged="step_00000003/manifest.json")
    at = said.index("rolled back to step 2; step 3 will be skipped")
    assert "step_00000003: JSONDecodeError: " in said[at - 1]
    assert said[at - 1].endswith("; using the one before")


def test_a_rollback_goes_back_further_where_the_last_save_failed(tmp_path):
    run = run_recipe(tmp_path, "rollback")
    run = replace(run, checkpoint=CheckpointConfig(every_steps=1))
    ((seen, said, end),) = run_ranks(poisoned, 1, run, steps={BAD}, unsaved=3)
    assert end == "finished" and [step for step, *_ in seen] == [0, 1, 2, 3, 2, 3, 4]
    at = said.index("rolled back to step 2; step 3 will be skipped")
    assert said[at - 1].startswith("warning: checkpoint 3: ") and "disk is gone" in said[at - 1]
