"""Exact resume: a run that was cut off anywhere continues with the same examples and, on the same
number of ranks, bit-equal losses; on another number the same global batches."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from orchmllm.config.recipe import load_recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.runtime.checkpoint import CheckpointError
from orchmllm.runtime.files import identify
from orchmllm.runtime.metrics import read_rows
from orchmllm.runtime.stop import Stopped
from orchmllm.trainer import Trainer
from tests.lib.commands import TINY, demo_of
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.resume import STEPS, flip, run_recipe, train_recorded
from tests.lib.synthetic import SyntheticDataset
from tests.lib.training import train

pytestmark = pytest.mark.dist


def killed(num_ranks: int, run, **how) -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(train_recorded, num_ranks, run, **how)
    assert failure.value.errors[0][0] == "Died"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Undisturbed runs by (accumulation steps, dtype)."""
    cache = {}

    def get(accumulation: int = 1, dtype: str = "float32"):
        key = accumulation, dtype
        if key not in cache:
            run = run_recipe(tmp_path_factory.mktemp("whole"), dtype=dtype, every_steps=-1,
                             train={"accumulation_steps": accumulation})
            cache[key] = run_ranks(train_recorded, 2, run)[0]
        return cache[key]

    return get


SLOW = pytest.mark.slow  # the rest of a grid whose corners run every time


@pytest.mark.parametrize("k, accumulation, asynchronous, num_workers", [
    (2, 1, True, 0),  # mid-epoch
    pytest.param(2, 3, False, 0, marks=SLOW),
    pytest.param(0, 1, True, 0, marks=SLOW),  # before there is a checkpoint
    pytest.param(4, 1, False, 2, marks=SLOW),  # epoch end
    pytest.param(7, 3, True, 2, marks=SLOW),  # the last batch
])
def test_killed_and_resumed_is_bit_equal(
        tmp_path, whole, k, accumulation, asynchronous, num_workers):
    """Also as the whole run, which had no workers."""
    run = run_recipe(tmp_path, asynchronous=asynchronous, num_workers=num_workers,
                     train={"accumulation_steps": accumulation})
    killed(2, run, kill_at=k)
    resumed = run_ranks(train_recorded, 2, run)
    assert resumed[0] == whole(accumulation)[k:]


@SLOW
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 6])
def test_elastic(tmp_path, whole, num_ranks):
    """Saved on 4 ranks at step 3, resumed on others: same batches, losses to 1e-6. Fast, from one
    rank to three: tests/sharding/test_whole_models.py."""
    run = run_recipe(tmp_path, dtype="float64")
    killed(4, run, kill_at=3)
    resumed = run_ranks(train_recorded, num_ranks, run)[0]
    want = whole(dtype="float64")[3:]
    assert [(s, ids) for s, _, ids in resumed] == [(s, ids) for s, _, ids in want]
    assert [x for _, x, _ in resumed] == pytest.approx([x for _, x, _ in want], rel=1e-6)


def on_fewer_ranks(world, run) -> list[str]:
    """What is said of the run resumed, and of one from scratch; the recipe that was advised ends
    it."""
    said = []
    for resume in ("auto", "never"):
        try:
            Trainer(replace(run, run=replace(run.run, resume=resume)), world,
                    dataset=SyntheticDataset()).close()
            said.append("fits")
        except ValueError as e:
            said.append(str(e))
    advised = re.findall(r"train\.(\w+)=(\d+)", said[0])
    train_recorded(world, replace(run, train=replace(
        run.train, **{key: int(value) for key, value in advised})))
    return said


@pytest.mark.slow
def test_memory_on_fewer_ranks_is_that_of_the_checkpoints_batch(tmp_path):
    """A step of 4 ranks with 2 examples each is one of 8 examples on 1 rank."""
    run = run_recipe(tmp_path, train={"num_steps": 1, "global_batch_size": 0})
    run_ranks(train_recorded, 4, run)
    run = replace(run, train=replace(run.train, num_steps=2), fsdp=replace(
        run.fsdp, memory_gb=0.002, activation_checkpointing="auto"))
    ((resumed, fresh),) = run_ranks(on_fewer_ranks, 1, run)
    assert "the checkpoint's step of 8 examples on shard groups of 1 needs" in resumed
    assert "train.global_batch_size=8 train.accumulation_steps=" in resumed and fresh == "fits"


def test_a_change_anywhere_in_a_large_file_is_found(tmp_path):
    data = bytearray(5 << 20)
    found = []
    for at in (0, 1 << 20, len(data) - 1):
        data[at] = 1
        (tmp_path / "file").write_bytes(data)
        found.append(identify(tmp_path / "file")["sha256"])
    assert found[-1] == hashlib.sha256(data).hexdigest() and len({*found}) == 3


def test_nothing_sound_is_an_error_on_all_ranks(tmp_path):
    run = run_recipe(tmp_path, keep_last=1, train={"num_steps": 2})
    run_ranks(train_recorded, 2, run)
    for path in (tmp_path / "checkpoints").glob("step_*/shard-00002*"):
        flip(path)
    with pytest.raises(RankFailure) as failure:
        run_ranks(train_recorded, 2, run)
    errors = failure.value.errors
    assert {e[0] for e in errors.values()} == {CheckpointError.__name__}
    assert errors[0][1] == errors[1][1] and "run.resume=never" in errors[0][1]


def with_another_tokenizer(world, folder: Path, data: Path) -> str:
    """What the runs print."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runs_with_another_tokenizer(world, folder, data)
    return out.getvalue()


def runs_with_another_tokenizer(world, folder: Path, data: Path) -> None:
    shutil.copytree(data, folder / "data")
    run = load_recipe("recipes/demo.yaml", [
        *TINY, *demo_of(folder / 'data'), f"run.dir={folder / 'run'}", "train.num_steps=1"])
    train(world, run)
    template = folder / "data" / "model" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another one #}")
    more = replace(run, train=replace(run.train, num_steps=2))
    with pytest.raises(ValueError, match="content.tokenizer is .* or its chat template"):
        train(world, more)
    (row,) = train(world, replace(more, run=replace(more.run, allow_data_change=True)))
    assert row["step"] == 1
    # Never means never, but what the folder's run logged is not mixed with the new one.
    train(world, replace(run, run=replace(run.run, resume="never")))
    logs = [[r["step"] for r in read_rows(folder / "run" / name)]
            for name in ("aside_1_metrics.jsonl", "metrics.jsonl")]
    assert logs == [[0, 1], [0]]


def with_changing_data(world, folder: Path, data: Path) -> list[str]:
    """A run whose data file is changed after its last step, and one whose file is gone by then,
    each resumed: what is said of it. Only rank 0 looks at the files, once a run."""
    seen, said = [], []
    look = ConversationDataset.fingerprint
    ConversationDataset.fingerprint = lambda self: [seen.append(1), look(self)][1]
    for change in ("edited", "renamed"):
        if world.rank == 0:
            shutil.copytree(data, folder / change)
        dist.barrier()
        path = folder / change / "data.jsonl"

        def last_step(step, row: dict, path=path, change=change) -> None:
            if step.index == 1 and world.rank == 0:
                path.rename(path.with_suffix(".gone"))
                if change == "edited":
                    path.write_bytes(path.with_suffix(".gone").read_bytes()[1:] + b"\n")

        run = load_recipe("recipes/demo.yaml", [
            *TINY, *demo_of(path.parent), f"run.dir={folder / change / 'run'}",
            "train.num_steps=2", "checkpoint.every_steps=1"])
        train(world, run, on_step=last_step)
        dist.barrier()
        if change == "renamed" and world.rank == 0:
            path.with_suffix(".gone").rename(path)
        assert len(seen) == (1 - world.rank) * (2 * len(said) + 1)
        dist.barrier()
        try:
            train(world, replace(run, train=replace(run.train, num_steps=3)))
            said.append("resumed")
        except ValueError as e:
            said.append(re.match(r"[\w.[\]]+", str(e))[0])
    return said


def test_data_that_change_during_a_run_neither_keep_it_from_saving_nor_are_recorded(
        tmp_path, demo_corpus):
    said = run_ranks(with_changing_data, 2, tmp_path, demo_corpus)
    assert said == [["content.sources[0].content", "resumed"]] * 2


def test_another_tokenizer_and_a_fresh_start(tmp_path, demo_corpus):
    (told,) = run_ranks(with_another_tokenizer, 1, tmp_path, demo_corpus)
    for step in (1, 2):
        folder = tmp_path / "run" / "checkpoints" / f"step_0000000{step}"
        assert f"saved step {step}: {folder} (" in told
        assert f"checkpoint  {folder}; a larger train.num_steps goes on from it" in told
    assert "metrics.jsonl of an earlier run is now" in told
    assert "run.resume=auto goes on from it, the same command starts anew" in told


def stopped(world, run, rank: int, step: int) -> tuple[str, int]:
    """A signal to one rank after `step`, on which the ranks agreed before: all stop after the
    next."""
    def signal_it(done, row: dict) -> None:
        if done.index == step and world.rank == rank:
            for _ in range(2):  # as a terminal and a launcher that passes it on
                os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=signal_it)
    try:
        trainer.run()
    except Stopped as e:
        return str(e), e.exit_code
    return "finished", 0


def signalled_after_the_last_step(world, run) -> list[str]:
    """SIGTERM during the validation that follows it; the run's checkpoints."""
    def validate() -> dict[str, float]:
        if trainer.progress.step == STEPS:
            os.kill(os.getpid(), signal.SIGTERM)
        return {"validation_loss": 1.0}

    trainer = Trainer(run, world, dataset=SyntheticDataset())
    trainer.validation_rows, trainer.validate = [0], validate
    trainer.run()
    return [p.name for p in Path(run.run.dir, "checkpoints").glob("step_*")]


def test_sigterm_after_the_last_step_does_not_lose_the_run(tmp_path):
    run = run_recipe(tmp_path, every_steps=0)
    assert run_ranks(signalled_after_the_last_step, 1, run) == [[f"step_{STEPS:08d}"]]


def looked_at(world, run, at: list, interrupted: str = "", signal_at: int = -1) -> str:
    """at: gets the step of every validation and of all samples. interrupted: which of them is at
    the end, when rank 0 is killed in a way that a test survives; signal_at: as in `stopped`."""
    def noted(what: str, step: int, log: str, row: dict) -> dict:
        if interrupted == what and step == STEPS:
            raise KeyboardInterrupt
        at.append((what, step))
        if what == "sample" and world.rank == 0:
            with Path(run.run.dir, log).open("a") as file:
                file.write(json.dumps({"step": step, **row}) + "\n")
        return row

    def signal_it(done, row: dict) -> None:
        if done.index == signal_at and world.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=signal_it)
    trainer.recipe = replace(run, train=replace(run.train, validate_every_steps=2, sample_every=4))
    trainer.validation_rows, trainer.samples = [0], SimpleNamespace(
        write=lambda model, step: noted("sample", step, "samples.jsonl", {"example": 0}))
    trainer.validate = lambda: noted("validation", trainer.progress.step, "", {
        "validation_loss": 1.0})
    try:
        trainer.run()
    except (Stopped, KeyboardInterrupt) as e:
        return type(e).__name__
    finally:
        trainer.close()
    return "finished"


def owed(world, run) -> tuple[list, list]:
    at: list = []
    ends = [looked_at(world, run, at, signal_at=2), looked_at(world, run, at, "validation"),
            looked_at(world, run, at, "sample"), looked_at(world, run, at),
            looked_at(world, run, at)]
    return at, ends


def test_what_a_stop_or_a_kill_kept_from_coming_comes_at_the_next_start(tmp_path):
    """Validation and samples after the step of the checkpoint, and after the last one; once."""
    run = run_recipe(tmp_path, every_steps=0)
    (at, ends), other = run_ranks(owed, 2, run)
    assert (at, ends) == other  # on all ranks, which wait for each other then
    assert ends == ["Stopped", "KeyboardInterrupt", "KeyboardInterrupt", "finished", "finished"]
    assert at == [("validation", 0), ("validation", 2), ("validation", 4), ("sample", 4),
                  *(("validation", step) for step in range(6, STEPS, 2)),
                  *([("sample", 8)] if STEPS > 8 else []),
                  ("validation", STEPS), ("sample", STEPS)]
    assert [row["ended"].partition(":")[0] for row in read_rows(tmp_path / "attempts.jsonl")
            if "ended" in row] == ["Stopped", "KeyboardInterrupt", "KeyboardInterrupt", "finished"]


def stopped_in_validation(world, run) -> tuple[list[str], str]:
    """(what is done after step 2, where SIGTERM comes to a rank in the first step of a validation,
    how the run ends); then it is started again."""
    done = []
    trainer = Trainer(run, world, dataset=SyntheticDataset())
    dispatch, save = trainer._validation.dispatch, trainer.checkpointer.save_run

    def signalled(micro):
        if trainer.progress.step == 2:
            done.append("validates")
            if world.rank == 1 and done == ["saves", "validates"]:
                os.kill(os.getpid(), signal.SIGTERM)
        return dispatch(micro)

    trainer._validation.dispatch = signalled
    trainer.checkpointer.save_run = lambda progress, **how: (
        done.append("saves"), save(progress, **how))
    with pytest.raises(Stopped) as end:
        trainer.run()
    trainer.close()
    train(world, run, SyntheticDataset())
    return done, str(end.value)


def test_a_stop_waits_for_no_validation_and_a_save_neither(tmp_path):
    run = run_recipe(tmp_path, every_steps=2, train={"num_steps": 3, "validate_every_steps": 2})
    run = replace(run, data=replace(run.data, num_validation=16))
    done = ["saves", "validates", "validates", "saves"]
    assert run_ranks(stopped_in_validation, 2, run) == [
        (done, "stopped on request after step 2")] * 2
    assert [(row["step"], "validation_loss" in row) for row in read_rows(
        tmp_path / "metrics.jsonl")] == [
        (0, True), (0, False), (1, False), (2, True), (2, False), (3, True)]


def test_sigterm_to_one_rank_stops_all_with_a_checkpoint(tmp_path, whole):
    """Whose state is small, and of which nothing is pickled."""
    run = run_recipe(tmp_path, every_steps=0)
    assert run_ranks(stopped, 2, run, 1, 3) == [("stopped on request after step 5", 143)] * 2
    newest = tmp_path / "checkpoints" / "step_00000005"
    state = json.loads((newest / "state.json").read_text())
    loader = {k: v for k, v in state.items() if k not in ("rng", "model", "attempt")}
    assert len(json.dumps(loader)) < 4096 and len(json.dumps(state["attempt"])) < 8192
    assert {p.suffix for p in newest.iterdir()} == {".json", ".safetensors"}
    assert run_ranks(train_recorded, 2, run)[0] == whole()[5:]
