"""Losses over several examples at once: the code of docs/loader_cases.md, run on two ranks, has the
gradients of one process."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from orchmllm import BalancedDataLoader
from tests.lib.clients import Examples, collate
from tests.lib.commands import ROOT
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
DATA = Examples(23)  # so that ranks have unequally many
LOSSES = {"routed experts": 1e-5, "contrastive": 1e-12}  # Mixtral's router is in float32


def shown() -> SimpleNamespace:
    """What the blocks of the section define."""
    text = (ROOT / "docs/loader_cases.md").read_text(encoding="utf-8")
    section = text.split("## Losses over several examples")[1].split("\n## ")[0]
    names = {"torch": torch, "F": F, "dist": dist, "BalancedDataLoader": BalancedDataLoader}
    for block in re.findall(r"```python\n(.*?)```", section, re.S):
        exec(block, names)
    return SimpleNamespace(**names)


def model_of(loss: str) -> nn.Module:
    from transformers import CLIPConfig, CLIPModel, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    part = dict(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    if loss == "contrastive":
        model = CLIPModel(CLIPConfig(
            text_config={**part, "vocab_size": 64, "eos_token_id": 63}, projection_dim=8,
            vision_config={**part, "image_size": 8, "patch_size": 8}))
    else:
        model = MixtralForCausalLM(MixtralConfig(
            **part, vocab_size=64, num_key_value_heads=1, num_local_experts=4,
            experts_implementation="eager"))
    return model.double()


def inputs_of(loss: str, rows: list[dict]) -> dict[str, Any]:
    batch = collate(rows)
    sizes = torch.tensor([len(row["labels"]) for row in rows])
    batch["attention_mask"] = (torch.arange(batch["labels"].shape[1]) < sizes[:, None]).long()
    if loss == "contrastive":
        batch["pixel_values"] = torch.stack([torch.randn(
            3, 8, 8, generator=torch.Generator().manual_seed(len(row["labels"]))).double()
            for row in rows])
    return batch


def gradients(world) -> list[list[float]]:
    """Of one step of 23 examples, by loss: on one rank as transformers computes it."""
    out, code = [], shown()
    for loss in LOSSES:
        model = model_of(loss)
        loader = BalancedDataLoader(
            DATA, 24 // world.world_size, lengths=DATA.lengths, policy="greedy",
            collate_fn=lambda rows, loss=loss: inputs_of(loss, rows))
        for batch in loader:
            del batch["labels"]
            if loss == "contrastive":
                found = model(**batch, return_loss=world.world_size == 1)
                value = found.loss if world.world_size == 1 else code.contrastive_loss(
                    found.image_embeds, found.text_embeds, model.logit_scale.exp(), loader)
            else:
                found = model(**batch, output_router_logits=True)
                value = found.aux_loss if world.world_size == 1 else code.routing_loss(
                    found, batch["attention_mask"], loader, 4, model.num_experts_per_tok)
            value.backward()
        flat = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        dist.all_reduce(flat)
        out.append((flat / world.world_size).tolist())
    return out


def test_losses_over_all_ranks_are_those_of_one_process():
    [want], ranks = (run_ranks(gradients, d) for d in (1, 2))
    for got in ranks:
        for (loss, rounding), mine, others in zip(LOSSES.items(), got, want, strict=True):
            largest = max(map(abs, others))
            assert mine == pytest.approx(others, abs=rounding * largest) and largest, loss


def groups(world) -> list[list[int]]:
    loader = shown().grouped_loader(
        list(range(24)), Examples(24).lengths, 4, 1, list, policy="greedy", num_targets=len)
    return [list(batch) for batch in loader if loader.step.num_examples]


def test_a_group_stays_on_one_rank():
    batches = sum(run_ranks(groups, 2), [])
    assert sorted(sum(batches, [])) == list(range(24))
    for batch in batches:
        assert all(batch[k: k + 4] == list(range(batch[k], batch[k] + 4)) and batch[k] % 4 == 0
                   for k in range(0, len(batch), 4))
