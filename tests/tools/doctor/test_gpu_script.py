"""`make gpu`: what can be known of it where there is no GPU."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

from orchmllm.cli import COMMANDS
from orchmllm.config.recipe import load_recipe
from scripts import gpu
from tests.lib.commands import ROOT


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_in_one_line():
    done = subprocess.run([sys.executable, "scripts/gpu.py"], cwd=ROOT, capture_output=True,
                          text=True)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("no GPU found: ") and done.stderr.count("\n") == 1


def test_its_parts_exist():
    assert sum(limit for _, limit in gpu.PARTS.values()) < 1.5 * gpu.TOTAL_S  # limits, not times
    for arguments, _ in gpu.PARTS.values():
        if arguments[:2] == ["-m", "orchmllm"]:
            assert arguments[2] in COMMANDS
        elif arguments[0].endswith(".py"):
            text = (ROOT / arguments[0]).read_text()
            assert all(f'"{a}"' in text for a in arguments if a.startswith("--"))
    for path in gpu.GPU_TESTS:
        assert re.search(r"mark\.gpu", (ROOT / path).read_text()), path
    marked = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("test_*.py")
              if re.search(r"^@pytest\.mark\.gpu|^pytestmark.*gpu", p.read_text(), re.M)}
    assert marked == set(gpu.GPU_TESTS)
    run = load_recipe(ROOT / "recipes" / "mllm_1gpu.yaml", gpu.PROFILED)
    assert run.profile.window == range(9, 11) and run.train.num_steps > 11


def test_a_part_that_fails_or_hangs_is_told(monkeypatch, tmp_path, capsys):
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: "one GPU")
    monkeypatch.setattr(gpu, "PARTS", {
        "fine": (["-c", "print('well')"], 60), "wrong": (["-c", "raise SystemExit(3)"], 60),
        "hangs": (["-c", "import time; time.sleep(600)"], 1)})
    run = tmp_path / gpu.RUN_DIR
    run.mkdir(parents=True)
    rows = [{"step": 0, "validation_loss": 1.0}] + [
        {"step": s, "loss": 1.0, "step_s": float(s), "tokens_per_s": 5.0, "mfu": None,
         "data_wait_s": 0.0, "exchange_ms": 1.0} for s in range(14)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert gpu.main([]) == 1
    found = json.loads((tmp_path / "benchmarks" / "gpu_run.json").read_text())
    assert {k: p["exit_code"] for k, p in found["parts"].items()} == {
        "fine": 0, "wrong": 3, "hangs": 124}
    assert found["parts"]["fine"]["output"] == ["well"]
    assert found["run"] == {"step_s": 7.0, "tokens_per_s": 5.0, "data_wait_s": 0.0,
                            "exchange_ms": 1.0}
    assert "1 of 3 parts passed" in capsys.readouterr().out
