"""The package's commands in processes of their own, from the repository's folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from orchmllm.tools.init.demo import make_corpus
from tests.lib.drawn import write_model

ROOT = Path(__file__).resolve().parents[2]
TINY = [  # overrides that make recipes/demo.yaml short
    "launch.nproc_per_node=2", "data.num_validation=0", "train.batch_size=2", "train.num_steps=4",
    "data.prefetch=0"]


def python(*args, env: dict | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`python ARGS` with this package on its path; its output is text."""
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}))


def train_args(data: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of Python for a small run of recipes/demo.yaml."""
    return ["-m", "orchmllm.train", "recipes/demo.yaml", *demo_of(data),
            f"run.dir={run_dir}", *TINY, *overrides]


def demo_of(data: Path) -> list[str]:
    """Overrides of recipes/demo.yaml: a corpus of make_demo_data and its model."""
    return [f"data.path={data}", f"model.config={data}/model"]


def make_demo_data(folder: Path, num_examples: int, seed: int = 0) -> Path:
    """The demo's corpus, in this process, with a model of one layer a part."""
    make_corpus(folder, num_examples, seed)
    shutil.rmtree(folder / "model")
    write_model(folder / "model", folder / "tokenizer.json", num_layers=1)
    return folder
