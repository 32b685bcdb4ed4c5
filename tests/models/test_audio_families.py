"""What audio and omni models of transformers are trained as, and what of them is refused."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.config.model import AudioConfig, ModelConfig
from orchmllm.config.recipe import Recipe, TrainConfig
from orchmllm.hf.sources import PretrainedError, find_sources
from orchmllm.models.families import model_class, part_of, read_config, refusals
from orchmllm.models.flops import Lengths, phase_work
from orchmllm.models.hf import WholeModel
from orchmllm.models.whole_flops import part_flops
from orchmllm.runtime.preflight import check_rates
from orchmllm.sharding.hf import freeze
from tests.lib import whole_models as models
from tests.lib.processors import CLIPS
from tests.lib.recipes import frozen
from tests.lib.whole_models import Item

pytestmark = pytest.mark.whole


@pytest.mark.parametrize("name", CLIPS)
def test_the_parts_of_a_model_that_takes_clips(name, tmp_path):
    """Its class is found, random masks of its audio tower are refused."""
    model = models.build(name)
    model.config.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert model_class(config) is type(model)
    parts = {part_of(n) for n, _ in model.named_parameters()}
    assert parts == {"audio", "connector", "llm"} | ({"vision"} if "omni" in name else set())
    stacks = WholeModel(model, torch.float64).blocks()
    assert stacks["audio"] is model.model.audio_tower.layers
    for key in ("dropout", "encoder_layerdrop"):
        setattr(config.audio_config, key, 0.1)
        (why,) = refusals(config)
        assert why.endswith(f"{key.removeprefix('encoder_')} of the audio model is 0.1, and its "
                            "random numbers depend on where an example is: set it to 0")
        setattr(config.audio_config, key, 0.0)


def test_of_an_omni_model_the_thinker_is_trained(tmp_path):
    thinker = models.build("qwen2_5_omni").config
    transformers.Qwen2_5OmniConfig(thinker_config=thinker.to_dict()).save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert config.model_type == "qwen2_5_omni_thinker"
    assert config.get_text_config().hidden_size == thinker.get_text_config().hidden_size


def test_an_encoder_that_is_not_there_has_no_settings(tmp_path):
    models.build("internvl").config.save_pretrained(tmp_path)
    model = ModelConfig(config=str(tmp_path), audio=AudioConfig(frozen=True))
    with pytest.raises(PretrainedError, match="model.audio.frozen has no effect with a internvl"):
        find_sources(model)
    for name in ("audio_lr", "audio_weight_decay"):
        recipe = Recipe(model=ModelConfig(config=str(tmp_path)), train=TrainConfig(**{name: 0.1}))
        with pytest.raises(ValueError, match=f"train.{name} has no effect with a internvl"):
            check_rates(recipe)
    check_rates(Recipe(model=model, train=TrainConfig(vision_lr=0.1)))


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["audioflamingo3", "qwen2_audio"])
def test_flop_of_audio_models_are_those_of_the_passes_that_are_made(name, tmp_path):
    """Whatever is frozen, without attention; the second convolution has a gradient of its input."""
    model = models.build(name)
    model.config.save_pretrained(tmp_path)
    whole, seen = WholeModel(model, torch.float32), []
    row = whole.join([models.as_example(0, models.sample(
        name, model, [Item("audio", 5)], 7))])
    model.float()
    stack, n = whole.blocks()["audio"], row.inputs["input_ids"].numel()
    stack[0].register_forward_pre_hook(lambda _, args, keys: seen.append(
        (args or [*keys.values()])[0].shape[:-1].numel()), with_kwargs=True)
    for parts in (p for k in range(3) for p in combinations(("audio", "connector", "llm"), k)):
        config = frozen(*parts, model=ModelConfig(config=str(tmp_path)))
        whole.requires_grad_(True)
        freeze(whole, config)
        with FlopCounterMode(display=False) as counter:
            whole(row).backward()
        counted = sum(flop for op, flop in counter.get_flop_counts()["Global"].items()
                      if "attention" not in str(op))
        got, frames = 0.0, seen[-1]
        for phase, sizes in (("audio", (2 * frames, frames, frames / 2)),
                             ("llm", (len(row.kept), n, n))):
            work = phase_work(phase, config, Lengths(*np.array(sizes)[:, None]))
            got += (work.forward[0] + work.backward[0]).item()
        products = 2 * sum(p.numel() for p in stack.parameters() if p.dim() > 1)
        windows = part_flops(str(tmp_path))["audio"].position - products
        got -= windows * frames * (1 + 2 * config.learns("audio"))
        assert got == pytest.approx(counted, rel=1e-9), parts
