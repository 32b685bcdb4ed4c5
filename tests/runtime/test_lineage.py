"""Checkpoints of several runs and branches in one folder: which one `auto` takes and which ones go.
Checked against the files themselves."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from orchmllm.runtime.lineage import clear_leftovers, delete, leftovers, list_saved
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.resume import BATCH, run_recipe, train_recorded
from tests.lib.saves import Run, live, sound_tags, spoil
from tests.lib.synthetic import SyntheticDataset

pytestmark = pytest.mark.dist


def stories(world, folder: Path) -> None:
    """What single processes see one after another, told by the tags that they find."""
    root = folder / "branch"
    Run(root, "never", 2).save(100, "a100").save(200, "a200")
    run = Run(root, str(root / "step_00000100"), 2)
    assert run.start == "a100"
    for step in (110, 120, 130):
        run.save(step, f"b{step}")
    # the branch stays, what it left is aside, and what run.resume names is not deleted
    assert live(root) == ["step_00000100", "step_00000120", "step_00000130"]
    assert sorted(sound_tags(root).values()) == ["a100", "a200", "b120", "b130"]
    aside, *saved = run.said
    assert "step_00000200" in aside and "aside_" in aside
    assert [line.partition(" (")[0] for line in saved] == [
        f"saved step {n}: {root / f'step_00000{n}'}" for n in (110, 120, 130)]
    assert Run(root, "auto", 2).start == "b130"
    spoil(root / "step_00000130")
    assert Run(root, "auto", 2).start == "b120"
    spoil(root / "step_00000120")
    assert Run(root, "auto", 2).start == "a100"  # which led to them, and not a200
    spoil(root / "step_00000100")
    with pytest.raises(Exception, match="of other runs there are .*aside_step_00000200_save_2"):
        Run(root, "auto", 2)

    root = folder / "again and again"  # the same command, which names a checkpoint of another run
    named = str(folder / "branch" / "step_00000100")
    spoil(Path(named))  # back to what it was
    assert Run(root, named, 2).start == "a100"  # killed before it saved anything
    Run(root, named, 2).save(110, "b110")
    run = Run(root, named, 2)
    assert run.start == "b110"
    run.save(120, "b120").save(130, "b130")
    assert not [t for t in run.said if "aside" in t] and Run(root, named, 2).start == "b130"
    inner = Run(root, str(root / "step_00000120"), 2)
    assert inner.start == "b120"
    inner.save(125, "c125")
    assert Run(root, named, 2).start == "c125"  # which came from b110 too
    assert Run(root, str(root / "step_00000120"), 2).start == "c125"
    assert Run(root, str(root / "step_00000125"), 1).save(126, "d126").start == "c125"
    assert Run(root, str(root / "step_00000125"), 1).start == "d126"  # also from the newest
    for path in root.glob("step_*"):
        spoil(path)
    run = Run(root, named, 2)
    assert run.start == "a100"
    assert sum("using the one before" in x for x in run.said) == 2, run.said

    root = folder / "damaged"
    Run(root, "never", 2).save(100, "a100").save(200, "a200")
    spoil(root / "step_00000200")
    run = Run(root, "auto", 2).save(150, "b150")
    assert run.start == "a100" and sorted(sound_tags(root).values()) == ["a100", "b150"]
    assert Run(root, "auto", 2).start == "b150"

    root = folder / "old"  # kept ones are counted after they were looked at
    Run(root, "never", 9).save(1, "a1").save(2, "a2").save(3, "a3")
    spoil(root / "step_00000002")
    run = Run(root, "auto", 3).save(4, "a4")
    assert sorted(sound_tags(root).values()) == ["a1", "a3", "a4"]
    assert live(root) == ["step_00000001", "step_00000003", "step_00000004"]
    assert "step_00000002" in run.said[0] and "damaged" in run.said[0]

    root = folder / "again"
    run = Run(root, "never", 1).save(1, "a1").save(1, "never written")
    assert sound_tags(root) == {"step_00000001": "a1"}
    spoil(root / "step_00000001")
    run.save(1, "b1")
    assert sound_tags(root) == {"step_00000001": "b1"}

    root = folder / "same step"  # of a run that the branch has left
    Run(root, "never", 2).save(100, "a100").save(200, "a200")
    run = Run(root, str(root / "step_00000100"), 2).save(200, "b200")
    assert sorted(sound_tags(root).values()) == ["a100", "a200", "b200"]
    assert Run(root, "auto", 2).start == "b200"

    root = folder / "copies"  # that a user makes stay, and count as none
    run = Run(root, "never", 2).save(1, "a1").save(2, "a2")
    shutil.copytree(root / "step_00000002", root / "step_00000002_best")
    run.save(3, "a3")
    assert sorted(sound_tags(root).values()) == ["a2", "a2", "a3"]
    run = Run(root, "auto", 2).save(4, "a4").save(5, "a5")
    assert sorted(sound_tags(root).values()) == ["a2", "a4", "a5"]
    more = root / "step_00000005" / "shard-00001 (conflicted copy).safetensors"
    shutil.copy(next((root / "step_00000004").glob("*.safetensors")), more)
    run = Run(root, "auto", 2)
    assert run.start == "a4" and f"{more.name} was not saved with it: move it" in run.said[0]

    root = folder / "moved"  # while the run goes on, and put back
    run = Run(root, "never", 3).save(1, "a1").save(2, "a2")
    root.rename(folder / "elsewhere")
    run.save(3, "a3")
    for path in (folder / "elsewhere").glob("step_*"):
        path.rename(root / path.name)
    assert Run(root, "auto", 3).start == "a3"

    root = folder / "numbers"  # go on where the first ones are deleted
    Run(root, "never", 1).save(1, "a1").save(2, "a2").save(3, "a3")
    assert json.loads((root / "step_00000003" / "manifest.json").read_text())["sequence"] == 3

    root = folder / "cut off"
    Run(root, "never", 2).save(8, "a8").save(9, "a9")
    path = root / "step_00000009" / "manifest.json"
    manifest = json.loads(path.read_text())
    del manifest["run"], manifest["sequence"]  # of before runs had names
    for text, why in (("{", "JSONDecodeError"), (json.dumps(manifest), "it has no run, sequence")):
        path.write_text(text)
        run = Run(root, "auto", 2)
        assert run.start == "a8" and why in run.said[0], run.said


def test_a_checkpoint_that_cannot_be_deleted_ends_nothing(tmp_path, monkeypatch):
    """It is no checkpoint any more, and is tried again."""
    said: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", Mock(side_effect=PermissionError))
        for _ in range(2):
            (tmp_path / "step_00000001").mkdir()
            delete(tmp_path / "step_00000001", said.append)
    assert list_saved(tmp_path) == [] and len(leftovers(tmp_path)) == 2
    assert len(said) == 2 and ".old_step_00000001_" in said[0]
    clear_leftovers(tmp_path)
    assert not list(tmp_path.iterdir())


def test_branches_and_damage(tmp_path):
    run_ranks(stories, 1, tmp_path)


def contents(folder: Path) -> dict[str, tuple]:
    return {str(p.relative_to(folder)): (
        p.stat().st_mtime_ns, p.read_bytes() if p.is_file() else b"")
        for p in sorted(folder.rglob("*"))}


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def steps_of(world, run) -> list[int]:
    return [s for s, _, _ in train_recorded(world, run)]


def runs_in_one_folder(world, folder: Path) -> None:
    run = run_recipe(folder, keep_last=2, train={"num_steps": 6})
    train_recorded(world, run)
    root = folder / "checkpoints"
    assert live(root) == ["step_00000005", "step_00000006"]
    new = replace(run, run=replace(run.run, resume="never"),
                  checkpoint=replace(run.checkpoint, keep_last=1),
                  data=replace(run.data, num_validation=2),
                  train=replace(run.train, num_steps=3))
    assert steps_of(world, new) == [0, 1, 2]
    assert live(root) == ["step_00000003"] and (root / "latest").read_text() == "step_00000003"
    assert len(list(root.glob("aside_step_*"))) == 2
    last = metrics(folder)[-1]
    assert last["step"] == 3 and "validation_loss" in last
    state = json.loads((root / "step_00000003" / "state.json").read_text())
    assert state["media"]["rows"]["read"] == 3 * BATCH  # those of validation are not among them
    before = contents(folder)
    again = replace(new, run=replace(new.run, resume="auto"))
    assert steps_of(world, again) == []  # that of step 3 and not that of step 6
    assert steps_of(world, replace(again, train=replace(again.train, num_steps=2))) == []
    assert contents(folder) == before
    longer = replace(again, train=replace(again.train, num_steps=4))
    assert steps_of(world, longer) == [3]
    assert live(root) == ["step_00000004"] and metrics(folder)[-1]["step"] == 4


def test_a_run_in_another_runs_folder_and_a_finished_run(tmp_path):
    run_ranks(runs_in_one_folder, 1, tmp_path)


def branched(world, folder: Path) -> None:
    whole = run_recipe(folder / "whole", train={"num_steps": 2})
    train_recorded(world, whole)
    start = str(whole.run.folder / "checkpoints" / "step_00000001")
    run = replace(whole, run=replace(whole.run, dir=str(folder / "branch"), resume=start))
    runs = [replace(run, train=replace(run.train, num_steps=n)) for n in (2, 3, 4)]
    assert [steps_of(world, run) for run in runs[:2]] == [[1], [2]]
    shutil.rmtree(whole.run.folder)
    assert runs[2].run.start == "auto" and not [*runs[2].run.conflicts()]
    assert steps_of(world, runs[2]) == [3]
    other = replace(run.run, resume=str(folder / "branch" / "step_00000009"))
    for refused in (other, replace(run.run, dir=str(folder / "new"))):
        assert refused.start == refused.resume and "no such folder" in str([*refused.conflicts()])


def test_a_branch_goes_on_where_what_it_left_is_gone(tmp_path):
    run_ranks(branched, 1, tmp_path)


def validated(world, runs: dict) -> tuple[dict[str, list], str]:
    """(what each run trained, stopped after two steps and resumed; the error of a save while
    parameters are gathered, which gives the optimizer no state)."""
    import orchmllm.sharding.fsdp as module

    done = {}
    for name, run in runs.items():
        train_recorded(world, replace(run, train=replace(run.train, num_steps=2)))
        done[name] = train_recorded(world, run)
    kept = Trainer(runs["kept"], world, dataset=SyntheticDataset())
    module.reshard = lambda model: None
    kept.validate()
    try:
        kept.checkpointer.save_run(kept.progress)
    except ValueError as e:
        assert not kept.optimizer.state
        return done, str(e)
    return done, ""


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    newest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text()
    return {f"{p.name}/{k}": t for p in newest.glob("*.safetensors")
            for k, t in load_file(p).items()}


def test_validation_leaves_nothing_gathered(tmp_path):
    """Parameters and moments of a run that validates before it saves are those of FSDP's default,
    which frees what validation gathered; with a frozen encoder too. The run is resumed from it."""
    runs = {}
    for name in ("kept", "freed"):
        base = run_recipe(tmp_path / name, train={"num_steps": 3}, every_steps=0)
        runs[name] = replace(
            base, data=replace(base.data, num_validation=3),
            model=replace(base.model, vision=replace(base.model.vision, frozen=True)),
            fsdp=replace(base.fsdp, compute_dtype="bfloat16",
                         reshard_after_forward=name == "freed"))
    done, refusal = run_ranks(validated, 2, runs)[0]
    assert done["kept"] == done["freed"] and [s for s, _, _ in done["kept"]] == [2]
    kept, freed = tensors_of(tmp_path / "kept"), tensors_of(tmp_path / "freed")
    assert kept.keys() == freed.keys()
    assert all(t.dtype == torch.float32 and torch.equal(t, freed[k]) for k, t in kept.items())
    assert sum(t.any() for k, t in kept.items() if "exp_avg." in k) > 20
    assert "is not the one that the optimizer updates" in refusal


def other_batches(world, run) -> None:
    first = train_recorded(world, replace(run, train=replace(run.train, num_steps=2)))

    def changed(**keys):
        return replace(run, train=replace(run.train, **keys))

    ((step, _, examples),) = train_recorded(world, changed(batch_size=2, accumulation_steps=2))
    assert step == 2 and len(examples) == 4
    assert not {*examples} & {i for _, _, ids in first for i in ids}
    with pytest.raises(ValueError, match="batch_size is 4, the checkpoint has 2: .*batch_size=4, "):
        train_recorded(world, changed(batch_size=4, accumulation_steps=2, num_steps=4))
    ((step, _, examples),) = train_recorded(
        world, changed(batch_size=3, global_batch_size=4, num_steps=4))
    assert step == 3 and len(examples) == 4


def test_another_batch_is_refused_or_honoured(tmp_path):
    run_ranks(other_batches, 1, run_recipe(
        tmp_path, train={"num_steps": 3, "global_batch_size": 0, "batch_size": 4}))
