"""run.init_from: the next stage starts with the weights of another run, bit by bit, on any number
of ranks."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from orchmllm.cli import dispatch
from orchmllm.config.model import LoraConfig, ModelConfig
from orchmllm.config.recipe import Recipe, load_recipe
from orchmllm.runtime.attempts import read_attempts
from orchmllm.runtime.checkpoint import CheckpointError
from orchmllm.runtime.init_from import other_kind
from orchmllm.tools.compare import train_in_turn
from orchmllm.train import main as train_command
from orchmllm.trainer import Trainer
from tests.lib.commands import TINY, demo_of
from tests.lib.drawn import model_of
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen
from tests.lib.resume import flip, run_recipe
from tests.lib.synthetic import SHALLOW, SyntheticDataset
from tests.lib.training import listened, train

pytestmark = pytest.mark.dist


def stage(folder: Path, steps: int, *parts: str, start: Path | None = None, **changes) -> Recipe:
    """parts: what is frozen."""
    run = run_recipe(folder, train={"num_steps": steps, **changes.pop("train", {})}, **changes)
    return replace(run, model=frozen(*parts, model=SHALLOW),
                   run=replace(run.run, init_from=str(start or "")))


def parameters(trainer: Trainer) -> dict[str, np.ndarray]:
    """Whole, by name."""
    return {name: p.full_tensor().detach().numpy().copy()
            for name, p in trainer.model.named_parameters()}


def trained(world, run: Recipe, data=None) -> tuple[list, dict, dict, list[str]]:
    """Of a run: (loss and examples of each step, its parameters at the start and at the end, what
    it said)."""
    said, seen, first = listened(), [], []
    trainer = Trainer(run, world, dataset=data or SyntheticDataset(), on_step=lambda step, row: (
        seen.append((row["loss"], step.example_ids.tolist()))))
    resume = trainer.checkpointer.resume

    def resumed():
        progress = resume()
        assert progress or not any(  # moments begin anew
            one["exp_avg"].to_local().any() or one["step"]
            for one in trainer.optimizer.state.values())
        first.append(parameters(trainer))
        return progress

    trainer.checkpointer.resume = resumed
    try:
        trainer.run()
        return seen, first[0], parameters(trainer), said
    finally:
        trainer.close()


def equal(some: dict, others: dict) -> bool:
    return some.keys() == others.keys() and all(
        np.array_equal(some[n], others[n]) for n in some)


@pytest.mark.parametrize("key, value", [("rank", 3), ("alpha", 5), ("use_rslora", True)])
def test_adapters_that_compute_something_else_are_refused(key, value):
    there = ModelConfig(lora=LoraConfig(rank=2))
    saved = asdict(there)
    assert other_kind(Path("a"), saved, there) == ""
    here = replace(there, lora=replace(there.lora, **{key: value}))
    assert (f"the adapters of a have model.lora.{key} {saved['lora'][key]}, and here it is {value}:"
            in other_kind(Path("a"), saved, here))


ENCODERS = ("vision", "audio")


def both_stages(world, folder: Path) -> None:
    """The connectors, then everything. The second stage goes on by itself when it is started
    again."""
    *_, end, _ = trained(world, stage(folder / "first", 2, *ENCODERS, "llm"))
    second = stage(folder / "second", 2, start=folder / "first", train={
        "lr": 1e-3, "batch_size": 3, "global_batch_size": 0})
    seen, start, last, said = trained(world, second)
    assert equal(start, end) and not equal(last, end) and len(seen) == 2
    assert len({*seen[0][1]}) == 3 * world.world_size
    newest = folder / "first" / "checkpoints" / "step_00000002"
    told = [line for line in said if "init" in line or "weights of" in line or "since" in line]
    assert told[0].startswith(f"starting with the weights of {newest}; optimizer, steps")
    assert "model.llm.frozen true -> false" in told[1] and "run.dir" not in told[1]
    attempt = read_attempts(folder / "second")[0]
    assert attempt["init_from"]["checkpoint"] == str(newest) and attempt["resumed_from"] is None
    assert attempt["init_from"]["changed"]["train.lr"] == [0.01, 0.001]
    flip(next(newest.glob("*.safetensors")))
    with pytest.raises(CheckpointError, match="^run.init_from: .* is no complete checkpoint "):
        trained(world, stage(folder / "third", 2, start=folder / "first"))
    shutil.rmtree(folder / "first")
    longer = replace(second, train=replace(second.train, num_steps=3))
    seen, start, _, said = trained(world, longer)
    assert len(seen) == 1 and equal(start, last)
    assert any(f"init_from={folder / 'first'} gave the weights at the start" in s for s in said)
    with pytest.raises(ValueError, match="^run.init_from is '', the checkpoint has .*run.dir"):
        trained(world, replace(longer, run=replace(longer.run, init_from="")))


def test_the_second_stage_starts_with_the_weights_of_the_first(tmp_path):
    run_ranks(both_stages, 1, tmp_path)


def first_and_refused(world, folder: Path) -> dict[str, np.ndarray]:
    """The parameters of a first stage; then everything that it cannot be a start of."""
    run = stage(folder / "first", 2, *ENCODERS, "llm")
    *_, end, _ = trained(world, run)
    newest = folder / "first" / "checkpoints" / "step_00000002"

    def refused(told: str, start: Path, model=SHALLOW) -> None:
        second = replace(stage(folder / "refused", 1, start=start), model=model)
        with pytest.raises(CheckpointError, match=f"^run.init_from: .*{told}") as error:
            trained(world, second)
        assert "\n" not in str(error.value)

    wider = model_of(num_layers=1, audio={"encoder_ffn_dim": 999})
    refused(r"audio_tower.layers.0.fc1.bias is \(\d+,\) there and \(999,\) here", newest, wider)
    deeper = model_of(vision={"depth": 1}, audio={"encoder_layers": 1})
    refused("layers.1.*is no such parameter there and", newest, deeper)
    refused("is no complete checkpoint .*give a run folder.*model.pretrained", folder / "nothing")
    if world.rank == 0:
        shutil.copytree(newest, folder / "damaged")
        flip(next((folder / "damaged").glob("*.safetensors")))
        state = json.loads((newest / "state.json").read_text())
        assert "init_from" not in state["attempt"]
    refused("is not what was saved", folder / "damaged")
    return end


def started(world, run: Recipe) -> dict:
    """The parameters that a run begins with."""
    trainer = Trainer(run, world, dataset=SyntheticDataset())
    try:
        assert trainer.checkpointer.resume() is None
        return parameters(trainer)
    finally:
        trainer.close()


@pytest.mark.slow
def test_weights_are_equal_on_every_number_of_ranks_and_others_are_refused(tmp_path):
    end = run_ranks(first_and_refused, 2, tmp_path)[0]
    for ranks, shard_size in ((1, 0), (2, 0), (3, 0), (4, 0), (4, 2)):
        run = stage(tmp_path / f"second{ranks}_{shard_size}", 1, "vision", "connector",
                    start=tmp_path / "first" / "checkpoints" / "step_00000002")
        run = replace(run, fsdp=replace(run.fsdp, shard_size=shard_size))
        assert equal(run_ranks(started, ranks, run)[0], end)
    wide = replace(run, fsdp=replace(run.fsdp, param_dtype="float64", shard_size=0))
    assert equal(run_ranks(started, 1, wide)[0], {
        n: t.astype(np.float64) for n, t in end.items()})




def test_a_start_that_is_not_there_is_told_before_ranks_start(tmp_path, demo_corpus, capsys):
    """Of a run folder, the checkpoint that is half written is named."""
    recipe = tmp_path / "recipe.yaml"
    half = tmp_path / "stage" / "checkpoints" / "step_00000002"
    half.mkdir(parents=True)
    (half.parent / "step_00000001").mkdir()
    (half.parent / "step_00000001" / "manifest.json").write_text('{"step": 1}')
    for start, named in (("exported", tmp_path / "exported"), ("stage", half)):
        recipe.write_text(f"run: {{dir: {tmp_path}/run, init_from: {tmp_path}/{start}}}\n"
                          f"data: {{path: {demo_corpus}}}\n"
                          f"model: {{config: {demo_corpus}/model}}\n")
        assert train_command([str(recipe), "--validate"]) == 2
        assert (f"error: run.init_from: {named} is no complete checkpoint: give a run "
                "folder") in capsys.readouterr().err


def compared(world, data: Path, folder: Path) -> tuple[float, float, list[float]]:
    recipe = load_recipe("recipes/demo.yaml", [
        *TINY, *demo_of(data), "data.num_validation=3", "train.num_steps=1", "train.lr=0.01",
        f"run.dir={folder / 'first'}"])
    rows = train(world, recipe)
    found = train_in_turn(replace(recipe, run=replace(
        recipe.run, dir=str(folder / "second"), init_from=str(folder / "first"))), world)
    return (rows[0]["validation_loss"], rows[-1]["validation_loss"],
            [found[name][0]["validation_loss"] for name in ("off", "on")])


def test_a_comparison_starts_with_them_too(demo_corpus, tmp_path, capsys):
    (drawn, learnt, found), = run_ranks(compared, 1, demo_corpus, tmp_path)
    assert found == pytest.approx([learnt] * 2, rel=1e-6) and learnt != pytest.approx(drawn, 1e-3)
    assert dispatch(["compare", "recipes/demo.yaml", *demo_of(demo_corpus),
                     f"run.resume={tmp_path / 'first'}"]) == 2
    assert "the comparison begins with step 0" in capsys.readouterr().err
