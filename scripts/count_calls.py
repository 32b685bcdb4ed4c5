"""Follows one row with an image and a clip through a training step, one block a tower: how many
calls of this package it takes, how often control changes file, and which record types carry it.

    python scripts/count_calls.py [--dispatch load|bytes|tensors] [--names]

Counted are calls of code in orchmllm/, comprehensions and resumed generators included, in one
process and one thread: from asking the loader for a step until the model returns its loss, and
until the step's row of metrics is there. A record type is a dataclass or NamedTuple of this package
of which an instance is made before the loss. The numbers do not depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import soundfile
import torch.distributed as dist
from PIL import Image

from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.launch import World
from orchmllm.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "orchmllm")
ROW = """{"images": ["a.png"], "audios": ["a.wav"], "conversations": [
{"from": "human", "value": "<image> What is this, and <audio> what is heard?"},
{"from": "gpt", "value": "A grey square and silence."}]}""".replace("\n", "")
SMALL = ["model.vision.num_layers=1", "model.audio.num_layers=1", "model.llm.num_layers=1",
         "train.batch_size=1", "data.num_validation=0", "data.prefetch=0",
         "checkpoint.every_steps=-1", "train.num_steps=3"]


def recipe_on(folder: Path, dispatch: str) -> Recipe:
    """The demo's recipe on a file with the row three times: steps before the counted one fill
    caches."""
    from orchmllm.tools.init.tokenizer import train_tokenizer

    Image.fromarray(np.full((56, 56, 3), 128, np.uint8)).save(folder / "a.png")
    soundfile.write(folder / "a.wav", np.zeros(8000, np.float32), 16000)
    (folder / "data.jsonl").write_text(f"{ROW}\n" * 3, encoding="utf-8")
    train_tokenizer(["What is this, and what is heard? A grey square and silence."] * 9,
                    folder / "tokenizer.json")
    return load_recipe(ROOT / "recipes" / "demo.yaml", [
        *SMALL, f"data.path={folder / 'data.jsonl'}", f"run.dir={folder / 'run'}",
        f"balance.dispatch={dispatch}"])


class Counts:
    """A profile function. to_loss: (calls, changes of file) until `loss_is_there` was called."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.records: Counter[str] = Counter()
        self.changes = 0
        self.to_loss: tuple[int, int] | None = None
        self._file = ""

    def __call__(self, frame, event: str, arg: object) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            self.calls[f"{code.co_filename[len(PACKAGE) + 1:]}:{code.co_qualname}"] += 1
            self.changes += code.co_filename != self._file
            self._file = code.co_filename
        elif self.to_loss is None and code.co_filename.startswith("<") and code.co_name in (
                "__init__", "__new__", "<lambda>"):  # written by dataclass and NamedTuple
            self._record(frame.f_locals)

    def _record(self, local: dict) -> None:
        kind = local.get("_cls") or type(local.get("self"))
        if getattr(kind, "__module__", "").startswith("orchmllm"):
            self.records[f"{kind.__module__}.{kind.__name__}"] += 1

    def loss_is_there(self, *_: object) -> None:
        self.to_loss = self.calls.total(), self.changes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dispatch", default="tensors", choices=("load", "bytes", "tensors"))
    parser.add_argument("--names", action="store_true", help="list functions and record types")
    args = parser.parse_args()
    counts = Counts()
    world = World(0, 1, 0, 1, "", 0)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        trainer = Trainer(recipe_on(Path(folder), args.dispatch), world)
        steps = iter(trainer.loader())
        for _ in range(2):
            trainer.train_step(next(steps))
        trainer.model.register_forward_hook(counts.loss_is_there)
        sys.setprofile(counts)
        trainer.train_step(next(steps))
        sys.setprofile(None)
        trainer.close()
        dist.destroy_process_group()
    print(f"to the loss: {counts.to_loss[0]} calls, {counts.to_loss[1]} changes of file, "
          f"{len(counts.records)} record types\n"
          f"whole step:  {counts.calls.total()} calls, {counts.changes} changes of file, "
          f"{len(counts.calls)} functions")
    if args.names:
        for name, n in [*counts.calls.most_common(), *counts.records.most_common()]:
            print(f"{n:>5}  {name}")


if __name__ == "__main__":
    main()
