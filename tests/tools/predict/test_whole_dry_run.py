"""`orchmllm dry-run` and `plan job` of whole models of transformers: what they say against the
models themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.config.fsdp import CHOICES, FsdpConfig
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe, read_recipe
from orchmllm.data.media.shapes import Size
from orchmllm.data.text.processor import Processor
from orchmllm.models.families import model_class
from orchmllm.models.flops import Lengths
from orchmllm.models.whole_flops import feature_width, phase_work
from orchmllm.models.whole_model import WholeModel, meta_model
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.plan.layout import AUDIO, ENCODERS, VISION
from orchmllm.sharding.activations import stack
from orchmllm.sharding.load_whole import freeze, ordered
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import MemoryModel
from orchmllm.sharding.units import checkpoint_bytes, units
from orchmllm.tools.data.command import main as data_command
from orchmllm.tools.predict import dry_run_command, plan_job
from orchmllm.tools.predict.whole import geometry
from tests.lib import drawn
from tests.lib import whole_models as models
from tests.lib.commands import ROOT, python
from tests.lib.recipes import frozen
from tests.lib.tokenizers import write_tokenizer
from tests.lib.whole_folders import write_model, write_rows

pytestmark = pytest.mark.whole
RECIPE = """\
model: {{pretrained: {0}/model}}
data: {{path: {0}/data.jsonl, index_dir: {0}/index}}
train: {{batch_size: 2}}
"""


def lengths(model: ModelConfig, phase: str, sizes: list[tuple[int, int]]) -> list[SegmentLengths]:
    found = geometry(model, phase, np.array(sizes)).tolist()
    return [SegmentLengths(*row[:3], tuple(row[3:])) for row in found]


def test_dry_run_and_plan_of_a_tiny_model(tmp_path, capsys):
    made = write_model("qwen3_vl", tmp_path / "model")
    write_rows(tmp_path, 12)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(tmp_path), encoding="utf-8")

    def told(*args: str) -> tuple[dict, str]:
        out = tmp_path / "out.json"
        assert dry_run_command.main([str(recipe), "--ranks", "2", "--json", str(out), *args]) == 0
        return json.loads(out.read_text()), capsys.readouterr().out

    found, text = told()
    assert "drawn from the paper's images and text" in text and "audio" not in text
    assert sum(found["parameters"].values()) == sum(p.numel() for p in made.parameters())
    assert data_command(["index", str(recipe)]) == 0
    found, text = told("train.batch_size=4")
    assert found["lengths"].startswith("the recipe's own, 12 rows")
    assert [(x["phase"], min(x["fits"]) > 0) for x in found["long_examples"]] == [
        ("vision", True), ("llm", True)] and "data.jsonl, row " in text
    assert found["phases"]["llm"]["balanced"] < found["phases"]["llm"]["none"]
    assert plan_job.main([str(recipe), "--ranks", "2", "--out", str(tmp_path / "job.txt")]) == 0
    changes = (tmp_path / "job.txt").read_text().split()
    assert read_recipe(recipe, changes) and not [c for c in changes if "audio" in c]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen2_audio", "qwen2_5_omni"])
def test_a_model_that_takes_clips(name, tmp_path, capsys):
    """Of a mix, with what it takes alone; and of its own rows."""
    made = write_model(name, tmp_path / "model")
    write_rows(tmp_path, 12, name)
    recipe, out = tmp_path / "recipe.yaml", tmp_path / "out.json"
    recipe.write_text(RECIPE.format(tmp_path), encoding="utf-8")
    settings = tmp_path / "model" / "processor_config.json"
    short = settings.read_text()  # clips of a second
    long = json.loads(short)
    long["feature_extractor"]["chunk_length"] = 60  # clips of the mix
    settings.write_text(json.dumps(long))
    capsys.readouterr()
    for command in (dry_run_command, plan_job):
        assert command.main([str(recipe), "--ranks", "2"]) == 0
        told = capsys.readouterr().out
        assert "audio and text" in told and ("images" in told) == (name == "qwen2_5_omni")
    settings.write_text(short)
    assert data_command(["index", str(recipe)]) == 0
    assert dry_run_command.main([str(recipe), "--ranks", "2", "--json", str(out),
                                 "train.batch_size=4"]) == 0
    found = json.loads(out.read_text())
    assert sum(found["parameters"].values()) == sum(p.numel() for p in made.parameters())
    assert found["lengths"].startswith("the recipe's own, 12 rows")
    assert found["phases"]["audio"]["balanced"] < found["phases"]["audio"]["none"]
    assert plan_job.main([str(recipe), "--ranks", "2", "--out", str(tmp_path / "job.txt")]) == 0
    changes = (tmp_path / "job.txt").read_text().split()
    assert read_recipe(recipe, changes)
    named = {change.split(".")[1].partition("_")[0] for change in changes if "checkpoint" in change}
    assert named == set(found["phases"])


@pytest.mark.parametrize("parts", [(), ("vision", "connector"), ("llm",), ("audio",)])
def test_units_are_those_that_are_sharded(parts, tmp_path):
    """Also of a model whose head is its embedding, of one with two encoders, and where some layers
    have experts."""
    for name, tied in (("qwen3_vl", False), ("internvl", True), ("qwen2_5_omni", False),
                       ("glm4v_moe", False)):
        made = models.build(name).config
        made.tie_word_embeddings = made.get_text_config().tie_word_embeddings = tied
        made.save_pretrained(tmp_path / name)
        config = frozen(*parts, model=ModelConfig(config=str(tmp_path / name)))
        with torch.device("meta"):
            built = model_class(made)._from_config(made)
        assert (built.get_output_embeddings().weight is built.get_input_embeddings().weight) == tied
        whole = WholeModel(built, torch.float32)
        freeze(whole, config)
        forward, _ = ordered(whole, FsdpConfig())
        sizes, inside = {}, set()
        for unit in reversed(forward):  # the root is the first, and has what no other has
            own = [p for p in unit.module.parameters() if id(p) not in inside]
            inside |= {id(p) for p in own}
            sizes[unit] = (sum(p.numel() for p in own),
                           sum(p.numel() for p in own if p.requires_grad))
        wanted = [(u.size, u.trained_size) for u in units(config) for _ in range(u.copies)
                  if u.size]
        assert [sizes[unit] for unit in forward] == wanted, name
        assert checkpoint_bytes(Recipe(model=config)) == 4 * sum(
            p.numel() * (1 + 2 * p.requires_grad) for p in whole.parameters())


@pytest.mark.parametrize("name, phase", [
    ("internvl", "vision"), ("qwen3_vl", "vision"),
    pytest.param("qwen3_vl_moe", "vision", marks=pytest.mark.slow),
    *(pytest.param(name, "audio", marks=pytest.mark.slow)
      for name in ("audioflamingo3", "qwen2_audio", "qwen2_5_omni"))])
def test_what_a_forward_pass_keeps_is_predicted(name, phase, tmp_path):
    """Of real tensors, on a CPU, by autograd's own hooks."""
    model = models.build(name)
    item, rel = (models.Item("image", 5), 0.03) if phase == "vision" else (
        models.Item("audio", 2), 0.07)  # the norm behind two blocks is not counted
    examples = [models.as_example(k, models.sample(name, model, items, 7 + k))
                for k, items in enumerate([[item], []])]
    model = model.float()
    if name == "qwen3_vl_moe":
        model.set_experts_implementation("grouped_mm")
    model.config.save_pretrained(tmp_path)
    whole, seen = WholeModel(model, torch.float32), {}
    row = whole.join(examples)
    whole.blocks()[phase][0].register_forward_pre_hook(
        lambda _, args, keys: seen.update(shape=(args or [*keys.values()])[0].shape),
        with_kwargs=True)
    kept, weights = {}, {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        whole(row)
    saved = sum(t.untyped_storage().nbytes() for k, t in kept.items() if k not in weights)
    patches, tokens = np.prod(seen["shape"][:-1]), row.inputs["input_ids"].numel()
    token = getattr(model.config, f"{item.kind}_token_id")
    features = int((row.inputs["input_ids"] == token).sum())
    if phase == "audio":  # the connector computes those of the padding, too
        features = patches // 2
    rows = patches * (2 if phase == "audio" else 1)
    lengths = {**dict.fromkeys(ENCODERS, Lengths(*np.zeros((3, 1)))),
               phase: Lengths(*np.array([[rows], [patches], [features]])),
               "llm": Lengths(*np.array([[len(row.kept)], [tokens], [tokens]]))}
    recipe = Recipe(model=ModelConfig(config=str(tmp_path)))
    memory = MemoryModel.of(resolve(recipe, 1, 1))
    loads = Loads(lengths, {p: np.array([features]) * (p == phase) for p in ENCODERS})
    logits = 4.0 * len(row.kept) * memory._counts["llm"].outputs
    got = memory.element * feature_width(recipe.model) * tokens  # by the LLM's layers
    least, middle, predicted = (logits + got + sum(
        memory._around(p, loads) + stack(memory.blocks(p), memory.counts(p, choice)).kept
        * lengths[p].positions for p in (phase, "llm")) for choice in reversed(CHOICES))
    assert predicted == pytest.approx(saved, rel=rel)
    assert least < middle < predicted


def test_a_folder_that_lacks_something_is_told_what(tmp_path, capsys):
    """Of its image processor; of a family whose tokens only the whole processor decides."""
    recipe = tmp_path / "recipe.yaml"
    for name, why in (("qwen3_vl", "(preprocessor_config.json)"), ("gemma3", "for gemma3, whose")):
        models.build(name).config.save_pretrained(tmp_path / name)
        recipe.write_text(f"model: {{config: {tmp_path / name}}}\ndata: {{path: nowhere}}\n")
        for command in (dry_run_command, plan_job):
            assert command.main([str(recipe), "--ranks", "2"]) == 2
            told = capsys.readouterr().err
            assert why in told and "orchmllm data index" in told and told.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, billions", [("qwen3_vl_8b", 8.77), ("internvl3_8b", 7.94)])
def test_a_published_model(name, billions, tmp_path):
    """The committed recipe at 64 ranks: parameters are those of the model that transformers builds,
    FLOP of a block those that torch counts."""
    out = tmp_path / "out.json"
    run = python("-m", "orchmllm", "dry-run", f"recipes/{name}.yaml", "--ranks", "64", "--json",
                 out, cwd=ROOT)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    found, folder = json.loads(out.read_text()), str(ROOT / "recipes/configs" / name)
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    total = sum(p.numel() for p in model.parameters())
    assert sum(found["parameters"].values()) == total
    assert total / 1e9 == pytest.approx(billions, abs=0.005)  # as published
    layer, n = meta_model(folder).blocks()["llm"][0], 512
    layers = config.get_text_config().num_hidden_layers
    layer.self_attn.config._attn_implementation = "eager"
    try:
        angles = torch.empty(1, n, config.get_text_config().hidden_size // layer.self_attn.config
                             .num_attention_heads, device="meta")
        with FlopCounterMode(display=False) as counter:
            layer(torch.empty(1, n, config.get_text_config().hidden_size, device="meta"),
                  position_embeddings=(angles, angles), attention_mask=None)
    finally:
        layer.self_attn.config._attn_implementation = "orchmllm_packed"
    one = Lengths(*np.array([[0], [n], [n]]))
    [products], [attention] = phase_work("llm", ModelConfig(config=folder), one).forward
    # The whole square is counted, half of it is needed.
    assert layers * counter.get_total_flops() == products + 2 * attention * n // (n + 1)


@pytest.mark.parametrize("name, grid, tokens", [
    ("qwen3_vl_8b", (1, 30, 40), 300),
    ("internvl3_8b", (13, 32, 32), 13 * 256)])  # 4 x 3 tiles, and the image as one
def test_an_image_in_a_published_model(name, grid, tokens):
    folder = str(ROOT / "recipes/configs" / name)
    [got] = lengths(ModelConfig(config=folder), "vision", [(640, 480)])
    assert got.grid == grid and got.num_tokens == tokens and got.rows == np.prod(grid)
    several = np.array([1024, 2048])  # patches; tiles do not see each other
    one, two = phase_work("vision", ModelConfig(config=folder), Lengths(
        several, several, several // 4)).forward.sum(0)
    assert (two == 2 * one) == (grid[0] > 1)


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl"])
def test_sizes_of_images_are_the_whole_processors(name, tmp_path):
    """From the settings of the image processor alone."""
    write_model(name, tmp_path)
    processor, model = Processor(tmp_path), ModelConfig(config=str(tmp_path))
    for width, height in np.random.default_rng(0).integers(40, 120, (8, 2)).tolist():
        expanded = processor.calls.expanded((Size(height, width),))
        [got] = lengths(model, "vision", [(width, height)])
        assert (got.grid,) == expanded.grids[0]
        assert got.num_tokens == expanded.texts[0].count(processor.calls.features[VISION])


@pytest.mark.parametrize("name", ["packed", "qwen2_audio", "qwen2_5_omni", "audioflamingo3"])
def test_lengths_of_clips_are_the_whole_processors(name, tmp_path):
    """From the settings of the feature extractor alone; also of clips of other rates."""
    folder = tmp_path / "model"
    if name == "packed":
        drawn.write_model(folder, write_tokenizer(tmp_path))
    else:
        write_model(name, folder)
    processor = Processor(folder)
    (folder / "tokenizer.json").unlink()
    model, rng = ModelConfig(config=str(folder)), np.random.default_rng(0)
    sizes = [(n, rate) for rate in (16000, 44100)
             for n in rng.integers(rate // 5, rate, 4).tolist()]
    for size, got in zip(sizes, lengths(model, "audio", sizes), strict=True):
        heard = processor.audio.resampled(*size)
        expanded = processor.calls.expanded((Size(0, heard),))
        assert (got.grid,) == expanded.grids[0]
        assert got.num_tokens == expanded.texts[0].count(processor.calls.features[AUDIO])
        assert (got.rows, got.attn_len) == (got.grid[2], (got.grid[2] + 1) // 2)
    for wrong, why in ((1, "too short"), (16000 * 10**4, "too long")):
        with pytest.raises(ValueError, match=why):
            lengths(model, "audio", [(wrong, 16000)])
