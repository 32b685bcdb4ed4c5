"""One run at a time in a run folder: the second one fails at once and names the first."""

from __future__ import annotations

import fcntl
import io
import json
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from orchmllm import launch
from orchmllm.runtime import run_lock
from orchmllm.runtime.run_lock import FolderInUse, check_folder
from orchmllm.train import main
from tests.lib.commands import ROOT, TINY, demo_of, python

HOLD = ("import sys, time; from pathlib import Path; "
        "from orchmllm.runtime.run_lock import lock_folder; "
        "unlock = lock_folder(Path(sys.argv[1]), taken=print); print('locked', flush=True); "
        "sys.stdin.read()")
lock_folder = partial(run_lock.lock_folder, taken=os.abort)


@pytest.fixture
def holder(tmp_path):
    """A process that holds the lock of tmp_path / run."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], cwd=ROOT,
                               stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    yield process
    process.kill()
    process.wait()


@contextmanager
def renewed(path: Path) -> Iterator[None]:
    """As the process that holds it does it, all the time."""
    done = threading.Event()

    def renew() -> None:
        while not done.wait(0.05):
            os.utime(path)

    thread = threading.Thread(target=renew)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def named(text: str, process: subprocess.Popen) -> bool:
    return f"(process {process.pid} on host {socket.gethostname()})" in text


def test_the_second_run_fails_before_anything_starts(tmp_path, holder, demo_corpus, capsys):
    run = tmp_path / "run"
    arguments = [str(ROOT / "recipes" / "demo.yaml"), "data.path=nowhere",
                 f"model.config={demo_corpus}/model", f"run.dir={run}"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: run.dir: ") and named(error, holder), error
    with pytest.raises(FolderInUse):
        lock_folder(run, patience_s=0.3)
    assert sorted(p.name for p in run.iterdir()) == ["run.lock"]


def test_a_folder_on_a_full_disk_is_told(tmp_path):
    """A file that cannot grow: the same error as that of a full disk. Rank 0 alone would see it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
        with pytest.raises(FolderInUse, match="run cannot be written .*File too large.*; choose"):
            lock_folder(tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_dead_holder_does_not_block(tmp_path, holder):
    run = tmp_path / "run"
    holder.kill()
    holder.wait()
    check_folder(run)
    unlock = lock_folder(run)
    assert json.loads((run / "run.lock").read_text()) == {
        "host": socket.gethostname(), "pid": os.getpid(), "machine": launch.machine()}
    unlock()
    assert not list(run.iterdir())
    lock_folder(run)()  # and once more


def test_a_folder_that_became_read_only_keeps_the_file_and_not_the_lock(tmp_path, monkeypatch):
    unlock = lock_folder(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", Mock(side_effect=PermissionError))
        unlock()
    check_folder(tmp_path)
    lock_folder(tmp_path)()
    assert not list(tmp_path.iterdir())


def test_a_file_that_its_last_holder_removes_meanwhile_is_no_lock(tmp_path, monkeypatch):
    """Between opening the file and locking it: a third run would lock the one at its path."""
    path, lock = tmp_path / "run.lock", fcntl.lockf

    def removed_first(*arguments) -> None:
        monkeypatch.setattr(fcntl, "lockf", lock)
        path.unlink()
        lock(*arguments)

    monkeypatch.setattr(fcntl, "lockf", removed_first)
    unlock = lock_folder(tmp_path)
    assert json.loads(path.read_text())["pid"] == os.getpid()
    unlock()


def test_a_clock_that_is_wrong_takes_nothing_over(tmp_path, monkeypatch):
    """Times of files are those of the file system's clock."""
    (tmp_path / "run.lock").write_text(json.dumps({"host": "other", "pid": 7}))
    monkeypatch.setattr(run_lock, "_lock", lambda *_: False)
    monkeypatch.setattr(run_lock, "time", SimpleNamespace(
        time=lambda: 1e12, monotonic=time.monotonic, sleep=time.sleep))
    with renewed(tmp_path / "run.lock"), pytest.raises(
            FolderInUse, match="process 7 on host other"):
        lock_folder(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["run.lock"]


@pytest.mark.parametrize("name", ["gone", socket.gethostname()])
def test_the_lock_of_a_dead_host_is_taken_over(name, tmp_path, holder, capfd, monkeypatch):
    """A file server that keeps it looks like a holder that renews nothing. A holder that was only
    away notices."""
    run, path = tmp_path / "run", tmp_path / "run" / "run.lock"
    path.write_text(json.dumps({"host": name, "pid": 7, "machine": "b"}))
    with pytest.raises(FolderInUse, match=f"process 7 on host {name}"):
        check_folder(run)
    check_folder(run, elsewhere=False)
    os.utime(path, (0, 0))
    check_folder(run)
    still_s = iter((0.5,))  # and long after it was looked at for the first time
    monkeypatch.setattr(
        run_lock, "_now", lambda folder: path.stat().st_mtime + next(still_s, 1.5))
    lost = threading.Event()
    unlock = lock_folder(run, renew_s=0.05, stale_s=1.0, taken=lost.set)
    told = capfd.readouterr().err
    assert told.count("It may be dead: waiting until its lock is renewed, or for 1 s") == 1
    assert f"locked by host {name}, which has not renewed" in told
    assert json.loads(path.read_text())["pid"] == os.getpid()
    os.utime(path, (0, 0))
    while not path.stat().st_mtime:  # until it is renewed
        time.sleep(0.01)
    another = json.dumps({"host": name, "pid": 7, "machine": "b"})
    path.unlink()
    path.write_text(another)
    assert lost.wait(60)
    unlock()
    assert path.read_text() == another


def test_a_host_that_renews_its_lock_lives(tmp_path, holder, capfd):
    path = tmp_path / "run" / "run.lock"
    path.write_text(json.dumps({"host": "other", "pid": 7, "machine": "b"}))
    with renewed(path), pytest.raises(FolderInUse, match="process 7 on host other"):
        lock_folder(tmp_path / "run")
    assert "It may be dead: waiting until its lock is renewed" in capfd.readouterr().err


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_lock_that_was_deleted_is_made_again(tmp_path, what):
    run, path = tmp_path / "run", tmp_path / "run" / "run.lock"
    with redirect_stderr(io.StringIO()) as told:  # readouterr() can lose what a thread writes
        unlock = lock_folder(run, renew_s=0.05)
        path.unlink()
        if what == "folder":
            run.rmdir()
        while "the lock is made again" not in told.getvalue():
            time.sleep(0.01)
    assert ("with all that was in it" in told.getvalue()) == (what == "folder")
    held = subprocess.run([sys.executable, "-c", HOLD, str(run)], cwd=ROOT, capture_output=True,
                          text=True, input="")
    assert f"being written by another run (process {os.getpid()} " in held.stderr
    unlock()
    assert not path.exists()


def test_a_long_pause_on_this_host_is_no_death(tmp_path, holder):
    os.utime(tmp_path / "run" / "run.lock", (0, 0))
    with pytest.raises(FolderInUse):
        lock_folder(tmp_path / "run")


def test_a_worker_that_outlives_its_rank_does_not_block(tmp_path):
    """A forked process has a copy of everything that is open."""
    reader, writer = os.pipe()
    rank = os.fork()
    if not rank:
        lock_folder(tmp_path)
        if not os.fork():
            os.close(writer)
            os.read(reader, 1)  # until the test ends
        os._exit(0)
    os.waitpid(rank, 0)
    lock_folder(tmp_path)()
    os.close(writer)
    os.close(reader)


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_of_another_launcher_end_alike(tmp_path, demo_corpus, holder):
    """torchrun's ranks meet first, then all hear what rank 0 found."""
    out = python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
                 "-m", "orchmllm.train", "recipes/demo.yaml",
                 *demo_of(demo_corpus), f"run.dir={tmp_path / 'run'}", *TINY[1:])
    assert out.returncode != 0 and named(out.stderr, holder), out.stderr
    codes = re.findall(r"exitcode  : (-?\d+) ", out.stderr)
    assert "2" in codes and set(codes) <= {"2", "-15"}, out.stderr  # -15: the launcher was faster
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["run.lock"]
