"""Whole examples placed by the loader and images moved by balance_encoders, together: the gradients
are those of every example alone in one process."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from orchmllm import BalancedDataLoader, CostModel, balance_encoders
from tests.lib.encoder_runs import gradients, worst
from tests.lib.examples import load
from tests.lib.ranks import run_ranks

NUM = 8


def packed(examples: list[dict]) -> dict[str, torch.Tensor]:
    """One row of all examples; the positions restart, and text and image tokens share them."""
    e = load("qwen2_vl")
    alone = [e.collate([example]) for example in examples]
    positions = torch.cat([torch.arange(a["input_ids"].shape[1]) for a in alone])
    out = {k: torch.cat([a[k] for a in alone], 1) for k in ("input_ids", "labels")}
    out["position_ids"] = positions.expand(4, 1, -1).clone()  # of the text, then t, h, w
    for name in ("pixel_values", "image_grid_thw"):
        held = [a[name] for a in alone if name in a]
        if held:
            out[name] = torch.cat(held)
    return out


def reference(e, collate) -> dict[str, torch.Tensor]:
    """Gradients of the sum over examples / number of targets."""
    torch.manual_seed(0)
    model, data = e.tiny_model(), e.Pictures(NUM)
    batches = [collate([data[i]]) for i in range(NUM)]
    targets = sum(int((b["labels"] != -100).sum()) for b in batches)
    for batch in batches:
        (e.sum_loss(model, batch) / targets).backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def step(world, kind: str) -> tuple[float, tuple, tuple]:
    e = load("qwen2_vl")
    collate = packed if kind == "packed" else e.collate
    want = reference(e, collate)
    torch.manual_seed(0)
    model = e.tiny_model()
    for unit in (*model.model.visual.blocks, *model.model.language_model.layers):
        fully_shard(unit)
    fully_shard(model)
    handle = balance_encoders(model)
    loader = BalancedDataLoader(
        e.Pictures(NUM), batch_size=NUM // world.world_size, collate_fn=collate,
        length_fn=lambda x: len(x["input_ids"]), policy="greedy",
        phases=CostModel(linear=100_000, quadratic=400))
    for batch in loader:
        loader.scale_sum(e.sum_loss(model, batch)).backward()
    return worst(gradients(model), want), handle.last["vision"].imbalance, loader.step.imbalance


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_both_phases_are_exact(kind):
    for difference, vision, llm in run_ranks(step, 2, kind):
        assert difference < 1e-14
        assert vision[1] <= vision[0] and llm[1] < llm[0]
