"""The paper's models (OrchMLLM Table 1): exact shapes, counts that equal an independent one, and a
step of each recipe with a tiny model on two ranks."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from orchmllm.config.recipe import Recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.families import read_config
from orchmllm.models.whole_model import meta_model
from orchmllm.tools.predict.whole import geometry, parameters
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.recipes import read
from tests.lib.synthetic import MODEL, SyntheticDataset

NAMES = ("mllm10b", "mllm18b", "mllm84b", "mllm_1gpu")
# Table 1: layers, hidden, ffn of LLM, vision, audio; then downsampling, image bound, mini-batch.
TABLE = {
    "mllm10b": ((28, 3584, 18944), (36, 2048, 8192), (32, 1280, 5120), 1, 2, 448, 80),
    "mllm18b": ((48, 5120, 13824), (40, 2400, 9600), (32, 1280, 5120), 4, 2, 672, 60),
    "mllm84b": ((80, 8192, 29568), (45, 3200, 12800), (48, 3072, 12288), 4, 4, 896, 30),
}
BILLIONS = {"mllm10b": (7, 2, 0.6), "mllm18b": (14, 3, 0.6), "mllm84b": (72, 6, 6)}


def config_of(name: str):
    return read_config(Path(read(name).model.folder))


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_the_papers(name):
    recipe, config = read(name), config_of(name)
    text, vision, audio = config.text_config, config.vision_config, config.audio_config
    images = json.loads((Path(recipe.model.folder) / "preprocessor_config.json").read_text())
    side = (images["size"]["longest_edge"] * 4 / 3)**0.5  # of an image of 4:3
    got = ((text.num_hidden_layers, text.hidden_size, text.intermediate_size),
           (vision.depth, vision.embed_dim, vision.mlp_ratio * vision.embed_dim),
           (audio.encoder_layers, audio.d_model, audio.encoder_ffn_dim),
           vision.spatial_merge_size**2, config.audio_stack, round(side), recipe.train.batch_size)
    assert got == TABLE[name]
    assert vision.patch_size == images["patch_size"] == 14 and images["sampling_rate"] == 16000
    assert text.vocab_size == 152064 and recipe.fsdp.shard_size == 256
    assert (text.num_attention_heads, text.num_key_value_heads) == {
        3584: (28, 4), 5120: (40, 8), 8192: (64, 8)}[text.hidden_size]  # Qwen2's GQA
    assert recipe.fsdp.compute_dtype == "bfloat16"
    [large] = geometry(recipe.model, "vision", np.array([[4000, 3000]])).tolist()
    assert 0.95 * side / 14 < large[5] <= side / 14


def by_hand(config) -> int:
    """Parameters from the architecture's text alone: ViT and Whisper blocks with biases (no key
    bias in Whisper), a merger behind the ViT, Qwen2 with QKV biases, untied embeddings, two-layer
    connectors."""
    v, a, m = config.vision_config, config.audio_config, config.text_config
    c, f, merged = v.embed_dim, v.mlp_ratio * v.embed_dim, v.spatial_merge_size**2 * v.embed_dim
    total = v.depth * (4 * c * c + 2 * c * f + 9 * c + f) + 3 * v.patch_size**2 * c
    total += 2 * c + merged**2 + merged + merged * v.hidden_size + v.hidden_size
    c, f = a.d_model, a.encoder_ffn_dim
    total += a.encoder_layers * (4 * c * c + 2 * c * f + 8 * c + f)
    total += 3 * a.num_mel_bins * c + c + 3 * c * c + c + 2 * c + a.max_source_positions * c
    for joined in (v.hidden_size, a.d_model * config.audio_stack):
        total += 2 * joined + joined * m.hidden_size + m.hidden_size**2 + 2 * m.hidden_size
    c, kv = m.hidden_size, m.hidden_size // m.num_attention_heads * m.num_key_value_heads
    total += m.num_hidden_layers * (
        2 * c * c + 2 * c * kv + 3 * c * m.intermediate_size + 3 * c + 2 * kv)
    return total + 2 * m.vocab_size * c + c


@pytest.mark.parametrize("name", NAMES)
def test_parameters_on_meta_equal_the_analytic_count(name):
    model = read(name).model
    total = sum(p.numel() for p in meta_model(model.folder).parameters())
    counts = parameters(model)
    assert total == by_hand(config_of(name)) == sum(counts.values())
    if name in BILLIONS:  # the table's totals are rounded; its 2B ViT is 1.8B in the blocks
        table = dict(zip(("llm", "vision", "audio"), BILLIONS[name], strict=True))
        for phase, billions in table.items():
            own = sum(n for part, n in counts.items() if part.startswith(phase))
            assert own / 1e9 == pytest.approx(billions, rel=0.1)


def scaled_down(recipe: Recipe) -> Recipe:
    """The recipe with a tiny model: all options stay, but for the number of ranks and what is
    downloaded or filled."""
    return replace(
        recipe, model=MODEL,
        fsdp=replace(recipe.fsdp, shard_size=2, loss_chunk_rows=32, memory_gb=8.0),
        train=replace(recipe.train, batch_size=4, num_steps=1, lr=1e-3, warmup_steps=0),
        data=replace(recipe.data, prefetch=0),
        checkpoint=replace(recipe.checkpoint, every_steps=-1))


def one_step(world, names):
    rows = {}
    for name in names:
        recipe = scaled_down(read(name))
        data = SyntheticDataset()
        trainer = Trainer(recipe, world, dataset=data)
        sampler = GlobalSampler(range(8), 8, shuffle=False)
        (step,) = StepLoader(data, sampler, trainer.orchestrator, num_steps=1, prefetch=0,
                             feed=trainer._feed)
        rows[name] = trainer.train_step(step)
    return rows


@pytest.mark.slow
@pytest.mark.dist
def test_a_step_of_each_with_a_tiny_model():
    first, second = run_ranks(one_step, 2, NAMES)
    for name in NAMES:
        assert 4.0 < first[name]["loss"] < 4.4  # ln 64 = 4.16
        assert first[name]["loss"] == second[name]["loss"] and not first[name]["nonfinite"]
        assert first[name]["mfu"] is None  # a CPU has no bf16 peak
