"""The package's commands in processes of their own, from the repository's folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from orchmllm.tools.init.demo import make_corpus

ROOT = Path(__file__).resolve().parents[2]
TINY = [  # overrides that make recipes/demo.yaml small
    "launch.nproc_per_node=2", "data.num_validation=0", "train.batch_size=2", "train.num_steps=4",
    "data.prefetch=0",
]


def on_corpus(data: Path) -> list[str]:
    """Overrides for the corpus of the tests, and the small model that is in it."""
    return [f"data.path={data}", f"model.config={data}/tiny"]


def python(*args, env: dict | None = None, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    """`python ARGS` with this package on its path; its output is text."""
    return subprocess.run([sys.executable, *map(str, args)], cwd=cwd, capture_output=True,
                          text=True, env=os.environ | {"PYTHONPATH": str(ROOT)} | (env or {}))


def train_args(data: Path, run_dir: Path, *overrides: str) -> list[str]:
    """Arguments of Python for a small run of recipes/demo.yaml."""
    return ["-m", "orchmllm.train", "recipes/demo.yaml", *on_corpus(data), f"run.dir={run_dir}",
            *TINY, *overrides]


def make_demo_data(folder: Path, num_examples: int, seed: int = 0) -> Path:
    """The demo's corpus, in this process."""
    make_corpus(folder, num_examples, seed)
    return folder
