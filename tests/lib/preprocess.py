"""Servers of preprocessing as processes, and what is asked of them."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor
from torch.utils._pytree import tree_flatten

from orchmllm.config.recipe import load_recipe
from orchmllm.data.loading.preprocess_client import RemoteWorkers
from orchmllm.data.loading.preprocess_handshake import Servers
from orchmllm.data.loading.workers import Workers
from orchmllm.hf.whole_model import open_dataset
from orchmllm.plan.layout import TEXT
from tests.lib.launched import Command

SECRET = "0123456789abcdef" * 2
SMALL = """
data: {{path: {folder}/demo, index_dir: {folder}/index, prefetch: 2}}
model: {{config: {folder}/demo/tiny}}
train: {{num_steps: 12, batch_size: 2, warmup_steps: 2}}
balance: {{dispatch: load, ranks_per_node: 2}}
checkpoint: {{every_steps: -1}}
"""


class Process:
    """A real server. address: host:port that it said."""

    def __init__(self, recipe: Path, *args: str) -> None:
        self.popen = Command("orchmllm", "preprocess", str(recipe), "--listen", "127.0.0.1:0",
                             "--workers", "0", *args)
        said = []
        for line in self.popen.stdout:
            said.append(line)
            if match := re.match(r"preprocess: listening on (\S+), ", line):
                self.address = match[1]
                return
        pytest.fail("".join(said) + self.popen.stderr.read())

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str, str]:
        self.popen.send_signal(number)
        out, err = self.popen.communicate(timeout=300)
        return self.popen.returncode, out, err


def opened(recipe: Path, *overrides: str):
    loaded = load_recipe(recipe, overrides)
    return open_dataset(loaded.data, loaded.model, seed=loaded.run.seed)


def calls_of(dataset, examples) -> list:
    """Most of some examples, as dispatch `load` asks for it."""
    calls = []
    for i in examples:
        media = np.flatnonzero(dataset.layout(i).modality != TEXT).tolist()
        calls.append(((i,), {"text": i % 3 != 0, "segments": media[:2]}))
    return calls


def same(a, b) -> bool:
    (x, failed), (y, also) = a, b
    (mine, form), (theirs, other) = (tree_flatten([
        e.example_id, e.input_ids, e.labels, e.media, e.parts, e.arguments]) for e in (x, y))
    return form == other and failed == also and all(
        p.dtype == q.dtype and p.equal(q) if isinstance(p, Tensor) else p == q
        for p, q in zip(mine, theirs, strict=True))


def asked(dataset, addresses: list[str], calls, secret_file: str = "", timeout_s: float = 300.0):
    """(results, what happened) of one request."""
    workers = RemoteWorkers(dataset, Servers(addresses, secret_file, timeout_s),
                            Workers(dataset, 0), 0)
    try:
        results = workers.request("load", calls)()
        return results, workers.counts()
    finally:
        workers.close()
