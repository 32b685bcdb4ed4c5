"""fsdp.reshard_after_forward=false keeps gathered parameters until the backward pass: the memory
model against tracked peaks of the real model, at the widths of 84B with three layers each."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchmllm.plan.assign import PHASES
from tests.lib.recipes import read
from tests.lib.tracked import tracked


def thin(frozen: str = "", batch_size: int = 2, **fsdp):
    recipe = read("mllm84b")
    model = replace(recipe.model, **{p: replace(
        getattr(recipe.model, p), num_layers=3, frozen=p == frozen) for p in PHASES})
    options = {"shard_size": 64, "loss_chunk_rows": 1024, "activation_checkpointing": "full"} | fsdp
    return replace(recipe, model=model, fsdp=replace(recipe.fsdp, **options),
                   train=replace(recipe.train, batch_size=batch_size))


@pytest.mark.parametrize("recipe", [
    thin(reshard_after_forward=False, activation_checkpointing="selective", prefetch=0),
    pytest.param(thin(reshard_after_forward=False), marks=pytest.mark.slow),
    pytest.param(thin("audio", reshard_after_forward=False), marks=pytest.mark.slow),
    pytest.param(thin(llm_reshard="none"), marks=pytest.mark.slow),
    pytest.param(thin(vision_reshard="none"), marks=pytest.mark.slow),
    pytest.param(thin(), marks=pytest.mark.slow),
], ids=["kept, selective", "kept", "kept, frozen audio", "LLM kept", "vision kept", "freed"])
def test_predicted_peak_counts_what_stays_gathered(recipe):
    peak, moments = tracked(recipe, 64)
    assert max(moments.values()) == pytest.approx(peak, rel=0.03)
