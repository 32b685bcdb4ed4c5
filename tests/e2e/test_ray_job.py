"""`orchmllm train` under Ray Train's TorchTrainer, on a real cluster."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.lib.commands import ROOT, TINY
from tests.lib.ray_clusters import cluster
from tests.lib.rows import losses


def started(data: Path, folder: Path) -> subprocess.Popen:
    tiny = [item for item in TINY if not item.startswith(("launch.", "train.num_steps"))]
    return subprocess.Popen(
        [sys.executable, "scripts/launch/ray_train.py", "2", "recipes/demo.yaml",
         f"data.path={data}", f"model.config={data / 'model'}", f"run.dir={folder}", *tiny,
         "train.num_steps=12", "checkpoint.every_steps=4"], cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)})


def kill_a_worker() -> None:
    """The worker of Ray whose child is a rank."""
    ranks = [p for p in psutil.process_iter(["cmdline"])
             if "orchmllm.train" in (p.info["cmdline"] or ())]
    ranks[-1].parent().kill()


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_that_loses_a_worker_ends_with_the_weights_of_one_that_did_not(
        tmp_path, demo_corpus):
    with cluster(2):
        assert started(demo_corpus, tmp_path / "whole").wait() == 0
        run = started(demo_corpus, tmp_path / "lost")
        while not (tmp_path / "lost/checkpoints/step_00000004/manifest.json").exists():
            assert run.poll() is None
            time.sleep(0.01)
        kill_a_worker()
        assert run.wait() == 0
    assert losses(tmp_path / "lost") == losses(tmp_path / "whole")
