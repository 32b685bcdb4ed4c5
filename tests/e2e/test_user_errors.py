"""What goes wrong on the first day: each ends with one clear message, an exit code, and no orphans.
The real command line on the demo corpus."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest

from orchmllm.launch import exit_with
from tests.lib.commands import train_args, train_demo
from tests.lib.launched import run_local

pytestmark = pytest.mark.dist


@pytest.fixture
def data(demo_corpus, tmp_path) -> Path:
    return shutil.copytree(demo_corpus, tmp_path / "data")


def rows(data: Path) -> list[dict]:
    return [json.loads(line) for line in (data / "data.jsonl").read_text().splitlines()]


def rewrite(data: Path, changed: list[dict]) -> None:
    (data / "data.jsonl").write_text("\n".join(json.dumps(r) for r in changed) + "\n")


def clear(code: int, stderr: str, *texts: str) -> None:
    assert code not in (0, None)
    assert all(t in stderr for t in texts), stderr
    assert "Traceback" not in stderr and len(stderr.splitlines()) <= 4, stderr


def test_batch_size_0(tmp_path, data):
    clear(*train_demo(tmp_path, data, "train.batch_size=0")[:2], "train.batch_size")


def test_missing_data_file(tmp_path):
    clear(*train_demo(tmp_path, tmp_path / "nowhere")[:2], "nowhere")


@pytest.mark.slow
def test_placeholder_count(tmp_path, data):
    changed = rows(data)
    changed[3]["conversations"][0]["value"] = "<image><image><image><image> what?"
    rewrite(data, changed)
    run = train_demo(tmp_path, data, "data.strict=true", "train.num_steps=8")
    clear(*run[:2], "row 4", "<image>")


def test_read_only_run_folder(tmp_path, data):
    (tmp_path / "run").write_text("a file where the folder should be")
    clear(*train_demo(tmp_path, data)[:2], "run")


@pytest.mark.slow
def test_smaller_than_the_ranks(tmp_path, data):
    """One row on two ranks is legal: batches wrap around."""
    rewrite(data, rows(data)[:1])
    code, stderr, stdout = train_demo(tmp_path, data, "balance.enabled=false")
    assert code == 0 and "step 4/4" in stdout, stderr


@pytest.mark.slow
def test_corrupt_jpeg_and_truncated_wav_are_quarantined(tmp_path, data):
    """Decoding fails after planning: their examples are not learnt from, the run goes on."""
    images = sorted(p for p in (data / "images").iterdir() if p.suffix == ".jpg")[:2]
    for path in images:
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    code, stderr, stdout = train_demo(tmp_path, data, "train.num_steps=8",
                                      "data.max_failed_percent=50")
    assert code == 0, stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "quarantine.jsonl").open()]
    assert {Path(line["file"]).name for line in lines} <= {p.name for p in images}
    assert all(line["source"] and line["row"] and line["reason"] for line in lines)


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * 1024, 40 * 1024))


def test_disk_full_during_a_save(tmp_path, data, capsys):
    """A small file size limit stands in for a full disk; the first checkpoint stays."""
    args = train_args(data, tmp_path / "run", "checkpoint.every_steps=2")
    code = run_local("orchmllm.train", args[2:], 2, before=small_files)
    stderr = capsys.readouterr().err
    assert code == 1
    assert "checkpoint 2: rank" in stderr and "File too large" in stderr, stderr
    assert "Traceback" not in stderr
    assert not list((tmp_path / "run" / "checkpoints").glob("step_*"))


def test_ctrl_c_of_a_command_is_one_line(capsys):
    def interrupted(arguments):
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        exit_with(interrupted)
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"
    with pytest.raises(SystemExit) as ended:
        exit_with(lambda arguments: 3)
    assert ended.value.code == 3
