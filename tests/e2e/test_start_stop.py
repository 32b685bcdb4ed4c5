"""What a run says at once, and how it ends when it is interrupted or its reader leaves while it
starts. Moments are told by what the process does, not by time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import psutil
import pytest
import torch

from orchmllm import launch, train
from orchmllm.launch import exit_with
from orchmllm.runtime import local_ranks, preflight
from orchmllm.train import main
from tests.lib.commands import ROOT, train_args
from tests.lib.launched import Command

pytestmark = pytest.mark.dist


def start(data: Path, folder: Path, *options: str) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, *options, *train_args(data, folder)], cwd=ROOT,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_launcher_reads_an_error_whole_or_not_at_all(tmp_path, monkeypatch, capfd):
    """torchrun's agent fails by a file that is empty. Threads of a rank may report together."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(launch.report_failure, ["it failed"] * 64))
    assert json.loads(path.read_text())["message"]["message"] == "it failed"
    assert [*tmp_path.iterdir()] == [path]
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(os, "replace", Mock(side_effect=SystemExit))  # as if it were killed before
        launch.report_failure("another")
    assert json.loads(path.read_text())["message"]["message"] == "it failed"
    assert not capfd.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "none" / "error.json"))
    launch.report_failure("nowhere to write")
    assert capfd.readouterr().err == "nowhere to write\n"


@pytest.mark.parametrize("flags, num, also", [
    ((), 2, ""), (("--ranks", "4"), 4, "--ranks 4 is what starts, not launch.nproc_per_node=2 of "
                  "the recipe\n")])
def test_ranks_data_and_folder_are_said_before_torch_is_imported(
        tmp_path, demo_corpus, flags, num, also):
    code = ("import sys; sys.modules['torch'] = None; from orchmllm.train import main; "
            "main(sys.argv[1:])")
    out = subprocess.run(
        [sys.executable, "-c", code, *train_args(demo_corpus, tmp_path / "run")[2:], *flags],
        cwd=ROOT, capture_output=True, text=True)
    assert out.stdout == (f"{num} ranks; data {demo_corpus}; run folder {tmp_path / 'run'}\n"
                          + also), out.stderr
    assert "PyTorch was not found" in out.stderr


def test_ranks_of_a_launcher_are_not_changed(tmp_path, demo_corpus, monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2",
                        "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(ROOT)
    assert main([*train_args(demo_corpus, tmp_path / "run")[2:], "--ranks", "3"]) == 2
    assert "--ranks 3, but the launcher has started 2 ranks" in capsys.readouterr().err


@pytest.mark.parametrize("rank, looks", [(0, True), (1, False), (2, False)])
def test_rank_0_looks_at_the_data_and_the_first_one_of_a_machine_at_it(
        rank, looks, tmp_path, demo_corpus, monkeypatch):
    for name, value in {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": rank % 2,
                        "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("ORCHMLLM_LEDGERS", "")  # which rank 0 sets
    monkeypatch.chdir(ROOT)
    checked, started = [], []
    monkeypatch.setattr(preflight, "checks", lambda *_: checked.append(1) or [])
    monkeypatch.setattr(train, "run_rank", lambda recipe, world, *_: started.append(world) or 0)
    assert main(train_args(demo_corpus, tmp_path / "run")[2:]) == 0
    assert len(checked) == (rank % 2 == 0)
    assert (json.loads(started[0].ledgers) != []) == looks


def test_that_ranks_share_cores_is_said_before_they_start(monkeypatch):
    class Enough(Exception):
        pass

    said: list[str] = []
    monkeypatch.setattr(local_ranks, "interrupt_quietly", lambda: None)
    monkeypatch.setattr(local_ranks, "_set_environment", Mock(side_effect=Enough))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for num_ranks in (1, 500_000):
        with pytest.raises(Enough):
            local_ranks.run_local("none", [], num_ranks, log=said.append)
    assert [line.split(" cores")[0] for line in said if "cores" in line] == [
        f"500000 ranks share {os.cpu_count()}"]


def test_each_request_to_stop_becomes_sigterm_of_the_ranks(capfd):
    """A terminal that is closed asks, too, unless nohup said that it does not."""
    class Asked(Exception):
        pass

    handlers = {number: signal.getsignal(number) for number in launch.STOP_SIGNALS}
    asked = []
    try:
        for number in launch.STOP_SIGNALS:
            requests = local_ranks._StopRequests(Asked)
            with pytest.raises(Asked) as error:
                signal.raise_signal(number)
            asked.append((requests.signal, error.value.args[1]))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert asked == [(number, signal.SIGTERM) for number in launch.STOP_SIGNALS]
    assert signal.SIGUSR1 in launch.STOP_SIGNALS and 128 + signal.SIGUSR1 in local_ranks.STOPPED
    ask = ("import signal; signal.signal(signal.SIGHUP, signal.{}); from orchmllm import launch; "
           "print(signal.SIGHUP in launch.STOP_SIGNALS)")
    assert [subprocess.run([sys.executable, "-c", ask.format(how)], cwd=ROOT, capture_output=True,
                           text=True).stdout for how in ("SIG_DFL", "SIG_IGN")] == [
        "True\n", "False\n"]


def test_ranks_get_the_time_that_a_step_and_a_save_take(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    local_ranks._set_environment(2, 1)
    assert int(os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) == local_ranks.STOP_TIMEOUT_S > 300
    os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = "7"
    local_ranks._set_environment(2, 1)
    assert os.environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "7"


@pytest.mark.parametrize("trains", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_reader_that_leaves_is_no_error(tmp_path, demo_corpus, trains):
    """`| head -1`, while the launcher starts and while ranks train: these save before they go."""
    process = Command(*train_args(demo_corpus, tmp_path / "run", "train.num_steps=40")[1:])
    shown = [process.stdout.readline()]
    while trains and not shown[-1].startswith("step "):
        shown.append(process.stdout.readline())
        assert shown[-1], shown
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == 141, shown
    if trains:
        assert any(line.startswith(("no GPU found", "GPUs: ")) for line in shown), shown
        assert (tmp_path / "run" / "checkpoints" / "latest").is_file()


FULL = ("warning: stdout cannot be written (No space left on device): nothing more is shown, and "
        "the command goes on\n")


def test_a_disk_that_is_full_is_told_once():
    """What a run does then: tests/runtime/test_ends.py."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", "from orchmllm.launch import say; "
                               "say('a'); say('b')"], cwd=ROOT, stdout=full,
                              stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, FULL)


@pytest.mark.slow
@pytest.mark.parametrize("stdout, warned", [(">/dev/full", FULL), (">&-", "")])
def test_an_output_that_takes_nothing_ends_nothing(tmp_path, demo_corpus, stdout, warned):
    """A disk that is full, and an output that was closed before the start."""
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {stdout}', "sh", sys.executable,
         *train_args(demo_corpus, tmp_path / "run", "train.num_steps=2",
                     "launch.nproc_per_node=1")], cwd=ROOT,
        stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (0, warned)
    assert (tmp_path / "run" / "checkpoints" / "latest").read_text() == "step_00000002"


def importing(process: subprocess.Popen) -> str:
    """Until the process imports what takes long."""
    for line in process.stderr:
        if line.endswith("pydantic_core._pydantic_core\n"):
            return "interrupted\n"
    raise AssertionError("it ended")


def before_torch(process: subprocess.Popen) -> str:
    """Until the launcher is about to import torch."""
    assert process.stdout.readline()
    return "interrupted\n"


def ranks_starting(process: subprocess.Popen) -> str:
    while not psutil.Process(process.pid).children():
        assert process.poll() is None
        time.sleep(0.01)
    return "interrupted (Ctrl-C): all ranks have ended\n"


@pytest.mark.parametrize("until", [importing, before_torch, ranks_starting])
def test_ctrl_c_while_it_starts_is_one_line(tmp_path, demo_corpus, until):
    options = ("-X", "importtime") if until is importing else ()
    process = (Command(*train_args(demo_corpus, tmp_path / "run")[1:]) if until is ranks_starting
               else start(demo_corpus, tmp_path / "run", *options))
    expected = until(process)
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGINT)
    stderr = process.stderr.read()  # communicate() would leave out what `until` has buffered
    process.wait()
    said = [x for x in stderr.splitlines(True)
            if not x.startswith(("import time:", "Stopping after "))]
    assert "".join(said) == expected and process.returncode == 130
    assert not psutil.wait_procs(children, timeout=60)[1]


UNSAVED = """
import os, sys, time
from orchmllm import launch
from orchmllm.runtime.local_ranks import run_local
from orchmllm.runtime.stop import StopSignal

if "RANK" not in os.environ:
    sys.exit(run_local("unsaved", [], 2, cpu_only=True))
with StopSignal(None) as stop:
    open(f"ready{os.environ['RANK']}", "w").close()
    while not stop.asked:
        time.sleep(0.01)
    launch.exit_now(1, "error: no room for the checkpoint")
"""


@pytest.mark.parametrize("launcher, ends", [
    ((), ["interrupted (SIGTERM): all ranks have ended", "error: no room for the checkpoint",
          "all ranks were stopped)"]),
    (("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
     ["error: no room for the checkpoint"])], ids=["alone", "torchrun"])
def test_an_error_of_the_save_on_stopping_is_told(tmp_path, launcher, ends):
    (tmp_path / "unsaved.py").write_text(UNSAVED)
    process = subprocess.Popen(
        [sys.executable, *launcher, "unsaved.py"], cwd=tmp_path, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"})
    while len([*tmp_path.glob("ready*")]) < 2:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    stderr = process.communicate()[1]
    assert process.returncode == 1 and stderr.count("error: no room") == 1, stderr
    lines = iter(stderr.splitlines())
    assert all(any(line.endswith(end) for line in lines) for end in ends), stderr


def test_ctrl_c_of_a_command_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(launch, "_exit_code", None)  # afterwards, too: pytest is no such command

    def interrupted(arguments):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda arguments: 3)
    assert ended.value.code == 3


A_RANK = """
import atexit, socket, sys
from orchmllm import launch

class Left:
    def __del__(self):
        print("taken apart", file=sys.stderr, flush=True)

left = Left()
atexit.register(print, "closed")

def main(arguments):
    if "alone" not in arguments:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with launch.process_group(launch.World(0, 1, 0, 1, "127.0.0.1", port), 60.0):
            print("trained")
    return 3

launch.exit_with(main)
"""


@pytest.mark.parametrize("alone", [False, True])
def test_the_interpreter_of_a_rank_is_not_taken_apart(alone):
    """Meanwhile a thread of gloo may end the process with SIGABRT. What is called at exit is."""
    done = subprocess.run([sys.executable, "-c", A_RANK, *["alone"] * alone],
                          cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stdout == "trained\n" * (not alone) + "closed\n"
    assert ("taken apart" in done.stderr) == alone
