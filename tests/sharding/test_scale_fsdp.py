"""FSDP2 at scale, on gloo ranks: hybrid sharding, frozen parts, checkpointing per phase, prefetch
and chunked loss all give one process's gradients (float64)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.plan.assign import PhasePolicy
from tests.lib.gradients import Case, all_gradients, reference_gradients, worst_difference
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen
from tests.lib.synthetic import MODEL, recipe

LOCAL = BalanceConfig(ranks_per_node=2, **dict.fromkeys(
    ("vision", "audio", "llm"), PhasePolicy("least_move", tolerance=0.005)))
HSDP = FsdpConfig(param_dtype="float64", shard_size=2, prefetch=1)


def case(model=MODEL, **fsdp) -> Case:
    return Case(recipe(balance=LOCAL, model=model, fsdp=replace(HSDP, **fsdp)))


CASES = {
    "plain": case(),
    "none/selective/full": case(audio_checkpointing="selective", llm_checkpointing="full"),
    "selective/full/selective": case(activation_checkpointing="selective",
                                     audio_checkpointing="full", prefetch=2),
    "layer by layer": case(vision_checkpointing="full:1", audio_checkpointing="selective:1",
                           llm_checkpointing="full:1+selective:1", prefetch=2),
    "chunked loss": case(loss_chunk_rows=7),
    "frozen encoders": case(frozen("vision", "audio"), activation_checkpointing="full"),
    "frozen LLM": case(frozen("llm"), activation_checkpointing="selective", loss_chunk_rows=7),
    "frozen vision": case(frozen("vision")),
    "connectors alone": case(frozen("vision", "audio", "llm"), prefetch=2),
}


@pytest.mark.dist
@pytest.mark.slow
def test_hybrid_2x2_gradients_equal_one_process():
    results = run_ranks(all_gradients, 4, CASES)
    references = {}
    for name, one in CASES.items():
        model = one.recipe.model
        if model not in references:
            references[model] = reference_gradients(one)
        loss, grads = references[model]
        for rank in range(4):
            assert results[rank][name][0] == pytest.approx(loss, rel=1e-12), (name, rank)
        error, where = worst_difference(results[0][name][1], grads)
        assert error <= 1e-9, f"{name}: {where} differs by {error:.1e}"
