"""All ranks make the same collectives on the device, in the same order and of the same sizes,
whatever data a rank lacks: parameters, gradients and exchanges of 8 simulated ranks."""

from __future__ import annotations

import multiprocessing
from contextlib import nullcontext
from itertools import product
from unittest.mock import patch

import pytest
import torch

from orchmllm.comm import exchange
from orchmllm.config.recipe import FsdpConfig
from orchmllm.encoders import planned
from orchmllm.sharding.fsdp import make_mesh
from tests.lib.collectives import Collective, Setting, collectives, difference
from tests.lib.ranks import run_ranks

RESHARD, CHECKPOINTING = ("full", "node", "none"), ("none", "selective", "full")
DISPATCH, SHARDS = ("load", "tensors", "bytes"), (0, 4, 2)
FROZEN = ((), ("vision",), ("llm",), ("vision", "audio", "connector"))
# Any two values of reshard, checkpointing, dispatch and prefetch stand together in a row.
SETTINGS = [
    Setting(DISPATCH[(a + b) % 3], FROZEN[(a + 2 * b) % 4], FsdpConfig(
        compute_dtype="bfloat16" if a != b else "",
        reduce_dtype="bfloat16" if b == 2 else "", shard_size=SHARDS[(2 * a + b + a * b) % 3],
        vision_reshard=RESHARD[(a + 1) % 3], audio_reshard=RESHARD[a], llm_reshard=RESHARD[a],
        activation_checkpointing=CHECKPOINTING[b],
        llm_checkpointing="full:1" if b == 1 else "", prefetch=(a + 2 * b) % 3,
        loss_chunk_rows=16 * (b == 1)))
    for a, b in product(range(3), repeat=2)]


def timeouts(world) -> list[float]:
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
            for group in make_mesh(1, "cpu").get_all_groups()]


@pytest.mark.dist
def test_groups_of_a_hybrid_mesh_have_the_timeout_of_the_run():
    assert run_ranks(timeouts, 2, timeout_s=123.0) == [[123.0] * 2] * 2


def without_what_is_empty(x, exchanged, group=None):
    """An exchange that a rank leaves out when it sends nothing."""
    return exchange.exchange_rows(x, exchanged, group) if len(x) else x.new_empty(
        len(exchanged.recv_index), *x.shape[1:])


PLANTS = {"": nullcontext, "an exchange left out": lambda: patch.object(
    planned, "exchange_rows", without_what_is_empty)}


def of_ranks(
    world, num_ranks: int, settings: list[Setting], plant: str
) -> dict[int, list[list[Collective]]]:
    """Simulated rank -> its collectives by setting; each process simulates some of the ranks."""
    with PLANTS[plant]():
        return {rank: [collectives(num_ranks, rank, setting) for setting in settings]
                for rank in range(world.rank, num_ranks, world.world_size)}


def simulated(num_ranks: int, settings: list[Setting], plant: str = "") -> list[list]:
    """By setting, the collectives of each rank. torch takes no new kind of device once it has made
    a backward pass, as the tests' fork server has."""
    found = {}
    for some in run_ranks(of_ranks, 2, num_ranks, settings, plant, timeout_s=1700.0,
                          context=multiprocessing.get_context("spawn")):
        found |= some
    return [[found[rank][k] for rank in range(num_ranks)] for k in range(len(settings))]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("settings", [SETTINGS[:3], SETTINGS[3:6], SETTINGS[6:]], ids=RESHARD)
def test_all_ranks_make_the_same_collectives(settings):
    for setting, logs in zip(settings, simulated(8, settings), strict=True):
        assert not difference(logs), (setting, difference(logs))
        shards = setting.fsdp.shard_size or 8
        made = {name: {(len(c.ranks), c.sizes[0]) for c in logs[0] if c.name == name}
                for name in ("_reduce_scatter_base_", "allreduce_", "alltoall_base_")}
        assert made["_reduce_scatter_base_"] == {(shards, f"torch.{setting.fsdp.sum_dtype}")}
        assert {ranks for ranks, _ in made["allreduce_"]} == {shards, 8 // shards} - {1}
        assert {ranks for ranks, _ in made["alltoall_base_"]} == {8}
        exchanges, others = ({c.group for c in logs[0] if (c.name == "alltoall_base_") is exchanges}
                             for exchanges in (True, False))
        assert len(exchanges) == 1 and exchanges.isdisjoint(others)  # nobody waits for parameters


@pytest.mark.slow
@pytest.mark.dist
def test_features_without_a_gradient_are_not_sent_back():
    """In four microbatches with and one without a backward pass. An encoder's connector that learns
    needs the gradient of its features, and so does the encoder."""
    back = {("vision", "audio", "llm"): 2, ("vision", "audio", "connector"): 0,
            ("audio", "connector", "llm"): 1}
    found = simulated(3, [Setting(frozen=parts) for parts in back])
    for logs, (parts, times) in zip(found, back.items(), strict=True):
        assert not difference(logs), parts
        exchanges = [[c.name for c in log].count("alltoall_base_") for log in logs]
        assert exchanges == [5 * 2 + 4 * times] * 3, parts


@pytest.mark.slow
@pytest.mark.dist
def test_a_rank_that_leaves_out_what_is_empty_is_noticed():
    (logs,) = simulated(4, SETTINGS[1:2], "an exchange left out")
    assert "collective" in difference(logs)
