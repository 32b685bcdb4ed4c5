"""A trained model uses its media: giving each held-out example the media of another one of the same
kind (as many images, as many clips) raises the validation loss. Lengths go with the media, so the
set of media is the same, and so are all texts and targets."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe, RunConfig, TrainConfig
from orchmllm.tools.compose.drawn import shapes, write_drawn
from tests.lib.commands import ROOT
from tests.lib.ranks import run_ranks

NUM_EXAMPLES, NUM_HELD_OUT, NUM_STEPS = 3000, 256, 450
SHAPES = shapes((3, 128, 384, 4), (2, 96, 384, 4), (2, 96, 384, 4), vocab_size=512, audio_stack=4)


def chosen(rows: list[dict]) -> list[dict]:
    """All rows with a clip and a third of those with one image: clips have few questions, so in
    the whole mix it takes longer until they are listened to."""
    return [row for i, row in enumerate(rows)
            if row["audios"] or (len(row["images"]) == 1 and i % 3 == 0)]


def write(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def swapped(rows: list[dict], keys: tuple[str, ...]) -> list[dict]:
    """Rows of data.jsonl in which each held-out row has the media under `keys` of the next held-out
    row with as many images and clips."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for i in range(len(rows) - NUM_HELD_OUT, len(rows)):
        kinds.setdefault((len(rows[i]["images"]), len(rows[i]["audios"])), []).append(i)
    out = list(rows)
    for same in kinds.values():
        for i, other in zip(same, same[1:] + same[:1], strict=True):
            out[i] = {**rows[i], **{key: rows[other][key] for key in keys}}
    return out


def train_and_swap(world, recipe: Recipe) -> dict[str, float]:
    """Validation losses after training, with the right media and with swapped ones."""
    from orchmllm.runtime.build import build_dataset
    from orchmllm.trainer import Trainer

    trainer = Trainer(recipe, world)
    losses = {"untrained": trainer.validate()["validation_loss"]}
    for step in trainer.loader():
        trainer.train_step(step)
    losses["right media"] = trainer.validate()["validation_loss"]
    folder = Path(recipe.data.path).parent
    for what in ("all", "images", "audios"):
        data = replace(recipe.data, path=str(folder / f"swapped_{what}.jsonl"))
        trainer.dataset = build_dataset(replace(recipe, data=data))
        losses[f"swapped {what}"] = trainer.validate()["validation_loss"]
    return losses


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(3600)
def test_swapped_media_raise_the_loss(tmp_path):
    subprocess.run([sys.executable, ROOT / "scripts/make_demo_data.py", "--out", tmp_path,
                    "--num-examples", str(NUM_EXAMPLES), "--seed", "1"],
                   check=True, capture_output=True)
    with (tmp_path / "data.jsonl").open(encoding="utf-8") as lines:
        rows = chosen([json.loads(line) for line in lines])
    write(tmp_path / "data.jsonl", rows)
    for what, keys in (("all", ("images", "audios")), ("images", ("images",)),
                       ("audios", ("audios",))):
        write(tmp_path / f"swapped_{what}.jsonl", swapped(rows, keys))
    write_drawn(SHAPES, tmp_path / "tokenizer.json", tmp_path / "larger", max_side=112)
    recipe = Recipe(
        run=RunConfig(dir=str(tmp_path / "run")),
        model=ModelConfig(config=str(tmp_path / "larger")),
        data=DataConfig(path=str(tmp_path / "data.jsonl"), num_validation=NUM_HELD_OUT),
        train=TrainConfig(num_steps=NUM_STEPS, batch_size=8, lr=2e-3, warmup_steps=20))
    losses = run_ranks(train_and_swap, 2, recipe, timeout_s=3500)[0]
    print({name: round(loss, 4) for name, loss in losses.items()})
    right = losses["right media"]
    assert right < 0.2 * losses["untrained"]
    for what in ("all", "images", "audios"):
        assert losses[f"swapped {what}"] >= 1.05 * right, what
