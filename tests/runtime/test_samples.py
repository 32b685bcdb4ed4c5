"""train.sample_every: what the model answers to held-out examples while it trains."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.recipe import load_recipe
from orchmllm.data.questions import Questions
from orchmllm.models.generate import generated
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.layout import TEXT
from orchmllm.runtime.build import build_dataset
from orchmllm.runtime.metrics import read_rows
from orchmllm.runtime.stop import Stopped
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.commands import TINY, demo_of
from tests.lib.ranks import run_ranks
from tests.lib.training import listened

SMALL = [*TINY, "data.num_validation=3", "train.num_steps=2", "train.num_samples=3",
         "train.sample_tokens=5", "checkpoint.every_steps=-1", "run.resume=never",
         "fsdp.llm_reshard=full"]


def trained(world, recipe) -> tuple[list, dict[str, bytes], list[int], list[str]]:
    """(losses, norms and plans of the steps, this rank's weights, state of torch's generator,
    what was said)."""
    said = listened()
    trainer = Trainer(recipe, world)
    if trainer.samples is not None and world.rank == 1:
        trainer.samples._answers._max_tokens = 2
    try:
        rows: list[dict] = []
        trainer.run(rows)
        weights = {n: p.detach().to_local().numpy().tobytes()
                   for n, p in trainer.model.named_parameters()}
        return ([[row.get(key) for key in ("loss", "grad_norm", "phases", "validation_loss")]
                 for row in rows], weights, torch.get_rng_state().tolist(), said)
    finally:
        trainer.close()


@pytest.mark.dist
def test_training_is_bit_equal_with_and_without_samples(demo_corpus, tmp_path):
    """The one example that a rank is to ask about cannot be read: both ranks go on all the same.
    And an answer ends earlier than that of the other rank, which gathers its weights."""
    data = tmp_path / "data"
    shutil.copytree(demo_corpus, data)
    rows = [json.loads(line) for line in (data / "data.jsonl").read_text().splitlines()]
    broken = len(rows) - 2  # of rank 1, which then has no example
    [name, *_] = rows[broken]["images"] + rows[broken]["audios"]
    (data / name).write_bytes(b"no medium")
    recipe = load_recipe("recipes/demo.yaml", [*SMALL, *demo_of(data)])
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "samples.jsonl").write_text('{"step": 9, "example": 0}\n')  # of another run
    plain, sampled = (run_ranks(trained, 2, replace(
        recipe, run=replace(recipe.run, dir=str(tmp_path / f"{every}")),
        train=replace(recipe.train, sample_every=every))) for every in (0, 1))
    assert [rank[:3] for rank in sampled] == [rank[:3] for rank in plain]
    assert not (tmp_path / "0" / "samples.jsonl").exists()
    lines = read_rows(tmp_path / "1" / "samples.jsonl")
    assert [(line["step"], line["example"]) for line in lines] == [
        (step, len(rows) - 3 + k) for step in (1, 2) for k in range(3)]
    for line in lines:
        if line["example"] == broken:
            assert "no decoder knows its format" in line["error"] and name in line["error"]
        else:
            assert line["expected"] == rows[line["example"]]["conversations"][1]["value"]
            assert line["answer"] and isinstance(line["ended"], bool)
    said = [line for line in sampled[0][3] if line.startswith("sample of step 2")]
    assert len(said) == 3 and any(
        f"example {broken}: it cannot be asked about: " in line and name in line for line in said)
    shown = [part for line in said for part in line.splitlines() if "says " in part]
    assert len(shown) == 2 and max(map(len, shown)) <= 100


def stopped(world, recipe) -> tuple[int, str]:
    """(Passes for the answers after step 1, where SIGTERM comes with the second; how the run
    ends); then it is started again."""
    passes = 0

    def signalled(module, *_) -> None:
        nonlocal passes
        passes += not module.training
        if passes == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = Trainer(recipe, world)
    trainer.model.hf.register_forward_pre_hook(signalled)
    trainer.validate = lambda: {"validation_loss": 1.0}
    with pytest.raises(Stopped) as end:
        trainer.run()
    trainer.close()
    Trainer(recipe, world).run()
    return passes, str(end.value)


@pytest.mark.dist
def test_a_stop_cuts_answers_off_which_come_at_the_next_start(demo_corpus, tmp_path):
    recipe = load_recipe("recipes/demo.yaml", [
        *SMALL, *demo_of(demo_corpus), f"run.dir={tmp_path}", "run.resume=auto",
        "train.sample_every=1", "train.sample_tokens=50"])
    for passes, end in run_ranks(stopped, 2, recipe):
        assert passes < 10 and end == "stopped on request after step 1"
    assert [row["step"] for row in read_rows(tmp_path / "samples.jsonl")] == [1] * 3 + [2] * 3


@pytest.mark.whole
def test_each_token_of_an_answer_is_progress():
    """Which the watchdog sees by the clock; the answer is that of stock transformers."""
    stock = models.build("qwen3_vl").eval()
    example = models.sample("qwen3_vl", stock, [], 7)
    how = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = generated(stock, {"input_ids": example["input_ids"]}, **how)
    whole = WholeModel(stock, torch.float64)
    batch, before = whole.join([models.as_example(0, example)]), whole.clock.switches
    assert whole(batch, how) == wanted and len(wanted) == 6
    assert whole.clock.switches - before >= 6


def test_a_prompt_is_what_training_sees_before_the_first_answer(demo_corpus):
    recipe = load_recipe("recipes/demo.yaml", [*TINY, *demo_of(demo_corpus)])
    dataset = build_dataset(recipe)
    questions, placeholders = Questions(dataset), [*dataset.reader.processor.token_ids.values()]
    rows = [json.loads(line) for line in
            Path(demo_corpus, "data.jsonl").read_text().splitlines()]
    for k, row in enumerate(rows):
        prompt, layout = questions.load(k), questions.layout(k)
        ids = prompt.input_ids.tolist()
        text = dataset.tokenizer.decode([i for i in ids if i not in placeholders])
        assert text.endswith("<|im_start|>assistant\n") and text.count("assistant\n") == 1
        assert dataset.tokenizer.decode(questions.answer(k)) == (
            row["conversations"][1]["value"] + "<|im_end|>")
        assert prompt.labels.tolist() == [IGNORE_INDEX] * len(ids)
        marks = row["conversations"][0]["value"]
        media = layout.modality != TEXT
        assert media.sum() == marks.count("<image>") + marks.count("<audio>")
        assert layout.num_tokens[media].sum() == sum(i in placeholders for i in ids)
