"""Predictions are made for the batches that a run draws: of streams, weighted and repeated sources
and capped mini-batches."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig, PhaseConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import DataConfig, FsdpConfig, SourceConfig, TrainConfig, to_yaml
from orchmllm.data.formats.open import index_path
from orchmllm.data.sampler import make_sampler
from orchmllm.data.stream import open_dataset
from orchmllm.models.whole_flops import plan_spec
from orchmllm.plan.assign import PHASES
from orchmllm.plan.gain import slowest_costs
from orchmllm.plan.microbatches import plan_microbatches
from orchmllm.plan.step import phase_figures, plan_step
from orchmllm.sharding.fits import joined
from orchmllm.sharding.loads import loads_of
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.run_memory import RunMemory
from orchmllm.tools.data.command import index_all
from orchmllm.tools.data.command import main as data_command
from orchmllm.tools.data.composition import predict
from orchmllm.tools.predict.dry_run import dry_run
from orchmllm.tools.predict.examples import dataset_of, of_recipe
from orchmllm.tools.predict.hardware import Hardware
from orchmllm.tools.predict.plan_job import main
from orchmllm.tools.predict.text import dry_run_text
from tests.lib.drawn import drawn_model, write_recipe
from tests.lib.formats import write_jsonl
from tests.lib.synthetic import recipe

RANKS = 4
FULL = dict.fromkeys(PHASES, "full")


def talk(words: int) -> dict:
    return {"conversations": [{"from": "human", "value": "what " * words},
                              {"from": "gpt", "value": "red " * words}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_jsonl(folder / "long.jsonl", [talk(200 + i) for i in range(40)])
    write_jsonl(folder / "short.jsonl", [talk(3 + i % 7) for i in range(40)])
    write_jsonl(folder / "mixed.jsonl", [talk(3 + i % 7 if i % 10 else 200) for i in range(200)])
    return folder


def own(folder, *paths: str, sources: dict | None = None, **data):
    """A recipe of these files."""
    configs = tuple(SourceConfig(path=str(folder / p), **(sources or {}).get(p, {}))
                    for p in paths)
    return recipe(model=drawn_model(),
                  fsdp=FsdpConfig(activation_checkpointing="auto", memory_gb=1.0),
                  train=TrainConfig(batch_size=2), data=DataConfig(
                      index_dir=str(folder / "index"),
                      sources=configs, **data))


CASES = {
    "capped": (["mixed.jsonl"], {"batching": "capped", "max_batch_tokens": 4000}),
    "weights": (["long.jsonl", "short.jsonl"], {"sources": {
        "long.jsonl": {"weight": 19.0}, "short.jsonl": {"weight": 1.0}}}),
    "repeats": (["short.jsonl", "long.jsonl"], {"sources": {"long.jsonl": {"repeats": 19}}}),
}


def opened(asked):
    """(dataset, 20 global batches as training draws them) of a recipe whose index is made."""
    rows = dataset_of(asked)
    index_all(rows.sources, rows.reader, index_path(asked.data.index_dir), 1)
    dataset = dataset_of(asked)
    sampler = make_sampler(dataset, dataset.split(asked.data.num_validation)[0],
                           resolve(asked, RANKS, 8).global_batch_size, seed=asked.run.seed,
                           data=asked.data, per_rank=asked.train.batch_size)
    return dataset, [dataset.layouts(sampler.batch(step), [
        share.stop - share.start for share in sampler.shares(step, RANKS)]) for step in range(20)]


@pytest.mark.parametrize("case", CASES)
def test_a_run_decides_by_the_batches_that_it_draws(folder, case):
    """The memory that it asks for is what its first two steps need, and where examples can move
    such that they need less, that."""
    paths, data = CASES[case]
    asked = own(folder, *paths, **data)
    dataset, drawn = opened(asked)
    spec = plan_spec(resolve(asked, RANKS, 8))
    needed = MemoryModel.of(resolve(asked, RANKS, 8)).peak(
        joined([loads_of(plan_step(x, spec)) for x in drawn[:2]]), FULL)

    def decided(share: float) -> dict[str, str]:
        fsdp = replace(asked.fsdp, memory_gb=share * needed / 1e9)
        return RunMemory(replace(asked, fsdp=fsdp), dataset, range(len(dataset)), spec, RANKS,
                         0).choice

    fits, lacks = (0.7, 0.5) if case == "capped" else (1.001, 0.98)
    assert decided(fits)["llm"] == "full"
    key = "data.max_batch_tokens" if case == "capped" else "train.batch_size"
    with pytest.raises(ValueError, match=rf"does not fit: {key}=\d+ .*; {key}=\d+ would fit"):
        decided(lacks)


def test_a_run_on_a_stream_decides_by_its_first_examples(folder):
    asked = own(folder, "mixed.jsonl", streaming=True)
    dataset = open_dataset(asked.data, asked.model.folder, seed=0)
    rows, _ = dataset.split(0)
    assert RunMemory(asked, dataset, rows, plan_spec(resolve(asked, RANKS, 8)), RANKS,
                     0).choice == dict.fromkeys(PHASES, "none")


def of_steps(batches) -> tuple[float, float]:
    """Mean examples and LLM tokens of global batches."""
    return (np.mean([b.num_examples for b in batches]),
            np.mean([b.tokens_per_example.sum() for b in batches]))


@pytest.mark.parametrize("case", CASES)
def test_a_prediction_is_made_for_the_batches_that_a_run_draws(folder, case):
    paths, data = CASES[case]
    asked = own(folder, *paths, **data)
    _, drawn = opened(asked)
    predicted = of_recipe(asked)
    got = of_steps([predicted.draw(RANKS, 2, seed) for seed in range(100)])
    assert got == pytest.approx(of_steps(drawn), rel=0.15)
    assert predicted.epoch == {"capped": 200, "weights": 0, "repeats": 800}[case]
    assert predicted.draw(RANKS, 4, 0).num_ranks == RANKS


@pytest.mark.parametrize("case", CASES)
def test_no_prediction_is_made_of_rows_that_are_held_out(folder, case):
    """Its steps are those of a run's own sampler, and nothing else is looked at."""
    paths, data = CASES[case]
    asked = own(folder, *paths, num_validation=25, **data)
    dataset, _ = opened(asked)
    rows, held = dataset.split(25)
    sampler = make_sampler(dataset, rows, 2 * RANKS, seed=asked.run.seed, data=asked.data,
                           per_rank=2)
    predicted = of_recipe(asked)
    for step in range(3):
        assert predicted.draw(RANKS, 2, step).example_id.tolist() == sampler.batch(step).tolist()
    looked_at = [*chain(*(part.example_id.tolist() for part in predicted.rows()))]
    assert looked_at == [*rows] and len(held) == 25
    assert predicted.epoch == {"capped": 175, "weights": 0, "repeats": 27 + 19 * 28}[case]
    assert f"{len(rows)} rows by the length index of its data, without the 25 of" in predicted.what


def test_a_dry_run_of_capped_mini_batches_says_so(folder, capsys):
    paths, data = CASES["capped"]
    asked = replace(own(folder, *paths, **data), fsdp=FsdpConfig())
    _, drawn = opened(asked)
    found = dry_run(asked, RANKS, Hardware(), steps=5, examples=of_recipe(asked))
    assert found["batch_size"] == pytest.approx(of_steps(drawn)[0] / RANKS, rel=0.15)
    assert found["examples_per_step"] == RANKS * found["batch_size"]
    assert "in its capped mini-batches" in found["lengths"]
    said = dry_run_text(found)
    assert f"{found['batch_size']:.1f} examples a rank" in said
    other = dry_run(asked, RANKS, Hardware(), steps=1)  # the paper's lengths, not in mini-batches
    assert "data.batching=capped" in " ".join(other["not_modelled"])
    path = write_recipe(folder, f"path: {folder / 'mixed.jsonl'}, batching: capped, "
                                "max_batch_tokens: 4000")
    assert main([path, "--ranks", "4"]) == 2  # it searches what has no effect
    assert "data.batching is capped" in capsys.readouterr().err


def test_rates_and_imbalances_are_of_all_steps_together(folder):
    """Every scheme does the same work: a step of long examples counts by the time that it takes."""
    asked = replace(own(folder, "mixed.jsonl"), fsdp=FsdpConfig())
    opened(asked)
    for ranks, count in ((1, 4), (4, 1)):
        found = dry_run(replace(asked, train=replace(asked.train, accumulation_steps=count)), ranks,
                        Hardware(), steps=12, examples=of_recipe(asked))
        for rate in ("mfu", "tokens_per_gpu"):
            done = [one[rate] * one["step_s"] for one in found["predicted"].values()]
            assert done == pytest.approx(done[:1] * 3, rel=1e-9), rate
        uneven = found["phases"]["llm"]
        assert uneven["none"] / uneven["balanced"] == pytest.approx(
            found["ratio"]["none / balanced"], rel=0.01)


@pytest.mark.parametrize("case, said", [("weights", "4 ranks x 6 examples"),
                                        ("capped", "4 ranks x 3 mini-batches")])
def test_statistics_are_of_the_global_batch_of_the_recipe(folder, capsys, case, said):
    paths, data = CASES[case]
    asked = own(folder, *paths, **data)
    _, alone = opened(asked)
    asked = replace(asked, train=replace(asked.train, global_batch_size=48, accumulation_steps=2))
    _, drawn = opened(asked)  # 24 examples, or 12 mini-batches of 2, a microbatch
    assert of_steps(drawn) == pytest.approx([6 * x for x in of_steps(alone)], rel=0.15)
    path = folder / "stats.yaml"
    path.write_text(to_yaml(asked), encoding="utf-8")
    assert data_command(["stats", str(path), "--ranks", "4", "--workers", "1"]) == 0
    told = capsys.readouterr().out
    assert said in told and "(2 microbatches a step, each of which waits" in told


def test_steps_have_as_many_microbatches_as_their_caps_need(folder):
    """In statistics, a dry run, and a run of which the memory is known as well."""
    asked = own(folder, "mixed.jsonl")
    asked = replace(asked, train=replace(asked.train, batch_size=6, accumulation_steps=0),
                    balance=BalanceConfig(llm=PhaseConfig(max_rank_tokens=1300)))
    dataset, drawn = opened(asked)
    spec = plan_spec(resolve(asked, RANKS, 8))
    planned = [(layout, [plan for _, plan in plan_microbatches(layout, spec, 0)])
               for layout in drawn]
    counts = [len(plans) for _, plans in planned]
    assert min(counts) < max(counts)
    before, after = np.sum([slowest_costs(phase_figures(*step)) for step in planned], axis=0)
    assert predict(drawn, asked)[1] == pytest.approx(before / after)
    found = dry_run(asked, RANKS, Hardware(), steps=sum(counts), examples=of_recipe(asked))
    assert found["steps"] == len(drawn) and found["microbatches"] == np.mean(counts)
    assert found["batch_size"] * found["microbatches"] == pytest.approx(6)
    once = dry_run(replace(asked, balance=BalanceConfig(), train=replace(
        asked.train, accumulation_steps=1)), RANKS, Hardware(), examples=of_recipe(asked))
    assert found["flops"] == pytest.approx(once["flops"])
    assert RunMemory(asked, dataset, range(len(dataset)), spec, RANKS, 0).choice["llm"] == "none"
