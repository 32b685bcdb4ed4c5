"""FSDP2 at scale, on gloo ranks: hybrid sharding, frozen parts, checkpointing per phase, prefetch,
chunked loss and weights made shard by shard all give one process's gradients (float64)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from orchmllm.config.balance import BalanceConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.mllm import MultimodalModel
from orchmllm.plan.assign import PhasePolicy
from orchmllm.sharding.fsdp import build_model
from orchmllm.sharding.init import seed_weights
from tests.lib.gradients import Case, all_gradients, reference_gradients, worst_difference
from tests.lib.ranks import run_ranks
from tests.lib.recipes import frozen
from tests.lib.synthetic import MODEL, recipe

LOCAL = BalanceConfig(ranks_per_node=2, **dict.fromkeys(
    ("vision", "audio", "llm"), PhasePolicy("least_move", tolerance=0.005)))
HSDP = FsdpConfig(param_dtype="float64", shard_size=2, prefetch=1, meta_init=True)


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


def _weights(world, config):
    model = build_model(MODEL, config, torch.device("cpu"), seed=3)
    full = {n: p.detach().full_tensor().numpy()
            for n, p in model.named_parameters()}
    return full if world.rank == 0 else None


@pytest.mark.dist
def test_weights_do_not_depend_on_the_number_of_ranks():
    whole = MultimodalModel(MODEL)
    seed_weights(whole, 3)
    want = {n: p.detach().numpy() for n, p in whole.named_parameters()}
    for num_ranks, shards in ((3, 0), (4, 2)):
        got = run_ranks(_weights, num_ranks, FsdpConfig(
            meta_init=True, shard_size=shards, activation_checkpointing="full"))[0]
        assert got.keys() == want.keys()
        for name, values in got.items():
            assert np.array_equal(values, want[name]), (name, num_ranks)


def test_seeded_weights_have_the_models_statistics():
    model = MultimodalModel(replace(MODEL, llm=replace(MODEL.llm, vocab_size=5000)))
    seed_weights(model, 0)
    head, embed = model.llm.lm_head.weight, model.llm.embed_tokens.weight
    assert float(head.std()) == pytest.approx(model.llm.head_std, rel=0.02)
    assert float(embed.std()) == pytest.approx(0.02, rel=0.02)
    assert abs(float(embed.mean())) < 3e-4
    assert not torch.equal(embed[0], embed[1]) and not torch.equal(embed[:8], head[:8])
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            assert not p.any(), name
        elif "norm" in name:
            assert torch.equal(p, torch.ones_like(p)), name
