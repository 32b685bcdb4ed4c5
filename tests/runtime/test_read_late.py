"""A step that is read while the next one is computed, as on a GPU: rows, weights, checkpoints and
ends of runs are those of a run that reads each step at once."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchmllm.comm.errors import AgreedError
from orchmllm.config.recipe import Recipe
from orchmllm.runtime.run_state import NonFiniteError
from orchmllm.runtime.stop import Stopped
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.resume import BATCH, run_recipe
from tests.lib.synthetic import SyntheticDataset
from tests.lib.training import size_of_weights

pytestmark = pytest.mark.dist


def trained(world, run: Recipe, late: bool, bad: tuple[int, ...] = (), stop: int | None = None,
            error: int | None = None, loss_stays: bool = False,
            ) -> tuple[list[tuple], list[tuple], str]:
    """(Steps as they were told, with the size of the weights then; the order in which steps were
    computed and told; how it ended). bad: losses of these passes are nan on rank 1, or, where
    the loss stays, their gradients. stop: rank 1 is
    asked to stop as it computes this step; error: all ranks fail then."""
    told, order = [], []

    def tell(step, row: dict) -> None:
        order.append(("told", step.index))
        told.append((step.index, row["nonfinite"], row["skipped_steps"], str(row["loss"]),
                     size_of_weights(trainer.model)))

    def compute(step):
        order.append(("computed", step.index))
        if step.index == error:
            raise AgreedError("a failure of all ranks")
        if step.index == stop and world.rank == 1:
            trainer.stop.signal = 15
        return computed(step)

    def forward(batch):
        passes.append(batch)
        poisoned = len(passes) - 1 in bad and world.rank == 1
        loss = out(batch)
        if poisoned and loss_stays:
            loss.register_hook(lambda gradient: gradient * float("nan"))
        return loss * (float("nan") if poisoned and not loss_stays else 1.0)

    trainer, passes = Trainer(run, world, dataset=SyntheticDataset(), on_step=tell), []
    trainer.watch = SimpleNamespace(  # of hangs: where this rank is
        enter_step=lambda step, examples: order.append(("at", step)))
    for group in trainer.optimizer.param_groups:
        group["fused"] = True  # a CPU's fused kernel reads found_inf, too
    assert trainer.reads_late == (trainer.device.type == "cuda")
    trainer.reads_late = late
    computed, out = trainer._compute, trainer.model.forward
    trainer._compute, trainer.model.forward, end = compute, forward, "finished"
    try:
        trainer.run()
    except (AgreedError, Stopped, NonFiniteError) as e:
        end = str(e).replace(run.run.dir, "")
    finally:
        trainer.close()
    assert all(p.grad is None for p in trainer.model.parameters())
    return told, order, end


def both(folder: Path, change=lambda run: run, **how) -> list[tuple[list, list, str]]:
    """On two ranks, [read at once, read late], of rank 0; their metrics and newest checkpoints are
    alike."""
    found, kept = [], []
    for late in (False, True):
        run = change(run_recipe(folder / str(late), every_steps=4))
        here, other = run_ranks(trained, 2, run, late, **how)
        assert here[0] == other[0] and here[2] == other[2]
        found.append(here)
        rows = map(json.loads, (folder / str(late) / "metrics.jsonl").read_text().splitlines())
        newest = max((folder / str(late) / "checkpoints").glob("step_*"))
        state = json.loads((newest / "state.json").read_text())
        kept.append(([(row["step"], str(row.get("loss"))) for row in rows], newest.name,
                     state["step"], state["skipped_steps"], state["media"]))
    assert kept[0] == kept[1]
    assert found[0][0] == found[1][0]
    return found


def test_a_step_is_told_while_the_next_one_is_computed(tmp_path):
    """Not before a checkpoint, nor at the end."""
    at_once, late = both(tmp_path)
    assert [one for one in at_once[1] if one[0] != "at"][:4] == [
        ("computed", 0), ("told", 0), ("computed", 1), ("told", 1)]
    assert late[1][:11] == [
        ("computed", 0), ("at", 0), ("at", 0), ("computed", 1), ("at", 1), ("at", 0), ("told", 0),
        ("at", 1), ("computed", 2), ("at", 2), ("at", 1)]
    assert late[1].index(("told", 3)) < late[1].index(("computed", 4))
    assert late[1].index(("told", 4)) > late[1].index(("computed", 5))
    assert at_once[2] == late[2] == "finished" and len({row[-1] for row in late[0]}) == 8


@pytest.mark.parametrize("policy, story", [
    pytest.param("skip", [0, 1, 2, 3, 4, 5, 6, 7], marks=pytest.mark.slow),
    ("rollback", [0, 1, 2, 3, 4, 5, 4, 5, 6, 7]), pytest.param(
        "raise", [0, 1, 2, 3, 4], marks=pytest.mark.slow)])
def test_an_update_that_is_not_finite_is_not_made(tmp_path, policy, story):
    """What was learnt then is kept by the examples."""
    at_once, late = both(tmp_path, lambda run: replace(run, train=replace(
        run.train, nonfinite=policy)), bad=(5,), loss_stays=policy == "rollback")
    assert [row[0] for row in late[0]] == story
    assert ("step 5: loss nan" in late[2]) == (policy == "raise")
    assert late[0][-1][2] == (policy != "raise")  # steps without an update
    assert policy == "raise" or late[0][5][1] and late[0][5][-1] == late[0][4][-1]
    assert policy != "rollback" or late[0][7][-1] == late[0][6][-1]  # nor when it comes again
    for name in ("False", "True"):
        (line,) = (tmp_path / name / "nonfinite.jsonl").read_text().splitlines()
        kept = json.loads(line)
        assert kept["step"] == 5 and len(kept["example_ids"]) == BATCH


def test_an_error_of_all_ranks_keeps_the_step_that_was_not_told_yet(tmp_path):
    (told, _, end), = run_ranks(
        trained, 1, run_recipe(tmp_path, every_steps=4), True, error=6)
    assert told[-1][0] == 5 and "step_00000006" in end


def test_steps_are_kept_where_the_one_that_was_not_told_yet_fails_as_well(tmp_path):
    """What it failed by is the cause, and is told."""
    run = run_recipe(tmp_path, every_steps=0)
    (_, _, end), _ = run_ranks(trained, 2, run, True, bad=(5,), error=6)
    assert "step 5: loss nan" in end and "step_00000005" in end


@pytest.mark.slow  # five runs
def test_a_stop_and_an_error_keep_the_steps_that_were_done(tmp_path):
    """The next start goes on with their weights."""
    stopped = both(tmp_path / "stop", stop=5)
    assert [told[-1][0] for told, *_ in stopped] == [5, 5] and "step_00000006" in str(
        [*(tmp_path / "stop" / "True").rglob("step_*")])
    failed = both(tmp_path / "error", error=6)
    assert [told[-1][0] for told, *_ in failed] == [5, 5]
    (whole, *_), _ = run_ranks(trained, 2, run_recipe(tmp_path / "whole"), False)
    for folder in ("stop", "error"):
        run = run_recipe(tmp_path / folder / "True")
        (resumed, *_), _ = run_ranks(trained, 2, run, True)
        assert resumed == whole[6:], folder
