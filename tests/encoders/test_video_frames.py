"""A video whose frames the encoder computes apart is as many items: what they become together, and
what balance_encoders makes of it."""

from __future__ import annotations

import pytest
import torch

from orchmllm import balance_encoders
from orchmllm.encoders.infer import infer_encoders
from tests.lib.encoder_models import FAMILIES, Item, batch
from tests.lib.encoder_runs import gradients, reference, worst, wrapped
from tests.lib.ranks import run_ranks

APART = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


def one_video(world, name: str) -> tuple[float, list[int], int]:
    """The first rank has a video of four items, and an image; gradients against one process."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    model = family.build()
    made = dict(family.make)
    made["video"] = lambda sizes, g: {
        "video_grid_thw": (grid := torch.tensor([[4, 4, 6]] * len(sizes))),
        "pixel_values_videos": torch.randn(int(grid.prod(1).sum()), 96, generator=g,
                                           dtype=torch.float64)}
    items = [[Item("video", 0), Item("image", 1)], [Item("image", 0)], []][world.rank]
    inputs = batch(type(family)(name, family.build, made, family.tower), model, items, world.rank)
    _, wanted = reference(model, inputs)
    model = wrapped(model, "fsdp2", "none")
    handle = balance_encoders(model)
    model(**inputs, use_cache=False).loss.backward()
    size = max(float(g.abs().max()) for g in wanted.values())
    (step,) = handle.last.values()
    return worst(gradients(model), wanted) / size, step.num_items, step.moved


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", APART)
def test_frames_of_one_video_are_encoded_on_several_ranks(name):
    for difference, num_items, moved in run_ranks(one_video, 3, name):
        assert difference <= 1e-13 and num_items == 6 and moved >= 2


@pytest.mark.slow
def test_a_family_that_looks_at_all_frames_keeps_its_videos_whole():
    calls = {name: infer_encoders(FAMILIES[name].build())[1][0].layout
             for name in (*APART, "qwen2_5_omni")}
    assert [calls[name].apart for name in calls] == [True, True, True, False]
