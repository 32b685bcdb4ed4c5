"""Every all-gather of parameters in a step against the least that there can be: one for each pass
that reads them, in the order of that pass, and bit-equal gradients."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from orchmllm.comm import exchange
from orchmllm.comm.exchange import all_to_all
from orchmllm.config.balance import BalanceConfig, PhaseConfig
from orchmllm.config.job import check_world, resolve
from orchmllm.config.recipe import FsdpConfig
from tests.lib.gathers import Gather, log_gathers
from tests.lib.gradients import Case, step_gradients
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen
from tests.lib.synthetic import MODEL, recipe

VISION, AUDIO, LAYERS = ([f"{stack}.{k}" for k in (0, 1)] for stack in (
    "vision_tower.blocks", "audio_tower.layers", "language_model.layers"))
FORWARD = ["root", *VISION, *AUDIO, "language_model.embed_tokens", *LAYERS, "lm_head"]
BACKWARD = [*reversed(LAYERS), *reversed(AUDIO), *reversed(VISION)]


def case(model=MODEL, steps=1, **fsdp) -> Case:
    """Features of images and of clips move: greedy does not ask where they are."""
    moving = PhaseConfig(policy="greedy")
    return Case(recipe(model=model, fsdp=FsdpConfig(param_dtype="float64", **fsdp),
                       balance=BalanceConfig(vision=moving, audio=moving)),
                accumulation_steps=steps)


def without(*names: str) -> list[str]:
    return [u for u in BACKWARD if not u.startswith(names)]


# name -> (case, units gathered in the backward pass)
CASES = {
    "as FSDP2 prefetches": (case(), BACKWARD),
    "two ahead, checkpointing, two microbatches": (
        case(steps=2, prefetch=2, activation_checkpointing="full"), BACKWARD),
    "one ahead, selective, chunked loss": (
        case(prefetch=1, activation_checkpointing="selective", loss_chunk_rows=7), BACKWARD),
    "all kept, one ahead": (case(reshard_after_forward=False, prefetch=1), []),
    "LLM kept": (case(llm_reshard="none", prefetch=2), without("language_model.layers")),
    "frozen vision": (case(frozen("vision")), without("vision")),
    "frozen audio": (case(frozen("audio"), prefetch=1), without("audio")),
    "frozen encoders, two microbatches": (
        case(frozen("vision", "audio"), steps=2, prefetch=2), LAYERS[::-1]),
    "connectors alone": (case(frozen("vision", "audio", "llm"), prefetch=1), LAYERS[::-1]),
    "frozen connectors": (case(frozen("vision", "audio", "connector"), prefetch=2), LAYERS[::-1]),
    "frozen LLM, connectors and audio, kept": (
        case(frozen("llm", "connector", "audio"), audio_reshard="none", prefetch=1),
        without("audio")),
    "frozen encoders kept": (case(frozen("vision", "audio"), reshard_after_forward=False), []),
    "frozen LLM": (case(frozen("llm"), prefetch=8), BACKWARD),
}


def logged(world, one: Case) -> tuple[list[Gather], dict | None, int, list[bool]]:
    """(the step's all-gathers, rank 0's gradients, process groups of this rank, of each exchange of
    rows whether it is in the backward pass)."""
    logs, exchanges = [], []

    def logged_all_to_all(*args):
        exchanges.append(torch._C._current_graph_task_id() != -1)
        return all_to_all(*args)

    with patch.object(exchange, "all_to_all", logged_all_to_all):
        _, grads = step_gradients(world, replace(
            one, mutate=lambda trainer: logs.append(log_gathers(trainer.model))))
    groups = len(dist.distributed_c10d._world.pg_map)
    return logs[0], grads if world.rank == 0 else None, groups, exchanges


def plain(world, one: Case) -> dict | None:
    """Rank 0's gradients where FSDP2 gathers every unit twice."""
    def gather_all(trainer) -> None:
        for module in trainer.model.modules():
            if isinstance(module, FSDPModule):
                module.set_unshard_in_backward(True)
                module.set_reshard_after_forward(True, recurse=False)

    _, grads = step_gradients(world, replace(one, mutate=gather_all))
    return grads if world.rank == 0 else None


def all_logged(world, cases: dict[str, Case]) -> dict[str, tuple]:
    return {name: (*logged(world, one), plain(world, one)) for name, one in cases.items()}


def equal(got: dict, want: dict) -> bool:
    return got.keys() == want.keys() and all(np.array_equal(got[n], want[n]) for n in want)


SOME = ["two ahead, checkpointing, two microbatches", "frozen encoders, two microbatches"]


@pytest.mark.dist
@pytest.mark.parametrize("names", [
    SOME, pytest.param(sorted(CASES.keys() - SOME), marks=pytest.mark.slow)], ids=["some", "rest"])
def test_a_step_gathers_what_it_reads_and_nothing_twice(names):
    results = run_ranks(all_logged, 2, {name: CASES[name][0] for name in names})
    for name in names:
        one, backward = CASES[name]
        for log, *_ in (rank[name] for rank in results):
            per_microbatch = len(log) // one.accumulation_steps
            assert per_microbatch == len(FORWARD) + len(backward), name
            for at in range(0, len(log), per_microbatch):
                part = log[at: at + per_microbatch]
                assert [g.unit for g in part if not g.backward] == FORWARD, name
                assert [g.unit for g in part if g.backward] == backward, name
        for *_, exchanges, _ in (rank[name] for rank in results):
            sent_back = map(one.recipe.model.features_learn, ("vision", "audio"))
            assert exchanges and any(exchanges) == any(sent_back), name
        assert equal(results[0][name][1], results[0][name][-1]), name


def in_nodes(world) -> list[tuple]:
    """Of one ahead, and of the same with two parts sharded over nodes of two ranks between the
    passes: the step's all-gathers, gradients, and process groups that were made for it."""
    out = []
    for part in ("full", "node"):
        one = case(prefetch=1, vision_reshard=part, llm_reshard=part)
        one = replace(one, recipe=replace(one.recipe, balance=BalanceConfig(ranks_per_node=2)))
        before = len(dist.distributed_c10d._world.pg_map)
        log, grads, after, _ = logged(world, one)
        out.append((log, grads, after - before))
    return out


@pytest.mark.dist
def test_units_stay_sharded_over_the_ranks_of_a_node():
    """Four ranks in nodes of two: what is `node` is gathered inside the node in the backward pass,
    and all such units share one pair of process groups."""
    (_, want, groups), (log, grads, more) = run_ranks(in_nodes, 4)[0]
    inside = {g.unit: g.ranks for g in log if g.backward}
    assert inside == {u: 4 if u.startswith("audio") else 2 for u in BACKWARD}
    assert all(g.ranks == 4 for g in log if not g.backward)
    assert more <= groups + 2
    assert equal(grads, want)


def test_nodes_that_no_group_is_made_of_are_refused():
    one = recipe(fsdp=FsdpConfig(audio_reshard="node", shard_size=6))
    for per_node in (2, 3, 6, 8):  # 8: the group is inside the node
        check_world(resolve(one, 24, per_node))
    for per_node in (1, 4):
        with pytest.raises(ValueError, match=f"fsdp.audio_reshard is node, but shard groups of 6 "
                                             f"ranks are not made of whole nodes of {per_node}"):
            check_world(resolve(one, 24, per_node))
