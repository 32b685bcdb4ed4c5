"""Keys of a recipe with models of transformers, on real ranks and from a recipe's text to
gradients: every parameter's gradient is that of stock transformers in one process, example by
example, and a run that goes on in the middle trains the same rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, Recipe, load_recipe
from orchmllm.data.stream import open_dataset
from orchmllm.plan.layout import ENCODERS
from orchmllm.tools.data.build_index import build_index
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.processors import FAMILIES
from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import write_model, write_rows
from tests.sharding.test_planned_phases import gradients, reference, summed

pytestmark = [pytest.mark.dist, pytest.mark.whole, pytest.mark.slow]
# What a recipe says of each key. {folder}: of the model; {shard}: ranks of a shard.
KEYS = {
    "data.tokenizer": ["data.tokenizer={folder}"],
}
NAMES = ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3", "llava_onevision", "qwen2_5_omni")
SHARDS = {1: 1, 2: 1, 3: 1, 4: 2}  # by the number of ranks
ROWS, STEPS = 27, 6
RECIPE = """\
run: {{dir: {folder}/run}}
model: {{pretrained: {folder}}}
data: {{path: "{folder}/part-*.jsonl", index_dir: {folder}/index}}
train: {{num_steps: {steps}, global_batch_size: 4, batch_size: 1}}
fsdp: {{param_dtype: float64}}
balance:  # policies that move media of one size, too
  vision: {{policy: greedy}}
  audio: {{policy: greedy}}
  llm: {{policy: greedy}}
"""


class Family:
    """A model, rows in three files, and what stock transformers makes of each of them."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        write_model(name, folder, torch.float64)
        lines = write_rows(folder, 2 * ROWS, name).read_text().splitlines(keepends=True)
        some, none = ([line for line in lines if ("picture" in line) is has]
                      for has in (True, False))  # a third of the rows have media
        for k in range(3):
            (folder / f"part-{k}.jsonl").write_text("".join(
                some[3 * k: 3 * k + 3] + none[6 * k: 6 * k + 6]))
        (folder / "recipe.yaml").write_text(RECIPE.format(folder=folder, steps=STEPS))
        stock, rows = models.stock_of(folder), open_dataset(DataConfig(
            path=f"{folder}/part-*.jsonl", index_dir=str(folder / "none")),
            ModelConfig(pretrained=str(folder)), seed=0)
        self.rows = {rows.name(i): reference(stock, rows, [i]) for i in range(ROWS)}
        build_index(rows.sources[0], rows.reader, folder / "index", num_workers=1)

    def recipe(self, key: str, ranks: int, *more: str) -> Recipe:
        said = [text.format(folder=self.folder, shard=SHARDS[ranks]) for text in KEYS[key]]
        nodes = ["balance.ranks_per_node=2", "fsdp.shard_size=2"] if ranks == 4 else [
            "balance.ranks_per_node=1"]
        return load_recipe(self.folder / "recipe.yaml", [*nodes, *said, *more])


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def steps(world, run: Recipe, name: str) -> list[tuple]:
    """Of each step: the names of its rows, its loss, targets and gradients, and of each phase the
    media that each rank encodes and that its text has."""
    FAMILIES[name](transformers)  # imports a processor that would need torchvision
    trainer, out = Trainer(run, world), []
    try:
        for step in trainer.loader():
            loss, found = summed(trainer, step), gradients(trainer)
            plan = step.micro[0].plan
            media = {phase: (plan.encode[phase].target_sizes.tolist(), np.bincount(
                plan.feature[phase].target_rank, minlength=world.world_size).tolist())
                for phase in ENCODERS}
            out.append(([*map(trainer.dataset.name, step.example_ids.tolist())], loss,
                        step.num_global_targets, {n: g.numpy() for n, g in found.items()}, media))
    finally:
        trainer.close()
    return out if world.rank == 0 else []


@pytest.mark.parametrize("ranks", SHARDS)
@pytest.mark.parametrize("key", KEYS)
def test_gradients_are_those_of_stock_transformers(key, ranks, family):
    """Steps in which some ranks have no media, or encode none, are among them."""
    run = family.recipe(key, ranks, f"run.dir={family.folder}/{key}{ranks}")
    exact, without = models.LOOSE.get(family.name, models.EXACT), set()
    found = run_ranks(steps, ranks, run, family.name)[0]
    assert len(found) == STEPS
    for names, loss, targets, gradients_, media in found:
        losses, wanted, counts = zip(*map(family.rows.get, names), strict=True)
        assert targets == sum(counts)
        assert loss == pytest.approx(sum(losses), rel=exact)
        assert models.difference(
            {n: torch.from_numpy(g) for n, g in gradients_.items()},
            {n: sum(one[n] for one in wanted) for n in wanted[0]}) <= exact
        without |= {what for of_ranks in media.values() for what, counts in zip(
            ("encodes", "has"), of_ranks, strict=True) if any(counts) and not all(counts)}
    assert ranks == 1 or without == {"encodes", "has"}


def trained(world, run: Recipe, name: str) -> list[tuple[list[str], float]]:
    """(names of its rows, loss) of each step."""
    FAMILIES[name](transformers)
    seen = []
    trainer = Trainer(run, world, on_step=lambda step, row: seen.append(
        ([*map(trainer.dataset.name, step.example_ids.tolist())], row["loss"])))
    try:
        trainer.run()
    finally:
        trainer.close()
    return seen


@pytest.mark.parametrize("key", KEYS)
def test_a_run_goes_on_in_the_middle(key, family, tmp_path):
    """On another number of ranks it trains the rows that were to come, with the same losses."""
    save = ["checkpoint.every_steps=3", "checkpoint.keep_last=3", "train.lr=0.01"]
    whole = run_ranks(trained, 2, family.recipe(key, 2, *save, f"run.dir={tmp_path}/whole"),
                      family.name)[0]
    rest = run_ranks(trained, 1, family.recipe(
        key, 1, *save, f"run.dir={tmp_path}/rest",
        f"run.resume={tmp_path}/whole/checkpoints/step_00000003"), family.name)[0]
    assert [names for names, _ in rest] == [names for names, _ in whole[3:]]
    assert len(rest) == 3 and len({loss for _, loss in whole}) == STEPS
    assert [loss for _, loss in rest] == pytest.approx([loss for _, loss in whole[3:]], rel=1e-6)
