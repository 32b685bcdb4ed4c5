"""A save that ends at any of its file operations. Which checkpoint has to win is decided by the
files alone: the new one if it is complete, else the one that was newest before."""

from __future__ import annotations

import io
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from orchmllm.runtime.checkpoint import CheckpointError
from orchmllm.trainer import Trainer
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.resume import run_recipe, train_recorded
from tests.lib.saves import Run, live, sound_tags, spoil
from tests.lib.synthetic import SyntheticDataset

pytestmark = pytest.mark.dist


# How a folder came about -> (resume, step to save, tag that was newest before).
def of_another_run(root: Path, keep_last: int) -> tuple:
    Run(root, "never", keep_last).save(5, "a5").save(6, "a6")
    return "never", 6, "a6"


def of_a_branch(root: Path, keep_last: int) -> tuple:
    Run(root, "never", 2).save(4, "a4").save(6, "a6")
    return str(root / "step_00000004"), 6, "a6"


def of_the_same_run(root: Path, keep_last: int) -> tuple:
    Run(root, "never", keep_last).save(4, "a4").save(5, "a5").save(6, "a6")
    return "auto", 7, "a6"


def over_a_damaged_one(root: Path, keep_last: int) -> tuple:
    Run(root, "never", 2).save(5, "a5").save(6, "a6")
    spoil(root / "step_00000006")
    return "auto", 6, "a5"


def with_a_damaged_one_among_those_kept(root: Path, keep_last: int) -> tuple:
    Run(root, "never", 3).save(4, "a4").save(5, "a5").save(6, "a6")
    spoil(root / "step_00000005")
    return "auto", 7, "a6"


STORIES = (of_another_run, of_a_branch, of_the_same_run, over_a_damaged_one,
           with_a_damaged_one_among_those_kept)


class Killed(BaseException):
    """What stands for SIGKILL: nobody catches it."""


class Killer:
    """Counts the file operations of the thread that saves: changes of names, fsync and every write.
    Calls `die` before the one with number `at`, a write half done, and before all later ones.

    power: the machine lost its power. What was written and not synced is cut in half, and what was
    renamed is undone where the folder was not synced."""

    NAMES = ("rename", "replace", "unlink", "rmdir", "mkdir", "fsync")

    def __init__(self, at: int, die: Callable[[], None], *, power: bool = False) -> None:
        self.at, self.die, self.power = at, die, power
        self.count = 0
        self.did: dict[str, int] = {}  # operation -> how often it was begun
        self._original = {n: getattr(os, n) for n in self.NAMES}
        self._open = io.open
        self._unsynced: set[int] = set()  # inodes
        self._renamed: list[tuple[str, str]] = []

    def __enter__(self) -> Killer:
        for name in self.NAMES:
            setattr(os, name, self._counted(name))
        io.open = self._opened
        return self

    def __exit__(self, *_) -> None:
        for name, original in self._original.items():
            setattr(os, name, original)
        io.open = self._open

    def _begin(self, name: str, half: Callable[[], object] = lambda: None) -> None:
        if threading.current_thread().name != "orchmllm-checkpoint":
            return
        self.count += 1
        self.did[name] = self.did.get(name, 0) + 1
        if self.count >= self.at:  # nothing happens after it either
            if self.count == self.at:
                half()
            self.die()

    def _counted(self, name: str):
        original = self._original[name]

        def counted(*args, **kwargs):
            self._begin(name)
            if name == "fsync":
                path = os.readlink(f"/proc/self/fd/{args[0]}")
                self._unsynced.discard(os.fstat(args[0]).st_ino)
                self._renamed = [(a, b) for a, b in self._renamed if os.path.dirname(b) != path]
            result = original(*args, **kwargs)
            if name in ("rename", "replace"):
                self._renamed.append((os.path.abspath(args[0]), os.path.abspath(args[1])))
            return result

        return counted

    def _opened(self, file, mode="r", *args, **kwargs):
        stream = self._open(file, mode, *args, **kwargs)
        return Writes(stream, self) if {*mode} & {*"wa+x"} else stream

    def wrote(self, stream, data) -> None:
        self._begin("write", lambda: (stream.write(data[:len(data) // 2]), stream.flush()))
        self._unsynced.add(os.fstat(stream.fileno()).st_ino)

    def lose_power(self, root: Path) -> None:
        """To be called after the death and without this object's patches."""
        for path in root.rglob("*") if self.power else ():
            if path.is_file() and path.stat().st_ino in self._unsynced:
                os.truncate(path, path.stat().st_size // 2)
        for old, new in reversed(self._renamed if self.power else ()):
            if os.path.exists(new) and not os.path.exists(old):
                os.rename(new, old)


class Writes:
    """An open file whose writes are counted."""

    def __init__(self, stream, killer: Killer) -> None:
        self._stream, self._killer = stream, killer

    def __enter__(self) -> Writes:
        return self

    def __exit__(self, *_) -> None:
        self._stream.close()

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, data) -> int:
        self._killer.wrote(self._stream, data)
        return self._stream.write(data)


def die() -> None:
    raise Killed


def cut_off_everywhere(world, folder: Path, stories: tuple, keep_last: int, power: bool
                       ) -> dict[str, dict]:
    """story -> number of the file operations of a save, each of which ended one."""
    counts = {}
    for story in stories:
        before = folder / story.__name__
        resume, step, previous = story(before, keep_last)
        spoiled = {*live(before)}.difference(sound_tags(before))
        at, killer = 0, None
        while killer is None or killer.count >= at:
            at += 1
            root = before.with_name(f"{story.__name__}_{at}")
            shutil.copytree(before, root)
            run = Run(root, resume.replace(str(before), str(root)), keep_last)
            with Killer(at, die, power=power) as killer:
                try:
                    run.save(step, "new")
                except (Killed, CheckpointError) as e:  # torch wraps what happens in its writer
                    assert isinstance(e, Killed) or "Killed" in str(e)
            killer.lose_power(root)
            found = sound_tags(root)
            want = "new" if "new" in found.values() else previous
            where = f"{story.__name__}, cut off at {at}, {killer.did}: {found}"
            assert want in found.values(), where
            assert {*live(root)} <= {*found} | spoiled, f"{where}: {live(root)}"
            again = Run(root, "auto", keep_last)
            assert again.start == want, f"{where}: resumed {again.start}"
            again.save(step + 1, "next")  # over whatever is lying around
            assert Run(root, "auto", keep_last).start == "next", where
            after = sound_tags(root)
            assert sum(not n.startswith("aside") for n in after) <= keep_last + (
                resume not in ("auto", "never")), f"{where}: {after}"
            assert {*live(root)} <= {*after}, f"{where}: {after}"
            assert not [p for p in root.iterdir() if p.name.startswith(".")], where
            shutil.rmtree(root)
        assert want == "new"
        counts[story.__name__] = killer.did
    return counts


@pytest.mark.parametrize("stories, keep_last, power", [
    (STORIES[2:4], 1, True), *(pytest.param(STORIES, *case, marks=pytest.mark.slow)
                               for case in ((1, False), (2, False), (1, True), (2, True)))])
def test_a_save_cut_off_at_any_file_operation(tmp_path, stories, keep_last, power):
    (counts,) = run_ranks(cut_off_everywhere, 1, tmp_path, stories, keep_last, power)
    for story, did in counts.items():
        # the shard, state, manifest and pointer; the shard, state, manifest, staged, root (twice or
        # more), pointer; the folder and the pointer, and what the story sets aside or deletes
        assert did["write"] >= 4 and did["fsync"] >= 8 and did["mkdir"] >= 1, (story, did)
        fewest = 2 if story == "with_a_damaged_one_among_those_kept" else 3
        assert did["rename"] >= fewest, (story, did)


POINTS = 10


def killed_in_a_save(world, run, at: int) -> int:
    """SIGKILL of rank 0 at a file operation of the save after step 4; the number of operations."""
    killer = Killer(at, lambda: os.kill(os.getpid(), signal.SIGKILL))

    def on_step(step, row: dict) -> None:
        if world.rank == 0 and step.index == 3:
            trainer.checkpointer.wait()
            killer.__enter__()
        elif world.rank == 0 and step.index == 4:
            trainer.checkpointer.wait()
            killer.__exit__()

    trainer = Trainer(run, world, dataset=SyntheticDataset(), on_step=on_step)
    trainer.run()
    return killer.count


@pytest.mark.slow
def test_real_training_goes_on_from_ten_of_the_points(tmp_path):
    whole = run_ranks(train_recorded, 2, run_recipe(tmp_path / "whole", every_steps=-1))[0]
    count = run_ranks(killed_in_a_save, 2, run_recipe(tmp_path / "all", keep_last=1), 10**6)[0]
    assert count > POINTS
    for point in range(POINTS):
        run = run_recipe(tmp_path / str(point), keep_last=1)
        with pytest.raises(RankFailure) as failure:
            run_ranks(killed_in_a_save, 2, run, 1 + point * (count - 1) // (POINTS - 1))
        assert failure.value.errors[0][0] == "Died"
        root = Path(run.run.dir, "checkpoints")
        done = 4 if (root / "step_00000004" / "manifest.json").is_file() else 3
        assert run_ranks(train_recorded, 2, run)[0] == whole[done:]
