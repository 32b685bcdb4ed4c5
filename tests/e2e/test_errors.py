"""Errors cross ranks: whatever happens to one, all end soon with the same text, and nothing is left
running. Real processes under the real launcher."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil
import pytest

from orchmllm.runtime.lineage import problem_of
from orchmllm.runtime.metrics import read_rows
from tests.lib.commands import train_args
from tests.lib.launched import Command, run_local

pytestmark = pytest.mark.dist


def run(tmp_path: Path, fault: str, num_ranks: int) -> tuple[str, int]:
    """(stderr, exit code) of the run."""
    command = Command("tests.lib.faulty_train", str(tmp_path), fault, str(num_ranks))
    _, stderr = command.communicate()
    left = [p for p in psutil.process_iter(["cmdline"])
            if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not left, f"still running: {left}"
    return stderr, command.returncode


def forked(tmp_path: Path, fault: str, num_ranks: int, capsys) -> tuple[str, int]:
    """`run` without the launcher: the same ranks as forks, which start faster."""
    code = run_local("tests.lib.faulty_train", [str(tmp_path), fault], num_ranks)
    return capsys.readouterr().err, code


@pytest.mark.parametrize("fault, text, launcher", [
    pytest.param("raise", "rank 1 failed at step 3, phase data: KeyError: 'user hook broke'", True,
                 marks=pytest.mark.slow),
    ("raise in backward", "rank 1 failed at step 3, phase vision: ArithmeticError: hook broke in "
                          "backward", False),
    pytest.param("raise in data", "error: step 0: rank 1 failed: LookupError: no such thing",
                 False, marks=pytest.mark.slow),
])
def test_an_exception_on_one_rank_ends_all(tmp_path, fault, text, launcher, capsys):
    stderr, code = run(tmp_path, fault, 2) if launcher else forked(tmp_path, fault, 2, capsys)
    assert code == 1 and text in stderr, stderr
    assert stderr.count("error: ") == 1, stderr


def test_a_run_whose_folder_was_deleted_ends_with_its_log_and_checkpoint(tmp_path, capfd):
    code = run_local("tests.lib.faulty_train", [str(tmp_path / "run"), "folder deleted"], 2)
    stderr = capfd.readouterr().err
    assert code == 0, stderr
    assert "with all that was in it, was deleted during the run" in stderr
    assert "metrics.jsonl was deleted: its rows so far are lost" in stderr
    rows = read_rows(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [4, 5, 6, 7]
    assert problem_of(tmp_path / "run" / "checkpoints" / "step_00000008") == ""


def test_a_run_whose_folder_was_taken_over_saves_beside_it(tmp_path, capfd):
    """At the end of the next step, on all ranks, and nothing in what is another run's now."""
    code = run_local("tests.lib.faulty_train", [str(tmp_path / "run"), "folder taken"], 2)
    stderr = capfd.readouterr().err
    assert code == 1 and stderr.count("error: ") == 1, stderr
    (rescued,) = tmp_path.glob("run.rescued_step_5_*")
    assert f"this one stopped after step 5; its state is in {rescued}: run.dir=" in stderr
    assert problem_of(rescued / "checkpoints" / "step_00000005") == ""
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert '"another"' in (tmp_path / "run" / "run.lock").read_text()


def test_a_killed_rank_ends_all(tmp_path):
    stderr, code = run(tmp_path, "kill", 2)
    assert code != 0 and "rank 1 was killed by SIGKILL" in stderr, stderr


@pytest.mark.parametrize("fault, phase", [
    ("stall in vision", "phase vision"),
    pytest.param("stall after the forward", "phase llm", marks=pytest.mark.slow),
    pytest.param("stall in data", "phase data", marks=pytest.mark.slow)])
def test_a_late_rank_is_named(tmp_path, fault, phase, capsys):
    stderr, code = forked(tmp_path, fault, 3, capsys)
    assert code == 1, stderr
    assert "no progress for" in stderr and "rank 1 is late: step" in stderr, stderr
    assert phase in stderr and "faulty_train.py" in stderr, stderr
    assert "rank 0 is late" not in stderr and "rank 2 is late" not in stderr
    hang = tmp_path / "hang"
    for rank in range(3):
        assert "Thread" in (hang / f"stacks_rank{rank}.txt").read_text()
        assert (hang / f"flight_recorder_rank{rank}.json").stat().st_size > 100


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, 40 * 1024))


def test_disk_full_during_a_save(tmp_path, demo_corpus, capsys):
    """A small file size limit stands in for a full disk."""
    args = train_args(demo_corpus, tmp_path / "run", "checkpoint.every_steps=2")
    code = run_local("orchmllm.train", args[2:], 2, before=small_files)
    stderr = capsys.readouterr().err
    assert code == 1
    assert "checkpoint 2: rank" in stderr and "File too large" in stderr, stderr
    assert "Traceback" not in stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))
