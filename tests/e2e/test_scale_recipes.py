"""The paper's models (OrchMLLM Table 1): exact shapes, counts that equal an independent one, and a
step of each at a fraction of its size on two ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from orchmllm.config.recipe import Recipe
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler
from orchmllm.models.mllm import MultimodalModel
from orchmllm.tools.predict.dry_run import parameters
from orchmllm.tools.predict.workload import MODELS
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.recipes import read
from tests.lib.synthetic import VOCAB, SyntheticDataset

NAMES = ("mllm10b", "mllm18b", "mllm84b", "mllm_1gpu")
# Table 1: layers, hidden, ffn of LLM, vision, audio; then downsampling, image bound, mini-batch.
TABLE = {
    "mllm10b": ((28, 3584, 18944), (36, 2048, 8192), (32, 1280, 5120), 1, 2, 448, 80),
    "mllm18b": ((48, 5120, 13824), (40, 2400, 9600), (32, 1280, 5120), 4, 2, 672, 60),
    "mllm84b": ((80, 8192, 29568), (45, 3200, 12800), (48, 3072, 12288), 4, 4, 896, 30),
}
BILLIONS = {"mllm10b": (7, 2, 0.6), "mllm18b": (14, 3, 0.6), "mllm84b": (72, 6, 6)}


def shape(part) -> tuple[int, int, int]:
    return part.num_layers, part.hidden_size, part.intermediate_size


@pytest.mark.parametrize("name", TABLE)
def test_recipe_is_the_papers(name):
    recipe, model = read(name), read(name).model
    got = (shape(model.llm), shape(model.vision), shape(model.audio), model.vision.merge_size**2,
           model.audio.stack, model.vision.max_side, recipe.train.batch_size)
    assert got == TABLE[name]
    assert model.vision.patch_size == 14 and model.audio.geometry.sample_rate == 16000
    assert model.llm.vocab_size == 152064 and recipe.fsdp.shard_size == 256
    assert (model.llm.num_heads, model.llm.num_kv_heads) == {
        3584: (28, 4), 5120: (40, 8), 8192: (64, 8)}[model.llm.hidden_size]  # Qwen2's GQA
    assert recipe.fsdp.compute_dtype == "bfloat16" and recipe.fsdp.meta_init
    assert model == MODELS[name.removeprefix("mllm")]  # what the workload and benchmarks use


def by_hand(model) -> int:
    """Parameters from the architecture's text alone: ViT and Whisper blocks with biases (no key
    bias in Whisper), Qwen2 with QKV biases, untied embeddings, two-layer connectors."""
    v, a, m = model.vision, model.audio, model.llm
    c, f = v.hidden_size, v.intermediate_size
    total = v.num_layers * (4 * c * c + 2 * c * f + 9 * c + f)
    total += (3 * v.patch_size**2 + 1) * c + 2 * c
    c, f = a.hidden_size, a.intermediate_size
    total += a.num_layers * (4 * c * c + 2 * c * f + 8 * c + f)
    total += 3 * a.num_mels * c + c + 3 * c * c + c + 2 * c
    for joined in (v.hidden_size * v.merge_size**2, a.hidden_size * a.stack):
        total += 2 * joined + joined * m.hidden_size + m.hidden_size**2 + 2 * m.hidden_size
    c, kv = m.hidden_size, m.hidden_size // m.num_heads * m.num_kv_heads
    total += m.num_layers * (2 * c * c + 2 * c * kv + 3 * c * m.intermediate_size + 3 * c + 2 * kv)
    return total + 2 * m.vocab_size * c + c


@pytest.mark.parametrize("name", NAMES)
def test_parameters_on_meta_equal_the_analytic_count(name):
    model = read(name).model
    with torch.device("meta"):
        built = MultimodalModel(model)
    total = sum(p.numel() for p in built.parameters())
    counts = parameters(model)
    assert total == by_hand(model) == sum(counts.values())
    for phase in ("vision", "audio", "llm"):
        own = sum(p.numel() for p in getattr(built, phase).parameters())
        assert own == sum(n for part, n in counts.items() if part.startswith(phase))
    if name in BILLIONS:  # the table's totals are rounded; its 2B ViT is 1.8B in the blocks
        table = dict(zip(("llm", "vision", "audio"), BILLIONS[name], strict=True))
        for phase, billions in table.items():
            own = sum(n for part, n in counts.items()
                      if part.startswith(phase) and part != f"{phase} connector")
            assert own / 1e9 == pytest.approx(billions, rel=0.1)


def scaled_down(recipe: Recipe) -> Recipe:
    """The recipe at about 1/64 of its widths: heads, grouping, downsampling and all options stay,
    but for the number of ranks and what is downloaded or filled."""
    model = recipe.model

    def small(part, heads: int, **more):
        return replace(part, num_layers=2, hidden_size=16 * heads, intermediate_size=40 * heads,
                       num_heads=heads, **more)

    group = model.llm.num_heads // model.llm.num_kv_heads
    return replace(
        recipe, model=replace(
            model, vision=small(model.vision, 2, max_side=112),
            audio=small(model.audio, 2, num_mels=8),
            llm=small(model.llm, group, num_kv_heads=1, vocab_size=VOCAB)),
        fsdp=replace(recipe.fsdp, shard_size=2, loss_chunk_rows=32),
        train=replace(recipe.train, batch_size=4, num_steps=1, lr=1e-3, warmup_steps=0),
        data=replace(recipe.data, prefetch=0),
        checkpoint=replace(recipe.checkpoint, every_steps=-1))


def one_step(world, names):
    rows = {}
    for name in names:
        recipe = scaled_down(read(name))
        data = SyntheticDataset(vision=recipe.model.vision.geometry,
                                audio=recipe.model.audio.geometry)
        trainer = Trainer(recipe, world, dataset=data)
        sampler = GlobalSampler(range(8), 8, shuffle=False)
        (step,) = StepLoader(data, sampler, trainer.orchestrator, num_steps=1, prefetch=0)
        rows[name] = trainer.train_step(step)
    return rows


@pytest.mark.slow
@pytest.mark.dist
def test_a_step_of_each_at_a_fraction_of_its_size():
    first, second = run_ranks(one_step, 2, NAMES)
    for name in NAMES:
        assert 4.0 < first[name]["loss"] < 4.4  # ln 64 = 4.16
        assert first[name]["loss"] == second[name]["loss"] and not first[name]["nonfinite"]
        assert first[name]["mfu"] is None  # a CPU has no bf16 peak
