"""However a run ends, its last finished step is saved, with the keys as they are by default."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from orchmllm.comm.errors import AgreedError
from orchmllm.config.recipe import CheckpointConfig, Recipe
from orchmllm.data.media.medium import MediaError
from orchmllm.runtime import run_checkpoints
from orchmllm.runtime.preflight import SPARE_BYTES
from orchmllm.runtime.stop import Stopped
from orchmllm.trainer import Trainer
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.resume import run_recipe
from tests.lib.synthetic import SyntheticDataset
from tests.lib.training import listened

pytestmark = pytest.mark.dist
BAD = 3  # of 8 steps; the examples come again from step 4 on
ENDS = {  # what happens -> what is said of the end, nothing where the run goes on to its last step
    "media": "data.strict", "nan": "loss nan", "worker": "worker", "data": "rank 1",
    "signal": "stopped on request after step 3", "full stdout": "", "tracker": "",
    "closed stdout": "stopped on request after step 2"}


class Faulty(SyntheticDataset):
    """fault: what happens where the examples of the step BAD are read."""

    fault, rank, bad = "", 0, frozenset()

    def load(self, i, *, on_error=None, **how):
        hit = i in self.bad and how.get("segments") != ()
        if hit and self.fault == "worker" and self.rank == 1:
            os._exit(3)
        if hit and self.fault == "data" and self.rank == 1:
            raise OSError("the disk is gone")
        example = super().load(i, **how)
        if hit and self.fault == "media" and on_error is not None:
            for segment in example.parts:
                error = MediaError(f"{i}", "broken", segment)
                error.modality = 1
                on_error(segment, error)
        return example


def weights(trainer: Trainer) -> list[np.ndarray]:
    return [p.detach().full_tensor().numpy().copy() for p in trainer.model.parameters()]


def trained(world, run: Recipe, fault: str = "", bad: frozenset = frozenset()
            ) -> tuple[str, list[list[int]], list[np.ndarray]]:
    """(how the run ends, examples of its steps, weights at the end)."""
    seen = []
    dataset = Faulty()
    dataset.fault, dataset.rank, dataset.bad = fault, world.rank, bad

    def record(step, row: dict) -> None:
        seen.append(step.example_ids.tolist())
        if fault == "signal" and step.index == BAD - 2 and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if fault == "closed stdout" and step.index == 0 and world.rank == 0:
            reader, writer = os.pipe()  # the next line, of step 1, finds that the reader has left
            os.close(reader)
            os.dup2(writer, 1)
            os.close(writer)

    trainer = Trainer(run, world, dataset=dataset, on_step=record)
    forward = trainer.model.forward
    trainer.model.forward = lambda batch: forward(batch) * (
        float("nan") if fault == "nan" and trainer.progress.step == BAD else 1.0)
    out = os.dup(1)
    if fault == "full stdout" and world.rank == 0:
        with Path("/dev/full").open("w") as full:
            os.dup2(full.fileno(), 1)
    if fault == "tracker":  # fails when it gets the first values, as a full disk makes it
        run.run.folder.mkdir(parents=True, exist_ok=True)
        (run.run.folder / "tensorboard").write_text("no folder")
    end = "finished"
    try:
        trainer.run()
    except (AgreedError, Stopped) as e:
        end = str(e)
    finally:
        os.dup2(out, 1)
        os.close(out)
        trainer.close()
    return end, seen, weights(trainer)


def disturbed(world, run: Recipe, fault: str, bad: frozenset) -> tuple:
    """(how the run ends, its checkpoints and what these have of what went wrong after them,
    examples of the steps of both starts, weights after the second)."""
    end, first, _ = trained(world, run, fault, bad)
    names = sorted(p.name for p in run.run.folder.glob("checkpoints/step_*"))
    states = [json.loads(path.read_text()) for path in run.run.folder.rglob("state.json")]
    wrong = [(state["media"]["failed"], state["nonfinite_in_a_row"]) for state in states]
    again, second, last = trained(world, replace(run, run=replace(run.run, trackers=())))
    assert again == "finished"
    return end, names, wrong, first + second, last


def of_run(folder: Path, fault: str = "") -> Recipe:
    run = run_recipe(folder, num_workers=int(fault == "worker"), every_steps=0)
    run = replace(run, checkpoint=CheckpointConfig())
    if fault == "media":
        run = replace(run, data=replace(run.data, strict=True))
    trackers = ("tensorboard",) if fault == "tracker" else ()
    return replace(run, run=replace(run.run, trackers=trackers))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> tuple:
    return run_ranks(trained, 2, of_run(tmp_path_factory.mktemp("whole")))[0]


def all_disturbed(world, folder: Path, faults: list[str], bad: frozenset) -> dict[str, tuple]:
    return {fault: disturbed(world, of_run(folder / fault, fault), fault, bad) for fault in faults}


# To test_resume.py, test_nonfinite.py and tests/data/, where these are fast.
LEFT = ["signal", "worker", "nan", "media", "full stdout"]


@pytest.mark.parametrize("faults", [
    sorted(ENDS.keys() - LEFT), pytest.param(LEFT, marks=pytest.mark.slow)], ids=["some", "rest"])
def test_a_run_that_ends_by_its_own_decision_is_saved(faults, whole, tmp_path):
    _, examples, last = whole
    bad = frozenset(examples[BAD]) - frozenset(sum(examples[:BAD], []))
    for rank in run_ranks(all_disturbed, 2, tmp_path, faults, bad):
        for fault, (end, names, wrong, steps, weights) in rank.items():
            assert ENDS[fault] in end and (end == "finished") == (not ENDS[fault]), fault
            was_asked = end.startswith("stopped on request")
            done = 8 if end == "finished" else int(end[-1]) if was_asked else BAD
            assert names == [f"step_{done:08d}"] and wrong == [(0, 0)], fault
            assert was_asked or end == "finished" or f"checkpoint: {tmp_path}" in end, fault
            assert steps == examples, fault
            assert all(np.array_equal(a, b) for a, b in zip(weights, last, strict=True)), fault


def saved_by_time(world, run: Recipe, trouble: str) -> tuple[list[str], list[int], list[str]]:
    """(what is said, steps that were saved because it was time, checkpoints at the end)."""
    said, due = listened(), []
    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=lambda step, row: (
        due.append(step.index) if row["save_due"] else None))
    if trouble == "full":  # with room for one checkpoint
        one = sum(t.numel() * t.element_size() for t in trainer.checkpointer._tensors().values())
        run_checkpoints.shutil.disk_usage = lambda _: SimpleNamespace(free=one + SPARE_BYTES)
    forward = trainer.model.forward

    def loses_its_folder(batch):
        if trouble == "deleted" and world.rank == 0 and trainer.progress.step == 1:
            shutil.rmtree(run.run.folder)
        return forward(batch)

    trainer.model.forward = loses_its_folder
    publish, calls = trainer.checkpointer._publish, iter([True])

    def fails(*arguments) -> None:
        if trouble == "fails" and world.rank == 0 and next(calls, False):
            raise OSError("the disk is gone")
        publish(*arguments)

    trainer.checkpointer._publish = fails
    trainer.run()
    trainer.close()
    return said, due, sorted(p.name for p in run.run.folder.glob("checkpoints/step_*"))


@pytest.mark.parametrize("trouble, due, left, says", [
    ("", [0, 1, 2, 3], [3, 4], "saved step 1: "),
    ("full", [], [4], "no checkpoint after 1e-09 minutes (checkpoint.every_minutes): the 0.0"),
    ("fails", [0, 1, 2, 3], [3, 4], "OSError: the disk is gone; earlier checkpoints in "),
    ("deleted", [0, 1, 2, 3], [3, 4], "saved step 4: ")])
def test_a_save_by_time_never_ends_the_run(tmp_path, trouble, due, left, says):
    run = of_run(tmp_path)
    run = replace(run, train=replace(run.train, num_steps=4),
                  checkpoint=CheckpointConfig(every_minutes=1e-9, asynchronous=not trouble))
    for rank, found in enumerate(run_ranks(saved_by_time, 2, run, trouble)):
        said, steps, names = found
        assert steps == due and names == [f"step_{n:08d}" for n in left]
        assert any(says in line for line in said) == (rank == 0)


def failed_before_another(world, run: Recipe, bad: tuple[int, ...], stop_after: int = 0
                          ) -> tuple[str, list[str], list[str]]:
    """(How a run ends whose saves after the steps `bad` fail, what is said, its checkpoints).
    stop_after: the step after which it is asked to stop; 0: none."""
    said = listened()
    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=lambda step, row: (
        os.kill(os.getpid(), signal.SIGTERM) if step.index + 2 == stop_after else None))
    publish = trainer.checkpointer._publish

    def fails(step: int, *arguments) -> None:
        if step in bad and world.rank == 0:
            raise OSError("the disk is gone")
        publish(step, *arguments)

    trainer.checkpointer._publish = fails
    end = "finished"
    try:
        trainer.run()
    except (AgreedError, Stopped) as e:
        end = str(e)
    finally:
        trainer.close()
    return end, said, sorted(p.name for p in run.run.folder.glob("checkpoints/step_*"))


def test_a_save_by_time_hides_no_failure_of_another(tmp_path):
    """It is made in its place: it is waited for, and ends the run where it fails as well."""
    run = replace(of_run(tmp_path), checkpoint=CheckpointConfig(every_steps=2, every_minutes=1e-9))
    end, said, _ = run_ranks(failed_before_another, 1, run, (2, 3))[0]
    assert "checkpoint 3: rank 0 failed: OSError: the disk is gone" in end
    assert any(line.startswith("warning: checkpoint 2: ") for line in said)


@pytest.mark.parametrize("bad, end, saved", [
    ((2,), "stopped on request after step 3", ["step_00000003"]),
    ((2, 3), "checkpoint 3: rank 0 failed: OSError: the disk is gone", [])])
def test_a_save_is_tried_although_the_one_before_failed(tmp_path, bad, end, saved):
    run = replace(of_run(tmp_path), checkpoint=CheckpointConfig(every_steps=2))
    for rank, found in enumerate(run_ranks(failed_before_another, 2, run, bad, 3)):
        assert end in found[0] and found[2] == saved
        assert any("warning: checkpoint 2: " in line for line in found[1]) == (rank == 0)


def test_a_save_that_the_recipe_asks_for_ends_the_run_where_it_fails(tmp_path):
    run = replace(of_run(tmp_path), checkpoint=CheckpointConfig(every_steps=2, asynchronous=False))
    with pytest.raises(RankFailure) as failure:
        run_ranks(saved_by_time, 2, run, "fails")
    for kind, text, _ in failure.value.errors.values():
        assert kind == "CheckpointError" and "the disk is gone" in text
