"""Predictions are made for the batches that a run draws: of streams, weighted and repeated sources
and capped mini-batches."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchmllm.cli.data import index_all
from orchmllm.config import DataConfig, FsdpConfig, SourceConfig, TrainConfig, plan_spec
from orchmllm.data.formats.open import index_path
from orchmllm.data.stats import global_batches
from orchmllm.data.stream import open_dataset
from orchmllm.estimate.fits import for_run, joined
from orchmllm.estimate.lengths import open_recipe
from orchmllm.estimate.memory import MemoryModel, loads_of
from orchmllm.models.flops import padded_phases
from orchmllm.plan.assign import PHASES
from orchmllm.plan.step import plan_step
from tests.lib.formats import write_jsonl
from tests.lib.synthetic import recipe
from tests.lib.tokenizers import write_tokenizer

RANKS = 4
FULL = dict.fromkeys(PHASES, "full")


def talk(words: int) -> dict:
    return {"conversations": [{"from": "human", "value": "what " * words},
                              {"from": "gpt", "value": "red " * words}]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_tokenizer(folder)
    write_jsonl(folder / "long.jsonl", [talk(200 + i) for i in range(40)])
    write_jsonl(folder / "short.jsonl", [talk(3 + i % 7) for i in range(40)])
    write_jsonl(folder / "mixed.jsonl", [talk(3 + i % 7 if i % 10 else 200) for i in range(200)])
    return folder


def own(folder, *paths: str, sources: dict | None = None, **data):
    """A recipe of these files."""
    configs = tuple(SourceConfig(path=str(folder / p), **(sources or {}).get(p, {}))
                    for p in paths)
    return recipe(fsdp=FsdpConfig(activation_checkpointing="auto", memory_gb=1.0),
                  train=TrainConfig(batch_size=2), data=DataConfig(
                      tokenizer=str(folder / "tokenizer.json"), index_dir=str(folder / "index"),
                      sources=configs, **data))


CASES = {
    "capped": (["mixed.jsonl"], {"batching": "capped", "max_batch_tokens": 4000}),
    "weights": (["long.jsonl", "short.jsonl"], {"sources": {
        "long.jsonl": {"weight": 19.0}, "short.jsonl": {"weight": 1.0}}}),
    "repeats": (["short.jsonl", "long.jsonl"], {"sources": {"long.jsonl": {"repeats": 19}}}),
}


def opened(asked):
    """(dataset, global batches as training draws them) of a recipe whose index is made."""
    sources, reader = open_recipe(asked)
    indexes = index_all(sources, reader, index_path(asked.data.index_dir), 1)
    dataset = open_dataset(asked.data, asked.model.vision.geometry, asked.model.audio.geometry,
                           seed=asked.run.seed)
    return dataset, list(global_batches(sources, indexes, asked, RANKS))


@pytest.mark.parametrize("case", CASES)
def test_a_run_decides_by_the_batches_that_it_draws(folder, case):
    """The memory that it asks for is what its first two steps need."""
    paths, data = CASES[case]
    asked = own(folder, *paths, **data)
    dataset, drawn = opened(asked)
    spec, pad = plan_spec(asked, 8), padded_phases(asked.model)
    needed = MemoryModel.of(asked, RANKS, 8, on_cpu=True).peak(
        joined([loads_of(plan_step(x, spec), pad) for x in drawn[:2]]), FULL)

    def decided(share: float) -> dict[str, str]:
        fsdp = replace(asked.fsdp, memory_gb=share * needed / 1e9)
        return for_run(replace(asked, fsdp=fsdp), dataset, range(len(dataset)), spec, RANKS, 0)

    assert decided(1.001)["llm"] == "full"
    key = "data.max_batch_tokens" if case == "capped" else "train.batch_size"
    with pytest.raises(ValueError, match=rf"does not fit: {key}=\d+ .*; {key}=\d+ would fit"):
        decided(0.98)


def test_a_run_on_a_stream_decides_by_its_first_examples(folder):
    asked = own(folder, "mixed.jsonl", streaming=True)
    dataset = open_dataset(asked.data, asked.model.vision.geometry, asked.model.audio.geometry,
                           seed=0)
    rows, _ = dataset.split(0)
    assert for_run(asked, dataset, rows, plan_spec(asked, 8), RANKS, 0) == dict.fromkeys(
        PHASES, "none")
