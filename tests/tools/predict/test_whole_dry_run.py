"""`orchmllm dry-run` and `plan job` of whole models of transformers: what they say against the
models themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.config.fsdp import FsdpConfig
from orchmllm.config.job import resolve
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe, read_recipe
from orchmllm.data.text.processor import Processor
from orchmllm.models.flops import Lengths, phase_work
from orchmllm.models.hf import WholeModel, around, meta_model, part_flops
from orchmllm.sharding.hf import ordered
from orchmllm.sharding.memory import Loads
from orchmllm.sharding.units import checkpoint_bytes, units
from orchmllm.tools.data.command import main as data_command
from orchmllm.tools.predict import dry_run_command, plan_job
from orchmllm.tools.predict.whole import WholeMemory, pictures
from tests.lib import whole_models as models
from tests.lib.commands import ROOT, python
from tests.lib.whole_folders import write_model, write_rows

RECIPE = """\
model: {{pretrained: {0}/model}}
data: {{path: {0}/data.jsonl, index_dir: {0}/index}}
train: {{batch_size: 2}}
"""


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
    assert "windows of attention, which count" in " ".join(text.split())
    assert found["phases"]["llm"]["balanced"] < found["phases"]["llm"]["none"]
    assert plan_job.main([str(recipe), "--ranks", "2", "--out", str(tmp_path / "job.txt")]) == 0
    changes = (tmp_path / "job.txt").read_text().split()
    assert read_recipe(recipe, changes) and not [c for c in changes if "audio" in c]


@pytest.mark.parametrize("frozen", [(), ("vision",), ("llm",)])
def test_units_are_those_that_are_sharded(frozen, tmp_path):
    """Also of a model whose head is its embedding."""
    for name, tied in (("qwen3_vl", False), ("internvl", True)):
        made = models.build(name).config
        made.tie_word_embeddings = made.get_text_config().tie_word_embeddings = tied
        made.save_pretrained(tmp_path / name)
        config = replace(ModelConfig(config=str(tmp_path / name)), **{
            part: replace(getattr(ModelConfig(), part), frozen=True) for part in frozen})
        with torch.device("meta"):
            built = transformers.AutoModelForImageTextToText.from_config(made)
        assert (built.get_output_embeddings().weight is built.get_input_embeddings().weight) == tied
        whole = WholeModel(built, torch.float32)
        whole.freeze(frozen)
        forward, _ = ordered(whole, FsdpConfig(), set(frozen))
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


@pytest.mark.parametrize("name", ["internvl", "qwen3_vl"])
def test_what_a_forward_pass_keeps_is_predicted(name, tmp_path):
    """Of real tensors, on a CPU, by autograd's own hooks. And FLOP around the blocks are those that
    torch counts."""
    model = models.build(name).float()
    model.config.save_pretrained(tmp_path)
    whole, seen = WholeModel(model, torch.float32), {}
    row = whole.join([models.as_example(k, models.sample(name, model, items, 7 + k))
                      for k, items in enumerate([[models.Item("image", 5)], []])])
    whole.blocks()["vision"][0].register_forward_pre_hook(
        lambda _, args, keys: seen.update(shape=(args or [*keys.values()])[0].shape),
        with_kwargs=True)
    kept, weights = {}, {p.untyped_storage()._cdata for p in model.parameters()}

    def pack(tensor):
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), FlopCounterMode(
            display=False, depth=None) as counter:
        whole(row)
    saved = sum(t.untyped_storage().nbytes() for k, t in kept.items() if k not in weights)
    patches, tokens = np.prod(seen["shape"][:-1]), row.inputs["input_ids"].numel()
    features = int((row.inputs["input_ids"] == model.config.image_token_id).sum())
    lengths = {"vision": Lengths(*np.array([[patches], [patches], [features]])),
               "llm": Lengths(*np.array([[len(row.kept)], [tokens], [tokens]])),
               "audio": Lengths(*np.zeros((3, 1)))}
    recipe = Recipe(model=ModelConfig(config=str(tmp_path)))
    memory = WholeMemory.of(resolve(recipe, 1, 1))
    loads = Loads(lengths, {"vision": np.array([features]), "audio": np.zeros(1)})
    logits = 4.0 * len(row.kept) * memory.model.llm.vocab_size
    predicted = sum(memory._kept(p, loads, "none") for p in ("vision", "llm")) + logits
    assert predicted == pytest.approx(saved, rel=0.03)
    least = sum(memory._kept(p, loads, "full") for p in ("vision", "llm"))
    middle = sum(memory._kept(p, loads, "selective") for p in ("vision", "llm"))
    assert least < middle < predicted

    counted, paths = counter.get_flop_counts(), {id(m): n for n, m in whole.named_modules()}
    def flop(modules) -> int:
        return sum(sum(counted.get(f"WholeModel.{paths[id(m)]}", {}).values()) for m in modules)
    front, connector = around(whole)
    flops = part_flops(str(tmp_path))
    tiles = len(seen["shape"]) > 2 and seen["shape"][0]  # of which each has a position more
    assert flop(front) == flops["vision"].row * (patches - tiles)
    assert flop(connector) == flops["vision"].token * features
    assert flop([model.get_output_embeddings()]) == flops["llm"].row * len(row.kept)


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
    for change in ("fsdp.memory_gb=40", "fsdp.activation_checkpointing=auto"):
        assert dry_run_command.main([str(recipe), change]) == 2
        assert "is not available with model.config" in capsys.readouterr().err


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
    flops = part_flops(folder)["llm"]  # the whole square is counted, half of it is needed
    assert layers * counter.get_total_flops() == flops.position * n + 2 * flops.pair * n * n
    one = Lengths(*np.array([[0], [n], [n]]))
    work = phase_work("llm", ModelConfig(config=folder), one)
    assert work.forward[0, 0] == flops.position * n


@pytest.mark.parametrize("name, grid, tokens", [
    ("qwen3_vl_8b", (1, 30, 40), 300),
    ("internvl3_8b", (13, 32, 32), 13 * 256)])  # 4 x 3 tiles, and the image as one
def test_an_image_in_a_published_model(name, grid, tokens):
    folder = str(ROOT / "recipes/configs" / name)
    got = pictures(folder).segment_lengths(640, 480)
    assert got.grid == grid and got.num_tokens == tokens and got.rows == np.prod(grid)
    several = np.array([1024, 2048])  # patches; tiles do not see each other
    one, two = phase_work("vision", ModelConfig(config=folder), Lengths(
        several, several, several // 4)).forward.sum(0)
    assert (two == 2 * one) == (grid[0] > 1)


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl"])
def test_sizes_of_images_are_the_whole_processors(name, tmp_path):
    """From the settings of the image processor alone."""
    write_model(name, tmp_path)
    processor = Processor(tmp_path)
    for width, height in np.random.default_rng(0).integers(40, 120, (8, 2)).tolist():
        expanded = processor.expanded(((height, width),))
        got = pictures(str(tmp_path)).segment_lengths(width, height)
        assert got.grid == tuple(expanded.grids[0])
        assert got.num_tokens == expanded.texts[0].count(processor._feature)
