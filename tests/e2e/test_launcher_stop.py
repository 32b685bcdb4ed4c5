"""A signal to the launcher: every rank saves after its step."""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from orchmllm.launch import SAME_REQUEST_S
from tests.lib.commands import ROOT, train_args

pytestmark = pytest.mark.dist
LONG = ["train.num_steps=16", "data.prefetch=2", "data.num_workers=2", "train.batch_size=1"]


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [(r["step"], r["loss"]) for r in map(json.loads, lines)]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def started(folder: Path, data: Path, *, torchrun: bool = False) -> subprocess.Popen:
    """The launcher of a run that has done a few steps, and does not end before `process.go()`: from
    then on nobody reads its pipe, which holds what it prints of fewer steps than are left."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    process = subprocess.Popen(
        [*(["bash", "scripts/launch/torchrun.sh"] if torchrun else [sys.executable]),
         *train_args(data, folder, *LONG)[2 * torchrun:]], cwd=ROOT,
        env=os.environ | {"NPROC": "2", "MASTER_PORT": str(free_port()), "PYTHONPATH": str(ROOT),
                          "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=writer, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    shown = b""
    while b"step 3/" not in shown:
        if select.select([reader], [], [], 1)[0]:
            shown += os.read(reader, 4096)
        assert process.poll() is None, process.communicate()
    os.write(writer, b" " * 2500)
    os.close(writer)
    process.go = threading.Thread(target=os.fdopen(reader, "rb").read, daemon=True).start
    return process


def left(folder: Path) -> list[psutil.Process]:
    return [p for p in psutil.process_iter(["cmdline"])
            if str(folder) in " ".join(p.info["cmdline"] or [])]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_the_launcher_stops_its_run(number, tmp_path, demo_corpus):
    """How ranks resume after a signal: tests/runtime/test_resume.py."""
    cut = tmp_path / "cut"
    process = started(cut, demo_corpus)
    process.send_signal(number)
    process.go()
    stderr = process.communicate()[1]
    assert process.returncode == 128 + number, stderr
    assert not left(cut)
    done = losses(cut)
    assert 3 <= len(done) < 16
    assert (cut / "checkpoints" / "latest").read_text() == f"step_{len(done):08d}"
    assert not list(cut.glob("*.lock"))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_signal_to_torchrun_stops_its_run(number, tmp_path, demo_corpus):
    cut = tmp_path / "cut"
    process = started(cut, demo_corpus, torchrun=True)
    process.send_signal(number)
    process.go()
    stderr = process.communicate()[1]
    done = losses(cut)
    assert process.returncode == 1 and 3 <= len(done) < 16, stderr
    assert (cut / "checkpoints" / "latest").read_text() == f"step_{len(done):08d}", stderr


@pytest.mark.slow
def test_the_first_ctrl_c_is_answered_and_a_second_one_ends_it_at_once(tmp_path, demo_corpus):
    process = started(tmp_path / "cut", demo_corpus)
    ranks = [p for p in psutil.Process(process.pid).children() if p.is_running()]
    for rank in ranks:  # none of them reaches the end of its step
        os.kill(rank.pid, signal.SIGSTOP)
    process.send_signal(signal.SIGINT)
    answer = process.stderr.readline()
    assert answer == "Stopping after this step and saving; press Ctrl-C again to stop now\n"
    time.sleep(SAME_REQUEST_S)
    process.send_signal(signal.SIGINT)
    assert process.communicate()[1] == "all ranks were killed\n"
    assert process.returncode == 130 and len(losses(tmp_path / "cut")) < 16
    while left(tmp_path / "cut"):  # until the test's time is up
        time.sleep(0.1)
