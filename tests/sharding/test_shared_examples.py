"""Examples that ranks share, from files to gradients on real ranks: see test_planned_phases."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import transformers

from orchmllm.batch import SequenceLengths
from orchmllm.config.balance import PhaseConfig
from orchmllm.config.recipe import Recipe, RunConfig
from orchmllm.models import packing, shared
from orchmllm.plan import shares as plans
from orchmllm.plan.step import plan_step
from orchmllm.runtime.preflight import checks
from orchmllm.sharding import load_whole
from orchmllm.trainer import Trainer
from tests.lib import composed
from tests.lib.processors import FAMILIES
from tests.lib.ranks import run_ranks
from tests.lib.training import train
from tests.lib.whole_folders import write_counted, write_model
from tests.plan.test_shares import batch, spec
from tests.sharding.test_planned_phases import (
    compared,
    frozen_compared,
    recipe,
    steps_of,
    summed,
)

pytestmark = [pytest.mark.dist, pytest.mark.whole]
# Media of each example: two long ones in the first step, one in the second, none in the third,
# where a text is long; the last has one example for up to 4 ranks.
COUNTS = [18, 1, 0, 2, 0, 1, 12, 0, *[0, 16, *[0] * 6], *[0] * 8, 30]
LONG_TEXT = 20


def write_rows(folder: Path, *kinds: str) -> None:
    write_counted(folder, COUNTS, kinds or ("image",), long_texts=[LONG_TEXT])


def shares(run: Recipe, most: int = 4, **balance) -> Recipe:
    return replace(run, balance=replace(
        run.balance, llm=PhaseConfig(max_shares=most), **balance))


def test_gradients_are_those_of_stock_transformers(tmp_path):
    """A composition on three ranks, of which two share; the third one takes part without a piece,
    in the last step without any example."""
    folder = tmp_path / "model"
    composed.write_composed("siglip_whisper_qwen2", folder)
    write_rows(folder, "image", "audio")
    run = shares(recipe(folder), 2)
    seen = run_ranks(compared, 3, folder, "siglip_whisper_qwen2", [run], timeout_s=300)[0]
    assert all(step["shared"] for step in seen) and 0 in seen[-1]["examples"]


@pytest.mark.slow
@pytest.mark.parametrize("name, kind", [
    *((name, "image") for name in (
        "gemma3", "qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe", "internvl", "llava_onevision", "glm4v",
        "qwen2_5_omni")), ("qwen2_5_omni", "audio")])
def test_gradients_of_families(name, kind, tmp_path):
    """With windows, images that see themselves in both directions, rotary positions of three axes,
    features of several layers, experts, and clips that are cut; where one layer is recomputed, and
    the loss is made by chunks."""
    write_model(name, tmp_path, torch.float64)
    write_rows(tmp_path, kind)
    run = shares(recipe(tmp_path))
    run = replace(run, fsdp=replace(run.fsdp, llm_checkpointing="full:1", loss_chunk_rows=16))
    phase = "audio" if kind == "audio" else "vision"
    seen = run_ranks(compared, 4, tmp_path, name, [run], phase)[0]
    assert all(step["shared"] for step in seen)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shard_size", [(2, 0), (3, 0), (4, 0), (4, 2)])
def test_gradients_by_every_setting(ranks, shard_size, tmp_path):
    """Also on a rank without anything, on two nodes, and where an image of a shared example cannot
    be decoded, so that nothing is learnt of any of its pieces."""
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_rows(tmp_path)
    broken = tmp_path / "9_3.png"
    broken.write_bytes(broken.read_bytes()[:3000])  # its header is whole
    run = recipe(tmp_path)
    run = replace(run, fsdp=replace(run.fsdp, shard_size=shard_size))
    runs = [
        shares(run, 2),
        shares(run, 8),
        shares(run, 2, ranks_per_node=2),
        shares(run, dispatch="load"),
        shares(run, dispatch="bytes", group="shard"),
        replace(shares(run), train=replace(run.train, accumulation_steps=2),
                fsdp=replace(run.fsdp, llm_checkpointing="selective")),
        replace(shares(run), fsdp=replace(run.fsdp, llm_checkpointing="full")),
    ]
    first, second, third, last = run_ranks(compared, ranks, tmp_path, "qwen3_vl", runs)[0]
    assert second["shared"] == second["failed"] == [1]
    assert first["shared"] or ranks == 2
    assert third["shared"] and last["shared"] and (0 in last["examples"] or ranks < 4)


@pytest.mark.slow
@pytest.mark.parametrize("ranks, shard_size", [(3, 0), (4, 2)])
def test_what_is_frozen_changes_no_other_gradient(ranks, shard_size, tmp_path):
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_rows(tmp_path)
    every = ("vision", "connector", "llm")
    settings = [parts for n in (1, 2) for parts in combinations(every, n)]
    run_ranks(frozen_compared, ranks, tmp_path, "qwen3_vl", settings, shard_size, exact=1e-10,
              max_shares=4)


def compared_by_three(world, *args) -> list[dict]:
    """Plans share by powers of two; nothing else relies on it."""
    num_ranks = plans._num_ranks
    with mock.patch.object(plans, "_num_ranks", lambda *of: np.minimum(2 * num_ranks(*of) - 1, 3)):
        return compared(world, *args)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_gradients_where_three_ranks_share(ranks, tmp_path):
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_rows(tmp_path)
    seen = run_ranks(compared_by_three, ranks, tmp_path, "qwen3_vl", [shares(recipe(tmp_path))])[0]
    assert all(step["shared"] for step in seen)


def compared_compiled(world, *args) -> list[dict]:
    """Without the code generator, which takes minutes."""
    with mock.patch.object(load_whole, "compile_whole", partial(
            load_whole.compile_whole, backend="aot_eager")):
        return compared(world, *args)


@pytest.mark.slow
@pytest.mark.parametrize("recomputed", ["none", "full"])
def test_gradients_with_compiled_blocks(recomputed, tmp_path):
    """Attention of shared examples runs between their graphs."""
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_rows(tmp_path)
    run = shares(recipe(tmp_path))
    run = replace(run, fsdp=replace(run.fsdp, compile=True, llm_checkpointing=recomputed))
    seen = run_ranks(compared_compiled, 3, tmp_path, "qwen3_vl", [run])[0]
    assert all(step["shared"] for step in seen)


def exchanges(world, run: Recipe) -> list[tuple[bool, int]]:
    """Of each microbatch, whether a rank of this node shares an example, and exchanges of keys and
    values in the forward pass."""
    FAMILIES["qwen3_vl"](transformers)  # imports a processor that would need torchvision
    trainer, found = Trainer(run, world), []
    try:
        for step in steps_of(trainer):
            with mock.patch.object(shared, "send_rows", wraps=shared.send_rows) as sent:
                summed(trainer, step)
            found.append((step.micro[0].rank_plan.shared is not None, sent.call_count))
    finally:
        trainer.close()
    return found


@pytest.mark.slow
def test_a_node_that_shares_nothing_exchanges_nothing(tmp_path):
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_rows(tmp_path)
    run = shares(recipe(tmp_path), 2, ranks_per_node=2)
    found = run_ranks(exchanges, 4, run)
    layers = max(count for rank in found for _, count in rank)
    assert layers == 2 and all(
        count == layers * shares for rank in found for shares, count in rank)
    assert {shares for rank in found for shares, _ in rank} == {True, False}
    assert found[0] == found[1] and found[2] == found[3]


def keys_of_ranks_without_gradients(world) -> bool:
    """The keys of rank 0 learn; those of the others, as of a frozen LLM without media, do not.
    Whether this rank has a piece."""
    plan = plan_step(batch(np.random.default_rng(0), 3, np.array([900, 300, 300])), spec())
    mine = plan.for_rank(world.rank)
    lengths = mine.row[:, 2]
    key = torch.ones(1, 1, int(lengths.sum()), 2, requires_grad=world.rank == 0)
    examples = shared.SharedExamples.of(mine.shared, tuple(lengths.tolist()), None)
    keys, values = examples.keys_and_values(key, key)
    assert keys.requires_grad
    (keys.sum() + values.sum()).backward()
    of_both = np.repeat([place is not None for place in mine.shared.places], lengths)
    assert world.rank or np.array_equal(key.grad[0, 0, :, 0], 4 * of_both)
    masks = packing._Masks(SequenceLengths.from_lengths(lengths.tolist(), key.device), None,
                           examples)
    assert packing._counted(None, key.detach(), key, key, masks, None).requires_grad
    return bool(of_both.any())


def test_gradients_come_to_keys_that_need_none():
    """Else the ranks whose keys do need them wait forever, and so for a rank without a piece."""
    assert run_ranks(keys_of_ranks_without_gradients, 3)[0::2] == [True, False]


@pytest.mark.parametrize("name, told", [
    ("qwen3_5", "Qwen3_5GatedDeltaNet takes a state"), ("qwen2_audio", "reads lengths of whole")])
def test_models_whose_examples_cannot_be_shared(name, told, tmp_path):
    """They are refused before there are ranks."""
    write_model(name, tmp_path)
    looked = dict(checks(shares(recipe(tmp_path)), 0))
    with pytest.raises(ValueError, match=f"balance.llm.max_shares: .*{told}"):
        looked["shared examples"]()
    assert "shared examples" not in dict(checks(recipe(tmp_path), 0))


def trained(world, run: Recipe) -> list[float]:
    """Losses of steps and validations."""
    FAMILIES["qwen3_vl"](transformers)
    return [row[name] for row in train(world, run) for name in ("loss", "validation_loss")
            if name in row]


@pytest.mark.slow
def test_a_run_goes_on_on_other_ranks(tmp_path):
    write_model("qwen3_vl", tmp_path, torch.float64)
    write_rows(tmp_path)
    run = recipe(tmp_path, warmup_steps=0, min_lr_ratio=1.0)
    run = replace(run, data=replace(run.data, num_validation=2),
                  train=replace(run.train, num_steps=4))
    alone = run_ranks(trained, 1, replace(run, run=RunConfig(dir=str(tmp_path / "alone"))))[0]
    start = replace(shares(run), train=replace(run.train, num_steps=2))
    found = [loss for ranks, part in ((2, start), (3, shares(run)))
             for loss in run_ranks(trained, ranks, part)[0]]
    between = [*alone[:3], *found[3:4], *alone[3:]]  # the first part ends with a validation
    assert len(alone) == 6 and found == pytest.approx(between, rel=1e-9)
