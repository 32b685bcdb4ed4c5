"""The training loop on real ranks: a run in which nothing moves ends well, bad media cost their
example and nothing else."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import Recipe
from orchmllm.plan.assign import PhasePolicy
from orchmllm.runtime.run_state import MediaLimitError
from orchmllm.sharding.optimizer import learning_rate
from orchmllm.trainer import Trainer
from orchmllm.trainer import step as trainer_step
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe
from tests.lib.training import listened, train

pytestmark = pytest.mark.dist
ON = BalanceConfig(ranks_per_node=2)


def longer(folder: Path, **changes):
    base = recipe(model=SHALLOW, **changes)
    return replace(base, run=replace(base.run, dir=str(folder)),
                   train=replace(base.train, num_steps=6, lr=1e-2),
                   data=replace(base.data, prefetch=2))


def notes(world, r) -> list[str]:
    """What a run says beside its progress (shown by one rank)."""
    said = listened()
    train(world, r, SyntheticDataset())
    return said


def test_the_choice_of_attention_is_said_once(tmp_path):
    r = longer(tmp_path)
    [said] = run_ranks(notes, 1, replace(r, train=replace(r.train, num_steps=1)))
    assert [re.split(":|  | of causal", x)[0] for x in said] == [
        "the rows come from no processor", "attention", "Longest items", "saved step 1"]
    assert "device is cpu" in said[1]


def warnings_of(world, runs: dict[str, Recipe]) -> list[list[str]]:
    """What a start says of where ranks are; runs: a recipe for machines of the ranks."""
    told = []
    for machines, run in runs.items():
        with patch.object(trainer_step, "machine", lambda at=machines[world.rank]: at):
            said = listened()
            Trainer(run, world, dataset=SyntheticDataset())
        told.append([text for text in said if "machine" in text])
    return told


def test_ranks_of_a_machine_that_do_not_follow_each_other_are_told():
    nodes, alone = (recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=n)) for n in (2, 1))
    none, apart, back = run_ranks(warnings_of, 3, {"aab": nodes, "abb": nodes, "aba": nodes})[0]
    assert none == apart == [] and len(back) == 1
    assert "(rank 2 is on that of an earlier rank, and rank 1 is not)" in back[0]
    assert run_ranks(warnings_of, 3, {"aba": alone})[0] == [[]]  # nothing is exchanged in a node


def ends(world, run, dataset, validates: bool) -> tuple[list[str], str]:
    """(what a run says, why it ended). validates: the validation after the last step fails."""
    def validate() -> dict[str, float]:
        if trainer.progress.step == run.train.num_steps:
            raise MediaLimitError("data.strict: a clip of the validation")
        return {"validation_loss": 1.0}

    said = listened()
    trainer = Trainer(run, world, dataset=dataset)
    if validates:
        trainer.validation_rows, trainer.validate = [0], validate
    try:
        trainer.run()
    except MediaLimitError as e:
        return said, str(e)
    return said, "finished"


@pytest.mark.parametrize("kinds, fails", [
    (None, False), pytest.param(None, True, marks=pytest.mark.slow),
    pytest.param("T", False, marks=pytest.mark.slow)])
def test_nothing_stands_between_the_last_step_and_its_save(kinds, fails, tmp_path):
    """A tolerance of 100% leaves everything where it was sampled."""
    loose = PhasePolicy(tolerance=1.0)
    run = longer(tmp_path, balance=replace(ON, vision=loose, audio=loose, llm=loose))
    dataset = UniformDataset(kinds=["T"]) if kinds else SyntheticDataset()
    said, end = run_ranks(ends, 2, run, dataset, fails)[0]
    saved = tmp_path / "checkpoints" / "step_00000006"
    where = [line.partition(" (")[0] for line in said].index(f"saved step 6: {saved}")
    assert end == (f"data.strict: a clip of the validation; checkpoint: {saved}; once this is "
                   "mended, the same command goes on from it" if fails else "finished")
    warned = ["no effect: none of the 6 steps that were sampled unbalanced" in x for x in said]
    assert warned == [not (kinds or fails) and i == where + 1 for i in range(len(said))]


class UniformDataset(SyntheticDataset):
    def _segments(self, i):
        return super()._segments(0)


BROKEN = frozenset(range(1, 24, 4))  # examples of kinds TAT and AT


class BrokenMedia(SyntheticDataset):
    """The first medium of each example in BROKEN cannot be decoded."""

    def load(self, i, *, on_error=None, **how):
        example = super().load(i, **how)
        if i in BROKEN and example.parts:
            first = min(example.parts)
            on_error(first, ValueError("clip is corrupt"))
            example.parts[first]["input_features"].zero_()
        return example


def three_steps(world, folder, dispatch: str, dataset) -> list[tuple]:
    run = longer(folder, balance=replace(ON, dispatch=dispatch))
    trainer = Trainer(replace(run, train=replace(run.train, num_steps=3)), world, dataset=dataset)
    return [(trainer.train_step(s)["loss"], s.num_global_targets,
             [(f.example, f.segment, f.reason) for f in s.failed], s.example_ids.tolist())
            for s in trainer.loader()]


@pytest.mark.parametrize("dispatch", [pytest.param("tensors", marks=pytest.mark.slow), "load"])
def test_media_that_cannot_be_decoded_cost_their_example_only(dispatch, tmp_path):
    """The same losses as if the example had no labels; all ranks know which one failed."""
    broken = run_ranks(three_steps, 3, tmp_path, dispatch, BrokenMedia())
    clean = run_ranks(three_steps, 3, tmp_path / "clean", dispatch,
                      SyntheticDataset(unlabelled=BROKEN))
    assert [s[:2] for s in broken[0]] == [
        (pytest.approx(loss, rel=1e-12), n) for loss, n, _, _ in clean[0]]
    for step in broken[0]:
        where = [k for k, i in enumerate(step[3]) if i in BROKEN]
        assert sorted(f[0] for f in step[2]) == where
        assert all(f[2] == "clip is corrupt" for f in step[2])
    assert any(s[2] for s in broken[0])
    assert broken[0] == broken[1] == broken[2]
    lines = [json.loads(x) for x in (tmp_path / "quarantine.jsonl").open()]
    assert len(lines) == sum(len(s[2]) for s in broken[0])
    assert {x["example_id"] for x in lines} <= BROKEN


def test_learning_rate():
    config = replace(recipe().train, num_steps=100, warmup_steps=10, lr=1.0, min_lr_ratio=0.1)
    rates = [learning_rate(s, config) for s in range(101)]
    assert rates[:11] == pytest.approx([(s + 1) / 10 for s in range(10)] + [1.0])
    assert rates[100] == pytest.approx(0.1) and np.all(np.diff(rates[10:]) < 0)
