"""Keys of a recipe with models of transformers, on real ranks and from a recipe's text to
gradients: every parameter's gradient is that of stock transformers in one process, example by
example, and a run that goes on in the middle trains the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cached_property, partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from orchmllm.config.recipe import DataConfig, Recipe, load_recipe
from orchmllm.data.media_tensors import VIDEOS
from orchmllm.data.stream import open_dataset
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.plan.layout import ENCODERS
from orchmllm.sharding import load_whole
from orchmllm.tools.data.build_index import build_index
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.processors import FAMILIES
from tests.lib.ranks import run_ranks
from tests.lib.whole_folders import write_model, write_rows
from tests.sharding.test_planned_phases import gradients, reference, summed

pytestmark = [pytest.mark.dist, pytest.mark.whole, pytest.mark.slow,
              pytest.mark.timeout(3600)]  # the code generator takes 20 CPU seconds a graph and rank
NODEWISE = ("balance.vision.nodewise=true", "balance.audio.nodewise=true")
# What recipes say of the keys, several at once where they do not touch each other. {folder}: of the
# model; {shard}: ranks of a shard.
KEYS = {
    "streaming, tensors": [
        "data.streaming=true", "data.num_shards=2",
        "data.shuffle_window=4", "balance.dispatch=tensors", "train.accumulation_steps=2"],
    "batching, group, loss_chunk_rows, load": [
        "data.batching=capped", "data.max_batch_tokens=150", "data.max_batch_images=2",
        "balance.group=shard", "fsdp.shard_size={shard}", "fsdp.loss_chunk_rows=3",
        "balance.dispatch=load"],
    "bytes, sample_every": [
        "balance.dispatch=bytes", "data.num_workers=1", "train.sample_every=2",
        "data.num_validation=3", "train.num_samples=3", "train.sample_tokens=4"],
    "nodewise, load": ["balance.dispatch=load", *NODEWISE],
    # Images that are not proven to be bytes travel as float32.
    "nodewise, tensors, float32": ["balance.dispatch=tensors", *NODEWISE],
    "bytes, float32": ["balance.dispatch=bytes"],
    "compile": ["fsdp.compile=true"],
    "config": ["model.pretrained=", "model.config={folder}"],
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
        self.dataset = rows = open_dataset(DataConfig(
            path=f"{folder}/part-*.jsonl", index_dir=str(folder / "none")),
            str(folder), seed=0)
        build_index(rows.sources[0], rows.reader, folder / "index", num_workers=1)

    @cached_property
    def rows(self) -> dict[str, tuple]:
        """What stock transformers makes of each row."""
        return self.by_stock(models.stock_of(self.folder))

    @cached_property
    def drawn_rows(self) -> dict[str, tuple]:
        """The same with the weights that one rank draws for model.config."""
        stock, run = models.stock_of(self.folder), self.recipe(
            "config", 1, f"run.dir={self.folder}/drawn")
        drawn = run_ranks(weights, 1, run, self.name)[0]
        with torch.no_grad():
            for n, p in stock.named_parameters():
                p.copy_(torch.from_numpy(drawn[n]))
        return self.by_stock(stock)

    def by_stock(self, stock: torch.nn.Module) -> dict[str, tuple]:
        return {self.dataset.name(i): reference(stock, self.dataset, [i]) for i in range(ROWS)}

    def recipe(self, key: str, ranks: int, *more: str) -> Recipe:
        said = [text.format(folder=self.folder, shard=SHARDS[ranks]) for text in KEYS[key]]
        nodes = ["balance.ranks_per_node=2", "fsdp.shard_size=2"] if ranks == 4 else [
            "balance.ranks_per_node=1"]
        return load_recipe(self.folder / "recipe.yaml", [*nodes, *said, *more])


@pytest.fixture(scope="module", params=NAMES)
def family(request, tmp_path_factory):
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def trainer_of(key: str, run: Recipe, world, **keys) -> Trainer:
    instead = nullcontext()
    if "float32" in key:
        instead = mock.patch.object(PlannedEncoders, "prove", side_effect=ValueError("not proven"))
    elif key == "compile":
        instead = mock.patch.object(load_whole, "compile_whole", partial(
            load_whole.compile_whole, backend="aot_eager"))
    with instead:
        return Trainer(run, world, **keys)


def weights(world, run: Recipe, name: str) -> dict[str, np.ndarray]:
    """All of a model that was built."""
    FAMILIES[name](transformers)
    trainer = Trainer(run, world)
    try:
        return {n: p.detach().full_tensor().numpy()
                for n, p in trainer.model.hf.named_parameters()}
    finally:
        trainer.close()


def steps(world, runs: dict[str, Recipe], name: str) -> dict[str, list[tuple]]:
    """Of each step of each run: the names of its rows, its loss, targets and gradients, and of each
    phase the media that each rank encodes and that its text has; of rank 0."""
    FAMILIES[name](transformers)  # imports a processor that would need torchvision
    found = {key: [] for key in runs}
    for key, run in runs.items():
        trainer = trainer_of(key, run, world)
        try:
            media = {"pixel_values", *[VIDEOS] * ("qwen" in name and "omni" not in name)}
            assert trainer.model.encoders.raw.keys() == (set() if "float32" in key else media)
            for step in trainer.loader():
                trainer._sample()
                loss, grads = summed(trainer, step), gradients(trainer)
                plan = step.micro[0].plan
                held = [np.stack([plan.encode[phase].target_sizes, np.bincount(
                    plan.feature[phase].target_rank, minlength=world.world_size)])
                    for phase in ENCODERS]
                found[key].append((
                    [*map(trainer.dataset.name, step.example_ids.tolist())], loss,
                    step.num_global_targets, {n: g.numpy() for n, g in grads.items()}, held))
        finally:
            trainer.close()
    return found if world.rank == 0 else {}


def difference(found: list[tuple], of_row: dict[str, tuple]) -> float:
    """The largest of all steps that `steps` found, in gradients and in losses, from what stock
    transformers makes of the rows one by one."""
    assert len(found) == STEPS
    worst = 0.0
    for names, loss, targets, grads, _ in found:
        losses, wanted, counts = zip(*map(of_row.get, names), strict=True)
        assert targets == sum(counts)
        worst = max(worst, abs(loss / sum(losses) - 1), models.difference(
            {n: torch.from_numpy(g) for n, g in grads.items()},
            {n: sum(one[n] for one in wanted) for n in wanted[0]}))
    return worst


@pytest.mark.parametrize("ranks", SHARDS)
def test_gradients_are_those_of_stock_transformers(ranks, family):
    """With each key. Steps in which some ranks have no media, or encode none, are among them."""
    exact, without = models.LOOSE.get(family.name, models.EXACT), np.zeros(2, bool)
    runs = {key: family.recipe(key, ranks, f"run.dir={family.folder}/{key}{ranks}")
            for key in KEYS}
    for key, found in run_ranks(steps, ranks, runs, family.name, timeout_s=1700.0)[0].items():
        worst = difference(found, family.drawn_rows if key == "config" else family.rows)
        print(f"{family.name}, {key}, {ranks} ranks: losses and gradients differ by {worst:.1e}")
        assert worst <= exact, key
        for *_, media in found:
            for of_ranks in media:
                without |= of_ranks.any(1) & ~of_ranks.all(1)
    assert without.all() == (ranks > 1)


@contextmanager
def norms_in_float64(name: str) -> Iterator[None]:
    """Within it the norms of a family, which stock code computes in float32, are as exact as the
    rest."""
    def norm(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).rsqrt())

    with ExitStack() as stack:
        for kind in {type(m) for m in models.build(name).modules()
                     if hasattr(m, "variance_epsilon")}:
            stack.enter_context(mock.patch.object(kind, "forward", norm))
        yield


def exact_steps(world, runs: dict[str, Recipe], name: str) -> dict[str, list[tuple]]:
    with norms_in_float64(name):
        return steps(world, runs, name)


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl"], indirect=True)
def test_generated_code_computes_the_same(family):
    """fsdp.compile with torch's code generator; it rounds as stock code does but for what that has
    in float32, where its sums are in another order: 6e-8 of the largest gradient with qwen3_vl."""
    run = family.recipe("compile", 2, f"run.dir={family.folder}/generated")
    found = run_ranks(exact_steps, 2, {"generated": run}, family.name, timeout_s=1700.0)[0]
    with norms_in_float64(family.name):
        assert difference(found["generated"], family.by_stock(
            models.stock_of(family.folder))) <= models.EXACT


def trained(world, runs: dict[str, Recipe], name: str) -> dict[str, list]:
    """(names of its rows, loss) of each step of each run."""
    FAMILIES[name](transformers)
    found = {}
    for key, run in runs.items():
        losses, ids = [], []
        trainer = trainer_of(
            key, run, world, on_step=lambda step, row, losses=losses, ids=ids: (
                losses.append(row["loss"]), ids.append(step.example_ids.tolist())))
        try:
            trainer.run()
            found[key] = [([*map(trainer.dataset.name, some)], loss)
                          for some, loss in zip(ids, losses, strict=True)]
        finally:
            trainer.close()
    return found


def test_a_run_goes_on_in_the_middle(family, tmp_path):
    """With each key, on another number of ranks, it trains the rows that were to come, with the
    same losses."""
    def runs(ranks: int, what: str, *more: str) -> dict[str, Recipe]:
        return {key: family.recipe(
            key, ranks, "checkpoint.every_steps=3", "checkpoint.keep_last=3", "train.lr=0.01",
            f"run.dir={tmp_path}/{key}/{what}", *(text.format(key=key) for text in more))
            for key in KEYS}

    whole = run_ranks(trained, 2, runs(2, "whole"), family.name, timeout_s=1700.0)[0]
    rest = run_ranks(trained, 1, runs(1, "rest", f"run.resume={tmp_path}/{{key}}/whole/checkpoints/"
                                      "step_00000003"), family.name)[0]
    for key, steps_ in whole.items():
        names, losses = zip(*steps_, strict=True)
        names_after, losses_after = zip(*rest[key], strict=True)
        assert len(set(losses)) == STEPS and names_after == names[3:], key
        assert losses_after == pytest.approx(losses[3:], rel=1e-6), key
