"""rebalance_encoder with vision towers of transformers: exact, or refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from orchmllm import BalancedDataLoader, CostModel, Phase, rebalance_encoder
from tests.lib.examples import load
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist


def qwen3_vl(layers: list[int]):
    """layers: of the tower whose features go into the LLM's layers (deepstack)."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    e = load("qwen2_vl")
    return Qwen3VLForConditionalGeneration(Qwen3VLConfig(
        text_config=dict(
            vocab_size=e.VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4,
                             "mrope_section": [2, 1, 1]}),
        vision_config=dict(
            depth=2, hidden_size=32, intermediate_size=64, num_heads=2, out_hidden_size=32,
            patch_size=e.PATCH, spatial_merge_size=e.MERGE, temporal_patch_size=e.TEMPORAL,
            num_position_embeddings=64, deepstack_visual_indexes=layers),
        image_token_id=e.IMAGE, vision_start_token_id=e.VISION_START, vision_end_token_id=62,
        video_token_id=63, tie_word_embeddings=False)).double()


def losses(world, layers: list[int] | None, enabled: bool) -> list[float] | str:
    """Per step the loss over all ranks (layers None: of Qwen2-VL), or what was raised."""
    e = load("qwen2_vl")
    torch.manual_seed(0)
    model = e.tiny_model() if layers is None else qwen3_vl(layers)
    loader = BalancedDataLoader(
        e.Pictures(12), 2, collate_fn=e.collate, length_fn=e.segments, enabled=enabled,
        policy="greedy" if enabled else "none",
        phases={"vision": Phase(CostModel(linear=60_000, quadratic=800), "images",
                                e.collate_images), "llm": CostModel(linear=1000, quadratic=0)})
    out, seen = [], []

    def watch(module, args, result) -> None:
        seen.append((result.last_hidden_state, result["last_hidden_state"]))

    for batch in loader:
        batch = {k: v.to("cpu") for k, v in batch.items()}
        ids = batch["input_ids"]
        try:
            with rebalance_encoder(model.model.visual, loader.step, "vision",
                                   output="pooler_output", placeholder=e.NO_IMAGE):
                handle = model.model.visual.register_forward_hook(watch)
                logits = model(input_ids=ids, attention_mask=batch["mask"], use_cache=False,
                               pixel_values=e.NO_IMAGE[0], image_grid_thw=batch["grid"],
                               mm_token_type_ids=(ids == e.IMAGE).int()).logits
                handle.remove()
        except ValueError as error:
            return str(error)
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum").detach()
        dist.all_reduce(loss)
        out.append(float(loss))
    assert seen == [(None, None)] * len(out)  # not those of other ranks' images
    return out


def both(world, layers: list[int] | None) -> list[list[float]]:
    return [losses(world, layers, enabled) for enabled in (False, True)]


@pytest.mark.parametrize("layers", [None, []], ids=["qwen2_vl", "qwen3_vl without deepstack"])
def test_one_features_tensor_is_exact(layers):
    off, on = run_ranks(both, 3, layers)[0]
    assert on == pytest.approx(off, rel=1e-9) and len(on) == 2


def test_an_encoder_with_several_feature_tensors_is_refused_on_all_ranks():
    texts = run_ranks(losses, 3, [0, 1], True)
    assert len(set(texts)) == 1 and "'deepstack_features'" in texts[0], texts
    assert "Balance the LLM phase alone" in texts[0]


def tuple_encoder(world) -> str:
    e = load("qwen2_vl")
    loader = BalancedDataLoader(
        e.Pictures(4), 2, collate_fn=e.collate, length_fn=e.segments,
        phases={"vision": Phase(CostModel(1, 0), "images", e.collate_images)})

    class Tower(torch.nn.Module):
        def forward(self, rows, grid_thw):
            return rows, [rows]

    tower = Tower()
    for _ in loader:
        try:
            with rebalance_encoder(tower, loader.step, "vision"):
                tower(e.NO_IMAGE[0], grid_thw=e.NO_IMAGE[1])
        except ValueError as error:
            return str(error)
    return ""


def test_a_tuple_is_refused():
    assert all("Tower returns a tuple" in text for text in run_ranks(tuple_encoder, 2))
