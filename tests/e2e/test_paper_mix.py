"""LLaVA's mix, LibriSpeech and AIR-Bench trained together: map-style and streaming, three phases
balanced, resumed in the middle of an epoch on other numbers of ranks."""

from __future__ import annotations

import contextlib
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, RunConfig, load_recipe
from orchmllm.data.stream import open_dataset
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.runtime.build import build_dataset
from orchmllm.tools.data.command import main
from tests.lib.commands import ROOT
from tests.lib.corpora import write_paper_mix
from tests.lib.drawn import write_model
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import recipe
from tests.lib.training import train

RECIPE = ROOT / "recipes" / "paper_mix.yaml"
BATCH, STEPS = 12, 8  # 96 draws of 56 examples: into the second epoch


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("mix")
    write_paper_mix(root)
    write_model(root / "model", root / "data" / "tokenizer" / "tokenizer.json")
    return root


def absolute(root: Path, streaming: bool, indexed: bool) -> DataConfig:
    """The data section of the shipped recipe, below `root`."""
    data = load_recipe(RECIPE, ["model.config=model"]).data
    sources = tuple(replace(s, path=str(root / s.path), weight=w * streaming)
                    for s, w in zip(data.sources, (2.0, 1.0, 1.0), strict=True))
    return replace(data, sources=sources, prefetch=2,
                   streaming=streaming, num_shards=4,
                   index_dir=str(root / ("index" if indexed else "none")))


def model_of(root: Path) -> ModelConfig:
    return ModelConfig(config=str(root / "model"))


def run_recipe(root: Path, data: DataConfig, run_dir: Path, dispatch: str):
    base = recipe(model=model_of(root), data=data, run=RunConfig(dir=str(run_dir)),
                  balance=BalanceConfig(ranks_per_node=2, dispatch=dispatch))
    return replace(base, train=replace(base.train, num_steps=STEPS, global_batch_size=BATCH),
                   checkpoint=replace(base.checkpoint, every_steps=3, asynchronous=False))


def sources_seen(world, run, stop_after: int = 0) -> tuple[list, list]:
    """(what each step's examples are, metrics). stop_after: the step after which an error ends the
    run."""
    seen = []
    dataset = build_dataset(run)

    def record(step, row: dict) -> None:
        seen.append([tuple(dataset.describe(i, 0).values())[:3]
                     for i in step.example_ids.tolist()])
        if stop_after and step.index == stop_after:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        return seen, train(world, run, dataset, on_step=record)
    return seen, []


@pytest.mark.dist
@pytest.mark.parametrize("streaming, dispatch, num_workers, resumed_on", [
    pytest.param(False, "load", 2, (3,), marks=pytest.mark.slow),
    *(pytest.param(*case, (1, 3), marks=pytest.mark.slow) for case in (
        (False, "load", 2), (True, "load", 2), (False, "bytes", 0), (False, "tensors", 2),
        (True, "tensors", 0), (True, "bytes", 2)))])
def test_trained_together_and_resumed_on_other_ranks(root, tmp_path, streaming, dispatch,
                                                     num_workers, resumed_on, monkeypatch):
    if dispatch == "load":  # with an index on every rank
        monkeypatch.chdir(root)
        assert main(["index", str(RECIPE), "data.index_dir=index", "--workers", "1",
                     "model.config=model"]) == 0
    data = absolute(root, streaming, indexed=dispatch == "load")
    data = replace(data, num_workers=num_workers)
    run = run_recipe(root, data, tmp_path / "two", dispatch)
    (seen, rows), (also, _) = run_ranks(sources_seen, 2, run)
    assert seen == also and len(seen) == STEPS
    drawn = {source for step in seen for source, *_ in step}
    assert drawn == {"llava", "librispeech", "air_bench"}
    steps = [r for r in rows if "loss" in r]
    for phase in PHASES:
        before, after = (sum(r["phases"][phase][f"imbalance_{k}"] for r in steps)
                         for k in ("before", "after"))
        assert after < before, phase
        moved = sum(r["phases"][phase]["moved_bytes"] for r in steps)
        assert moved > 0 or dispatch == "load"  # which reads a medium where it is needed
    assert not (tmp_path / "two" / "quarantine.jsonl").exists()
    run_ranks(sources_seen, 2, run_recipe(root, data, tmp_path / "stopped", dispatch), 5)
    for ranks in resumed_on:
        shutil.copytree(tmp_path / "stopped", tmp_path / f"resumed{ranks}")
        run = run_recipe(root, data, tmp_path / f"resumed{ranks}", dispatch)
        resumed, continued = run_ranks(sources_seen, ranks, run)[0]
        assert resumed == seen[3:]  # the checkpoint of step 3
        losses = [r["loss"] for r in continued if "loss" in r]
        assert losses == pytest.approx([r["loss"] for r in steps[3:]], rel=1e-9)


def test_worker_processes_can_take_the_dataset(root):
    """What travels to a worker is where things are, not what is open."""
    data = absolute(root, False, indexed=False)
    dataset = open_dataset(data, model_of(root).folder, seed=0)
    copy = pickle.loads(pickle.dumps(dataset))
    for i in range(len(dataset)):
        a, b = dataset.load(i), copy.load(i)
        assert a.input_ids.equal(b.input_ids) and a.media.keys() == b.media.keys()
        assert all(a.media[name].equal(b.media[name]) for name in a.media)
    assert {int(m) for i in range(len(copy)) for m in copy.layout(i).modality} >= {VISION, AUDIO}
