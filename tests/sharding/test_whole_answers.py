"""train.sample_every of models of transformers: what sharded weights answer is what stock
transformers generates with them in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import DataConfig, FsdpConfig, Recipe, RunConfig, TrainConfig
from orchmllm.runtime.build import build_dataset
from orchmllm.runtime.metrics import read_rows
from orchmllm.trainer import Trainer
from tests.lib import encoder_models
from tests.lib import whole_models as models
from tests.lib.processors import FAMILIES, video_token
from tests.lib.ranks import run_ranks
from tests.lib.videos import write_video
from tests.lib.whole_folders import write_medium, write_model

pytestmark = [pytest.mark.dist, pytest.mark.whole]
SECOND = "and what is that?"
# Media of the questions: an image or a clip each, or "video".
MEDIA = [2, 0, 1, 0, "video", 0, 3, 1]


def write_rows(folder: Path, family: str) -> None:
    """Each with a second question about one more medium, which comes after the first answer."""
    rng = np.random.default_rng(0)
    kinds = [kind for kind in encoder_models.FAMILIES[family].make if kind != "video"]
    write_video(folder / "v.mp4", count=12, rate=8, size=(56, 56))
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for i, media in enumerate(MEDIA):
            parts, more = [], []
            if media == "video":
                media = 0
                parts = [{"type": "video", "video": "v.mp4", "nframes": 5},
                         {"type": "text", "text": "and"}] if video_token(family) else []
            for k in range(media + 1):
                shown = [write_medium(kinds[k % len(kinds)], folder, f"{i}_{k}", rng),
                         {"type": "text", "text": f" picture {k}"}]
                (more if k == media else parts).extend(shown)
            parts.append({"type": "text", "text": "What is " + "it? " * int(rng.integers(1, 9))})
            file.write(json.dumps({"messages": [
                {"role": "user", "content": parts},
                {"role": "assistant", "content": f"the red row {i}"},
                {"role": "user", "content": [*more, {"type": "text", "text": SECOND}]},
                {"role": "assistant", "content": "the blue one"}]}) + "\n")


def recipe(folder: Path, **fsdp: object) -> Recipe:
    return Recipe(
        run=RunConfig(dir=str(folder / "run")), model=ModelConfig(pretrained=str(folder)),
        data=DataConfig(path=str(folder / "data.jsonl"), index_dir=str(folder / "index"),
                        num_validation=len(MEDIA) - 1),
        train=TrainConfig(num_steps=1, global_batch_size=1, sample_every=1, sample_tokens=7,
                          num_samples=len(MEDIA) - 1),
        fsdp=FsdpConfig(**{"param_dtype": "float64", **fsdp}))


def answered(world, run: Recipe, name: str, last: int) -> int:
    """Asks with the weights of the folder, twice. Returns the forward passes of this rank. last: a
    token that ends an answer."""
    FAMILIES[name](transformers)  # imports a processor that would need torchvision
    trainer, calls = Trainer(run, world), []
    forward = trainer.model.forward
    trainer.model.forward = lambda batch, asked: forward(batch, {**asked, "eos_token_id": last})
    trainer.model.blocks()["llm"][0].register_forward_hook(lambda *_: calls.append(1))
    try:
        for _ in range(2):
            trainer._sample()
        assert trainer.model.training and all(p.grad is None for p in trainer.model.parameters())
        return len(calls)
    finally:
        trainer.close()


def by_stock(folder: Path, run: Recipe, name: str) -> dict[int, list[int]]:
    """The tokens of each example that can be asked about."""
    FAMILIES[name](transformers)
    stock, rows = models.stock_of(folder).eval(), build_dataset(run)
    lines = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    alone = folder / "questions.jsonl"
    alone.write_text("".join(json.dumps({"messages": line["messages"][:2]}) + "\n"
                             for line in lines))
    asked = build_dataset(replace(run, data=replace(run.data, path=str(alone), num_validation=0)))
    out = {}
    for i in range(1, len(rows)):
        example = asked.load(i)
        first = int((example.labels != -100).nonzero()[0])
        ids = example.input_ids[None, :first]
        media = {n: v[:, :first] if n.endswith("type_ids") else v.double() if v.is_floating_point()
                 else v for n, v in example.media.items()}
        made = stock.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **media,
                              do_sample=False, max_new_tokens=7, eos_token_id=None,
                              pad_token_id=rows.tokenizer.end_id)
        out[i] = made[0, first:].tolist()
    return out


def uneven_end(answers: list[list[int]], ranks: int) -> int:
    """A token that ends the answers of a round at unequal lengths, if there is one, and answers of
    different rounds."""
    def lengths(token: int) -> list[int]:
        return [[*ids, token].index(token) for ids in answers]

    return max((token for ids in answers for token in ids), key=lambda token: (sum(
        len({*lengths(token)[k: k + ranks]}) for k in range(0, len(answers), ranks)),
        len({*lengths(token)})))


@pytest.mark.parametrize("name, ranks, shard_size", [("qwen2_5_vl", 2, 0), *(
    pytest.param(name, *groups, marks=pytest.mark.slow)
    for name in ("qwen2_5_vl", "qwen3_vl", "internvl", "gemma3", "llava_onevision", "qwen2_5_omni",
                 "qwen3_5", "qwen3_vl_moe", "qwen2_audio")
    for groups in ((1, 0), (2, 0), (3, 0), (4, 2)) if (name, groups) != ("qwen2_5_vl", (2, 0)))])
def test_sharded_weights_answer_as_stock_transformers_does(name, ranks, shard_size, tmp_path):
    """Seven questions, of which one rank or more has none in the last round. Ranks make as many
    passes where the answer of one ends first."""
    write_model(name, tmp_path, torch.float64)
    write_rows(tmp_path, name)
    run = recipe(tmp_path, shard_size=shard_size, prefetch=1,
                 llm_checkpointing="full:1")
    wanted, tokenizer = by_stock(tmp_path, run, name), build_dataset(run).tokenizer
    last = uneven_end([*wanted.values()], ranks)
    passes = run_ranks(answered, ranks, run, name, last)
    assert len(set(passes)) == 1
    lines = read_rows(tmp_path / "run" / "samples.jsonl")
    assert [line["example"] for line in lines] == [*range(1, len(MEDIA))] * 2
    for line in lines:
        ids = wanted[line["example"]]
        ids = ids[: [*ids, last].index(last) + 1]
        ended = ids[-1] == tokenizer.end_id
        assert line["answer"] == tokenizer.decode([i for i in ids if i != tokenizer.end_id])
        assert line["ended"] == ended and line["expected"] == f"the red row {line['example']}"
    assert len({line["answer"] for line in lines}) > 1
