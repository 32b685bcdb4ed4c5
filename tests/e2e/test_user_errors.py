"""What goes wrong on the first day: each ends with one clear message, an exit code, and no orphans.
The real command line on the demo corpus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchmllm.launch import exit_with

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]
ROOT = Path(__file__).parents[2]
TINY = [
    "launch.nproc_per_node=2", "model.vision.num_layers=1", "model.vision.hidden_size=32",
    "model.vision.intermediate_size=32", "model.audio.num_layers=1", "model.audio.hidden_size=32",
    "model.audio.intermediate_size=32", "model.llm.num_layers=1", "model.llm.hidden_size=48",
    "model.llm.intermediate_size=32", "data.num_validation=0", "train.batch_size=2",
    "train.num_steps=4", "data.prefetch=0",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    subprocess.run([sys.executable, "scripts/make_demo_data.py", "--out", str(folder),
                    "--num-examples", "16"], cwd=ROOT, check=True, capture_output=True)
    return folder


@pytest.fixture
def data(corpus, tmp_path) -> Path:
    return shutil.copytree(corpus, tmp_path / "data")


def train(tmp_path: Path, data: Path, *overrides: str, env: dict | None = None):
    """(exit code, stderr, stdout) within 60 s."""
    started = time.monotonic()
    out = subprocess.run(
        [sys.executable, "-m", "orchmllm.train", "--recipe", "recipes/demo.yaml",
         f"data.path={data}", f"run.dir={tmp_path / 'run'}", *TINY, *overrides],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={**os.environ, **(env or {})})
    print(f"{time.monotonic() - started:.1f} s\n{out.stderr}")
    return out.returncode, out.stderr, out.stdout


def rows(data: Path) -> list[dict]:
    return [json.loads(line) for line in (data / "data.jsonl").read_text().splitlines()]


def rewrite(data: Path, changed: list[dict]) -> None:
    (data / "data.jsonl").write_text("\n".join(json.dumps(r) for r in changed) + "\n")


def clear(code: int, stderr: str, *texts: str) -> None:
    assert code not in (0, None)
    assert all(t in stderr for t in texts), stderr
    assert "Traceback" not in stderr and len(stderr.splitlines()) <= 4, stderr


def test_batch_size_0(tmp_path, data):
    clear(*train(tmp_path, data, "train.batch_size=0")[:2], "train.batch_size")


def test_missing_data_file(tmp_path):
    clear(*train(tmp_path, tmp_path / "nowhere")[:2], "nowhere")


def test_placeholder_count(tmp_path, data):
    changed = rows(data)
    changed[3]["conversations"][0]["value"] = "<image><image><image><image> what?"
    rewrite(data, changed)
    clear(*train(tmp_path, data, "data.strict=true", "train.num_steps=8")[:2], "row 4", "<image>")


def test_read_only_run_folder(tmp_path, data):
    (tmp_path / "run").write_text("a file where the folder should be")
    clear(*train(tmp_path, data)[:2], "run")


def test_smaller_than_the_ranks(tmp_path, data):
    """One row on two ranks is legal: batches wrap around."""
    rewrite(data, rows(data)[:1])
    code, stderr, stdout = train(tmp_path, data, "balance.enabled=false")
    assert code == 0 and "step 4/4" in stdout, stderr


def test_corrupt_jpeg_and_truncated_wav_are_quarantined(tmp_path, data):
    """Decoding fails after planning: their examples are not learnt from, the run goes on."""
    images = sorted(p for p in (data / "images").iterdir() if p.suffix == ".jpg")[:2]
    for path in images:
        path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    code, stderr, stdout = train(tmp_path, data, "train.num_steps=8", "data.max_failed_percent=50")
    assert code == 0, stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "quarantine.jsonl").open()]
    assert {Path(line["file"]).name for line in lines} <= {p.name for p in images}
    assert all(line["source"] and line["row"] and line["reason"] for line in lines)
    strict = train(tmp_path / "strict", data, "train.num_steps=8", "data.strict=true")
    clear(*strict[:2], "data.strict", ".jpg")


def test_disk_full_during_a_save(tmp_path, data):
    """A small file size limit stands in for a full disk; the first checkpoint stays."""
    limited = ["bash", "-c", "ulimit -f 40; exec \"$@\"", "bash"]
    out = subprocess.run(
        [*limited, sys.executable, "-m", "orchmllm.train", "--recipe", "recipes/demo.yaml",
         f"data.path={data}", f"run.dir={tmp_path / 'run'}", *TINY, "checkpoint.every_steps=2"],
        cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert out.returncode not in (0, None)
    assert "checkpoint 2: rank" in out.stderr and "File too large" in out.stderr, out.stderr
    assert "Traceback" not in out.stderr
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
