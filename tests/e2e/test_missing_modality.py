"""Ranks without images, without audio, without either: no hang, and the gradients of one process.

The most reported failure of multimodal FSDP training. With balancing off the first ranks really
hold none; on, plans may still leave a rank without."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import FsdpConfig, RunConfig, TrainConfig
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.trainer import Trainer
from tests.lib.gradients import BATCH, Case, all_gradients, reference_gradients, worst_difference
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SHALLOW, SyntheticDataset, recipe

pytestmark = pytest.mark.dist
NUM_RANKS = 3


FULL, TEXTS = ["TVT", "TAT", "TVAT", "TAVT"], ["T", "TT", "T", "T"]
WITHOUT = {  # kinds of the examples of each rank
    "another on each": [["TAT", "T", "AT", "T"], ["TVT", "T", "VT", "T"], FULL],
    "both on all but one": [TEXTS, TEXTS, FULL], "both on all": [TEXTS, TEXTS, TEXTS]}


def test_no_hang_and_right_gradients():
    cases = {}
    for k, (pattern, of_ranks) in enumerate(WITHOUT.items()):
        dataset = SyntheticDataset(kinds=sum(of_ranks, []), size=BATCH)
        for enabled in (False, True):
            checkpointing = ("none", "full")[(k + enabled) % 2]  # every pair of two options
            cases[f"{pattern}/balance={enabled}/checkpointing={checkpointing}"] = Case(
                recipe(model=SHALLOW, balance=BalanceConfig(enabled=enabled, ranks_per_node=2),
                       fsdp=FsdpConfig(param_dtype="float64",
                                       activation_checkpointing=checkpointing)),
                dataset=dataset)
    results = run_ranks(all_gradients, NUM_RANKS, cases)
    references = {}
    for name, case in cases.items():
        pattern = name.split("/")[0]
        if pattern not in references:
            references[pattern] = reference_gradients(case)
        loss, grads = references[pattern]
        assert results[0][name][0] == pytest.approx(loss, rel=1e-12), name
        error, where = worst_difference(results[0][name][1], grads)
        assert error <= 1e-9, f"{name}: {where} differs by {error:.1e}"


def untaught(world, run) -> list[bytes]:
    """This rank's weights before and after steps of which nothing is learnt."""
    def weights() -> bytes:
        return b"".join(p.detach().to_local().numpy().tobytes()
                        for p in trainer.model.parameters())

    trainer = Trainer(run, world, dataset=SyntheticDataset(unlabelled=frozenset(range(24))))
    before = weights()
    trainer.run()
    trainer.close()
    return [before, weights()]


def test_steps_without_targets_leave_the_weights(tmp_path):
    """A weight decay would shrink them."""
    run = recipe(model=SHALLOW, run=RunConfig(dir=str(tmp_path)), train=TrainConfig(
        num_steps=2, batch_size=2, weight_decay=0.1, warmup_steps=0))
    for before, after in run_ranks(untaught, 2, run):
        assert before == after


def test_fewer_examples_than_ranks():
    """Shares and whole phases are empty on some ranks."""
    case = Case(recipe(model=SHALLOW, balance=BalanceConfig(ranks_per_node=2)),
                dataset=SyntheticDataset(kinds=["TVAT"], size=BATCH))
    off = replace(case, recipe=replace(case.recipe, balance=BalanceConfig(enabled=False)))
    results = run_ranks(two_examples_on_four_ranks, 4, [case, off])
    for r in results:
        assert r == pytest.approx([results[0][0]] * 2, rel=1e-12)


def two_examples_on_four_ranks(world, cases) -> list[float]:
    losses = []
    for case in cases:
        trainer = Trainer(case.recipe, world, dataset=case.dataset)
        loader = StepLoader(case.dataset, GlobalSampler(range(2), 2, shuffle=False),
                            trainer.orchestrator, num_steps=1, feed=trainer._feed)
        losses += [trainer.train_step(step)["loss"] for step in loader]
    return losses
