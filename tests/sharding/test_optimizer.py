"""AdamW's groups, norms by submodule, schedules and validation while training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchmllm.batch import IGNORE_INDEX
from orchmllm.config.recipe import TRAIN_PARTS, DataConfig, FsdpConfig, TrainConfig
from orchmllm.sharding.optimizer import (
    clip_gradients,
    learning_parts,
    learning_rate,
    make_optimizer,
    set_learning_rate,
)
from tests.lib.drawn import build
from tests.lib.gradients import Case, all_gradients, step_gradients
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen
from tests.lib.synthetic import MODEL, SHALLOW, SyntheticDataset, recipe
from tests.lib.training import train


def test_groups_by_submodule():
    model = build()
    config = TrainConfig(
        lr=1e-3, vision_lr=1e-4, connector_lr=2e-3, weight_decay=0.1, llm_weight_decay=0.0,
        audio_weight_decay=0.3, warmup_steps=2)
    optimizer = make_optimizer(model, config)
    assert set_learning_rate(optimizer, 0, config) == 5e-4
    found = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups
             for p in g["params"]}
    lr = {"vision": 5e-5, "audio": 5e-4, "connector": 1e-3, "llm": 5e-4}
    decay = {"vision": 0.1, "audio": 0.3, "connector": 0.1, "llm": 0.0}
    for name, p in model.named_parameters():
        if name.endswith("embed_positions.weight"):  # Whisper's do not learn
            continue
        part = next(part for part, key in (
            ("connector", "projector"), ("connector", "merger"), ("vision", "vision_tower"),
            ("audio", "audio_tower"), ("llm", "")) if key in name)
        plain = "norm" in name or "ln_q" in name or name.endswith("bias") or "embed_tok" in name
        assert found.pop(id(p)) == pytest.approx((lr[part], 0.0 if plain else decay[part])), name
    assert not found


def norms(world, case: Case, max_norm: float) -> tuple:
    """(norms told, full gradients before and after, the part of each) of one step."""
    made = []
    _, grads = step_gradients(world, replace(case, mutate=made.append))
    trainer, = made
    told = clip_gradients(trainer.parts, max_norm, trainer.device)
    after = {n: p.grad.full_tensor().numpy()
             for n, p in trainer.model.named_parameters() if p.requires_grad}
    parts = {n: trainer.model.part_of(n.removeprefix("hf.")) for n in grads}
    return told.tolist(), parts, grads, after


@pytest.mark.dist
@pytest.mark.parametrize("num_ranks, shards, model, max_norm", [
    (2, 0, MODEL, 0.01), (2, 1, frozen("llm", "audio"), 1e9),
    pytest.param(4, 2, frozen("vision"), 0.0, marks=pytest.mark.slow)])
def test_norms_are_those_of_the_whole_gradient(num_ranks, shards, model, max_norm):
    case = Case(recipe(model=model, fsdp=FsdpConfig(param_dtype="float64", shard_size=shards)))
    results = run_ranks(norms, num_ranks, case, max_norm)
    told, parts, before, after = results[0]
    assert all(r[0] == told for r in results)
    squares = {part: sum(float(np.sum(before[n]**2)) for n in before if parts[n] == part)
               for part in TRAIN_PARTS if part in parts.values()}
    want = [sum(squares.values()) ** 0.5, *(s ** 0.5 for s in squares.values())]
    assert told == pytest.approx(want, rel=1e-9)
    scale = min(1.0, max_norm / (told[0] + 1e-6)) if max_norm else 1.0
    for name, grad in before.items():
        np.testing.assert_allclose(after[name], scale * grad, rtol=1e-12)


def test_parts_that_do_not_learn_are_left_out():
    assert list(learning_parts(build(frozen("vision", "llm")))) == ["audio", "connector"]


def test_warmup_stable_decay():
    config = TrainConfig(lr=2.0, warmup_steps=10, num_steps=100, min_lr_ratio=0.1, schedule="wsd",
                         decay_ratio=0.2)
    rates = [learning_rate(s, config) for s in range(101)]
    assert rates[:10] == pytest.approx(np.arange(1, 11) * 0.2)
    assert rates[10:81] == [2.0] * 71
    assert rates[80:] == pytest.approx(np.linspace(2.0, 0.2, 21))
    short = replace(config, decay_ratio=1.0)
    assert learning_rate(10, short) == 2.0 > learning_rate(11, short)


class OneWord(SyntheticDataset):
    """Every target is the same token, so that a few steps teach it."""

    def _text(self, i):
        ids, labels = super()._text(i)
        return ids, labels.where(labels == IGNORE_INDEX, 7)


def offloaded(world, folder: str) -> list[list[dict]]:
    """Rows of a run with validations in between, and of the same with its state on the host."""
    out = []
    for offload in (False, True):
        one = recipe(model=SHALLOW, fsdp=FsdpConfig(param_dtype="float64", cpu_offload=offload))
        one = replace(
            one, run=replace(one.run, dir=f"{folder}/{offload}"),
            data=DataConfig(path="unused", prefetch=1, num_validation=4),
            train=replace(one.train, num_steps=5, validate_every_steps=2, lr=1e-2, vision_lr=1e-3))
        out.append(train(world, one, OneWord()))
    return out


@pytest.mark.dist
def test_validation_while_training(tmp_path):
    """Rows carry the step of the weights, and steps do not notice; nor do they where the state is
    on the host."""
    plain, offload = run_ranks(offloaded, 2, str(tmp_path))[0]
    seen = [(row["step"], "validation_loss" in row) for row in plain]
    assert seen == [(0, True), (0, False), (1, False), (2, True), (2, False), (3, False), (4, True),
                    (4, False), (5, True)]
    losses = [row["validation_loss"] for row in plain if "validation_loss" in row]
    assert len(set(losses)) == 4 and losses[-1] < losses[0]
    for a, b in zip(plain, offload, strict=True):
        for key in ("loss", "validation_loss", "grad_norm"):
            assert a.get(key) == b.get(key)
    row = plain[1]
    assert set(row["grad_norms"]) == {"vision", "audio", "connector", "llm"}
    assert row["grad_norm"] == pytest.approx(np.linalg.norm(list(row["grad_norms"].values())))


def test_gradients_are_added_up_in_reduce_dtype():
    """Every number of a sum is one that bfloat16 has; by default they are those of param_dtype,
    also where compute_dtype is bfloat16."""
    cases = {dtype: Case(recipe(model=SHALLOW, fsdp=FsdpConfig(
        param_dtype="float32", compute_dtype="bfloat16", reduce_dtype=dtype)))
        for dtype in ("", "bfloat16")}
    found = run_ranks(all_gradients, 2, cases)[0]
    for name, whole in found[""][1].items():
        rounded = found["bfloat16"][1][name]
        assert rounded.dtype == np.float32
        assert np.array_equal(rounded, torch.from_numpy(rounded).bfloat16().float().numpy()), name
        np.testing.assert_allclose(rounded, whole, atol=0.02 * np.abs(whole).max())
    assert any((torch.from_numpy(g).bfloat16().float().numpy() != g).any()
               for g in found[""][1].values())
