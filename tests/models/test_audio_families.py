"""What audio and omni models of transformers are trained as, and what of them is refused."""

from __future__ import annotations

import pytest
import torch
import transformers

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe, TrainConfig
from orchmllm.hf.sources import PretrainedError, find_sources
from orchmllm.models.described import check_parts
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import WholeModel
from tests.lib import whole_models as models
from tests.lib.processors import CLIPS
from tests.lib.recipes import frozen
from tests.lib.whole_models import Item

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("name", CLIPS)
def test_the_parts_of_a_model_that_takes_clips(name, tmp_path):
    """Its class is found, and what is what in it."""
    model = models.build(name)
    model.config.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert model_class(config) is type(model)
    parts = {*models.named_parts(model, (n for n, _ in model.named_parameters()))}
    assert parts == {"audio", "connector", "llm"} | ({"vision"} if "omni" in name else set())
    stacks = WholeModel(model, torch.float64).blocks()
    assert stacks["audio"] is model.model.audio_tower.layers


def test_of_an_omni_model_the_thinker_is_trained(tmp_path):
    thinker = models.build("qwen2_5_omni").config
    transformers.Qwen2_5OmniConfig(thinker_config=thinker.to_dict()).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.model_type == "qwen2_5_omni_thinker"
    assert config.get_text_config().hidden_size == thinker.get_text_config().hidden_size


def test_an_encoder_that_is_not_there_has_no_settings(tmp_path):
    models.build("internvl").config.save_pretrained(tmp_path)
    model = frozen("audio", model=ModelConfig(config=str(tmp_path)))
    with pytest.raises(PretrainedError, match="model.audio.frozen has no effect with a internvl"):
        find_sources(model)
    for name in ("audio_lr", "audio_weight_decay"):
        recipe = Recipe(model=ModelConfig(config=str(tmp_path)), train=TrainConfig(**{name: 0.1}))
        with pytest.raises(ValueError, match=f"train.{name} has no effect with a internvl"):
            check_parts(recipe)
    check_parts(Recipe(model=model, train=TrainConfig(vision_lr=0.1)))


@pytest.mark.parametrize("name", ["qwen2_audio", pytest.param(
    "qwen2_5_omni", marks=pytest.mark.slow)])
def test_a_head_computes_logits_of_learnt_positions_alone(name):
    """Also of a model whose forward ignores which positions are wanted."""
    model, seen = models.build(name), []
    whole = WholeModel(model, torch.float64)
    inputs = models.sample(name, model, [Item("audio", 2)], 3)
    inputs["labels"][:, :-4] = -100
    model.lm_head.register_forward_hook(lambda head, args, out: seen.append(out.shape[1]))
    row = whole.join([models.as_example(0, inputs)])
    whole(row)
    assert seen == [len(row.kept)] and 0 < len(row.kept) <= 4
