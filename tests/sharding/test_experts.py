"""Text models with experts under our sharding, against stock transformers example by example:
experts that get no token, experts of which a rank holds none, both layouts of their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from orchmllm.comm.agree import RemoteError
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.sharding import build
from orchmllm.sharding.load_whole import load_whole
from orchmllm.tools.export.export import export
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.encoder_models import FAMILIES
from tests.lib.ranks import run_ranks
from tests.lib.whole_models import Item
from tests.sharding.test_whole_models import recipe, trained, unlike

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.whole]
# Text model -> its own settings. Four experts on three ranks: the last one holds none of them.
TEXTS = {
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                  "shared_expert_intermediate_size": 20, "decoder_sparse_step": 1},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                  "decoder_sparse_step": 2, "head_dim": 8},
}


def with_text(kind: str, **settings) -> nn.Module:
    """LLaVA with this text model, or a family whose own has other settings."""
    like = FAMILIES["llava" if kind in TEXTS else kind].build()
    made = like.config.to_dict()
    made["text_config"] |= {"model_type": kind, **TEXTS[kind]} if kind in TEXTS else {}
    config = type(like.config).from_dict(made)
    for name, value in settings.items():
        setattr(config.text_config, name, value)
    torch.manual_seed(0)
    model = type(like)(config).double().train()
    model.set_experts_implementation("eager")
    for buffer in (b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")):
        buffer.normal_()
    return model


def gradients(world, folder: Path, dtype: str, shard_size: int, inputs: list[dict],
              wanted: dict[str, torch.Tensor]) -> tuple[str, float, int]:
    """What computes the experts, the difference of the gradients, how many experts of the last
    layer have none."""
    config = FsdpConfig(param_dtype=dtype, shard_size=shard_size)
    whole = load_whole(folder, ModelConfig(), config, torch.device("cpu"),
                       {"vision": "none", "llm": "none"})
    mine = inputs[world.rank:: world.world_size]
    whole(whole.join([models.as_example(i, one) for i, one in enumerate(mine)])).backward()
    got = {n: (torch.zeros_like(p) if p.grad is None else p.grad).full_tensor().double()
           for n, p in whole.hf.named_parameters()}
    *_, last = (g for n, g in got.items() if n.endswith("experts.down_proj"))
    idle = int((last.flatten(1).abs().amax(1) == 0).sum())
    return (whole.hf.config.get_text_config()._experts_implementation,
            models.difference(got, wanted), idle)


@pytest.mark.parametrize("dtype, by, exact", [
    ("float64", "eager", models.EXACT), ("float32", "grouped_mm", 1e-5)])
@pytest.mark.parametrize("kind, ranks, shard_size, settings", [
    *[(kind, 3, 0, {}) for kind in TEXTS],
    ("qwen3_vl_moe", 2, 0, {"num_experts": 64, "num_experts_per_tok": 1}),
    ("qwen3_vl_moe", 4, 2, {}), ("glm4v_moe", 3, 0, {})])
def test_gradients_of_experts(kind, ranks, shard_size, settings, dtype, by, exact, tmp_path):
    """Those of 64 experts too, most of which get no token on any rank."""
    model = with_text(kind, **settings)
    model.save_pretrained(tmp_path)
    family = "llava" if kind in TEXTS else kind
    inputs = [models.sample(family, model, [Item("image", i)], i) for i in range(2 * ranks)]
    _, wanted = models.stock(model, inputs)
    exact = max(exact, models.LOOSE.get(kind, 0.0))
    for used, difference, idle in run_ranks(
            gradients, ranks, tmp_path, dtype, shard_size, inputs, wanted):
        assert used == by and difference <= exact
        assert (idle > 4) is ("num_experts" in settings)


def same(world, folder: Path, wanted: dict[str, torch.Tensor]) -> None:
    whole = load_whole(folder, ModelConfig(), FsdpConfig(param_dtype="float64"),
                       torch.device("cpu"), {"vision": "none", "llm": "none"})
    assert all(torch.equal(p.full_tensor(), wanted[n]) for n, p in whole.hf.named_parameters())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("published", [True, False])
def test_experts_are_read_in_the_published_layout_and_in_that_of_an_export(
        published, ranks, tmp_path):
    """Published are a layer's experts with the width of their input before that of their output."""
    model = with_text("qwen3_vl_moe")
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    experts = [n for n in tensors if ".experts." in n]
    assert len(experts) == 4
    if published:
        tensors |= {n: tensors[n].transpose(1, 2).contiguous() for n in experts}
        save_file(tensors, file, metadata={"format": "pt"})
    run_ranks(same, ranks, tmp_path, {n: p.detach() for n, p in model.named_parameters()})


@pytest.mark.parametrize("key", ["pretrained", "config"])
def test_an_export_has_what_is_added_to_the_scores_of_experts(key, tmp_path):
    """It is no parameter: a run leaves it as it is."""
    model = with_text("glm4v_moe")
    model.save_pretrained(tmp_path / "model")
    run = recipe(tmp_path / "run", ModelConfig(**{key: str(tmp_path / "model")}), 1, lr=1e-300)
    if key == "config":
        (tmp_path / "model" / "model.safetensors").rename(tmp_path / "other")
    run_ranks(trained, 1, run, "glm4v_moe")
    export(tmp_path / "run" / "checkpoints" / "step_00000001", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    first = load_file(tmp_path / ("other" if key == "config" else "model/model.safetensors"))
    assert found.keys() == first.keys()
    if key == "pretrained":
        assert unlike(found, first) == []
    [bias] = [n for n in found if n.endswith("e_score_correction_bias")]
    assert bool(found[bias].any()) is (key == "pretrained")


def starts(world, folder: Path) -> str:
    """What ranks say where the last one cannot read what it needs, while the others make the groups
    of a mesh."""
    run = recipe(folder / "run", ModelConfig(pretrained=str(folder / "model")), 1)
    run = replace(run, fsdp=replace(run.fsdp, shard_size=2))
    if world.rank == world.world_size - 1:
        build.load_whole = lambda *_: (folder / "nothing").read_bytes()
    try:
        Trainer(run, world, dataset=models.WholeDataset(
            "qwen3_vl_moe", models.build("qwen3_vl_moe"), 24))
    except RemoteError as error:
        return str(error)
    return "no error"


def test_what_one_rank_cannot_read_ends_all(tmp_path):
    with_text("qwen3_vl_moe").save_pretrained(tmp_path / "model")
    for told in run_ranks(starts, 4, tmp_path):
        assert "rank 3" in told and "No such file" in told and str(tmp_path / "nothing") in told
