"""Models of transformers under our sharding: what is loaded, and what real ranks train, against
stock transformers in one process."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import (
    CheckpointConfig,
    DataConfig,
    FsdpConfig,
    Recipe,
    RunConfig,
    TrainConfig,
)
from orchmllm.hf.tensors import refuse_unequal
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_flops import step_flops
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS
from orchmllm.sharding.load_whole import load_whole
from orchmllm.tools.export.export import export
from orchmllm.trainer import step as step_trainer
from tests.lib import whole_models as models
from tests.lib.commands import ROOT, python
from tests.lib.ranks import run_ranks
from tests.lib.training import train
from tests.lib.whole_models import Item

pytestmark = [pytest.mark.dist, pytest.mark.whole]
OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in models.ADMITTED
          if name != "qwen3_vl"]


def saved(name: str, folder: Path, tied: bool = False) -> torch.nn.Module:
    """The model, whose weights are in `folder`, too."""
    model = models.build(name)
    if tied:
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = True
        torch.manual_seed(0)
        model = type(model)(model.config).double().train()
    model.save_pretrained(folder)
    return model


def loaded(world, folder: Path, name: str, tied: bool, shard_size: int, choice: str) -> None:
    """Parameters, buffers and ties are those of one process, and so are the gradients, of a loss by
    chunks."""
    torch.manual_seed(0)
    stock = type(models.build(name)).from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager").train()
    config = FsdpConfig(param_dtype="float64", shard_size=shard_size, loss_chunk_rows=3)
    whole = load_whole(folder, ModelConfig(), config, torch.device("cpu"),
                       dict.fromkeys(PHASES, choice))
    wanted, found = dict(stock.named_parameters()), dict(whole.hf.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(isinstance(p, DTensor) and torch.equal(p.full_tensor(), wanted[n])
               for n, p in found.items())
    buffers = dict(whole.hf.named_buffers())
    assert all(torch.equal(b, buffers[n]) for n, b in stock.named_buffers())
    is_tied = stock.lm_head.weight is stock.get_input_embeddings().weight  # where the class can be
    assert (whole.hf.lm_head.weight is whole.hf.get_input_embeddings().weight) is is_tied
    assert not is_tied or tied
    built = dict(models.build(name).named_parameters())
    for n in wanted.keys() & built.keys():  # from_pretrained lets fixed positions learn
        assert found[n].requires_grad == built[n].requires_grad
        wanted[n].requires_grad_(built[n].requires_grad)
    size = sum(p.numel() for p in wanted.values())
    shards = shard_size or world.world_size
    assert sum(p.to_local().numel() for p in found.values()) <= 1.2 * size / shards
    kinds = models.kinds_of(name)
    inputs = [[models.sample(name, stock, [Item(kinds[0], r + 1)], r), models.sample(
        name, stock, [Item(kinds[-1], 2), Item(kinds[0], 5)], 9 + r)]
        for r in range(world.world_size)]
    mine = [models.as_example(i, one) for i, one in enumerate(inputs[world.rank])]
    whole(whole.join(mine)).backward()
    _, gradients = models.stock(stock, [one for each in inputs for one in each])
    got = {n: torch.zeros_like(wanted[n]) if p.grad is None else p.grad.full_tensor()
           for n, p in found.items()}
    assert models.difference(got, gradients) <= models.LOOSE.get(name, models.EXACT)


@pytest.mark.slow
@pytest.mark.parametrize("name, tied, ranks, shard_size, choice", [
    *((name, True, 2, 0, "full:1") for name in models.ADMITTED),
    ("llava_next", False, 1, 0, "full"), ("llava_next", False, 4, 2, "selective:1"),
    ("qwen2_vl", True, 3, 0, "none")])  # whose rows three ranks do not divide
def test_loaded_shards_are_the_model_and_compute_its_gradients(
        name, tied, ranks, shard_size, choice, tmp_path):
    saved(name, tmp_path, tied)
    run_ranks(loaded, ranks, tmp_path, name, tied, shard_size, choice)


@pytest.mark.slow
def test_the_thinker_is_read_from_the_folder_of_an_omni_model(tmp_path):
    """Whose weights have other names, and which has more of them."""
    saved("qwen2_5_omni", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    named = {f"thinker.{name.removeprefix('thinker.')}": t for name, t in tensors.items()}
    save_file({**named, "talker.codec_head.weight": torch.zeros(2, 2)},
              tmp_path / "model.safetensors", metadata={"format": "pt"})
    thinker = models.build("qwen2_5_omni").config.to_dict()
    transformers.Qwen2_5OmniConfig(thinker_config=thinker).save_pretrained(tmp_path)
    run_ranks(loaded, 2, tmp_path, "qwen2_5_omni", False, 0, "none")


def refused(world, folder: Path, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        load_whole(folder, ModelConfig(), FsdpConfig(), torch.device("cpu"),
                   dict.fromkeys(PHASES, "none"))


def test_weights_that_are_missing_are_an_error(tmp_path):
    saved("internvl", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    gone = next(name for name in tensors if "down_proj" in name)
    save_file({n: t for n, t in tensors.items() if n != gone}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})
    run_ranks(refused, 1, tmp_path, "1 weights are missing or have another shape .*down_proj")


def test_two_tables_that_the_model_has_once_are_an_error(tmp_path):
    """transformers would keep both. Equal ones are one."""
    model = saved("qwen2_vl", tmp_path, tied=True)
    tensors = load_file(tmp_path / "model.safetensors")
    table = model.get_input_embeddings().weight.detach().clone()
    save_file({**tensors, "lm_head.weight": table}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})
    run_ranks(loaded, 1, tmp_path, "qwen2_vl", True, 0, "none")
    save_file({**tensors, "lm_head.weight": table.bfloat16()}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})
    refuse_unequal(tmp_path, model._tied_weights_keys)  # rounded, it is the same
    table[3, 3] += 1e-3
    save_file({**tensors, "lm_head.weight": table}, tmp_path / "model.safetensors",
              metadata={"format": "pt"})
    run_ranks(refused, 1, tmp_path, "says tie_word_embeddings, but lm_head.weight and "
                                    ".*embed_tokens.weight differ: set it to false there")


def recipe(folder: Path, model: ModelConfig, steps: int, **train_keys) -> Recipe:
    return Recipe(
        run=RunConfig(dir=str(folder)), data=DataConfig(path="unused", num_validation=2),
        model=model,
        train=TrainConfig(**{"num_steps": steps, "global_batch_size": 8, "lr": 1e-2,
                             "warmup_steps": 0, "schedule": "wsd", **train_keys}),
        fsdp=FsdpConfig(param_dtype="float64"), checkpoint=CheckpointConfig(every_steps=2))


def trained(world, run: Recipe, name: str) -> tuple[list[dict], float]:
    """Rows of metrics, and the loss of the first step by stock transformers. MFU is that of a GPU
    whose peak is known."""
    step_trainer.gpu_of = lambda device: ("NVIDIA H100 80GB HBM3", 0)
    stock, layouts = models.build(name), []
    data = models.WholeDataset(name, stock, 24)
    rows = train(world, run, data, lambda step, row: layouts.append(step.layout))
    if world.rank == 0:
        written = (Path(run.run.dir) / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, written) if "mfu" in row][-len(layouts):]
        assert [row["mfu"] * row["step_s"] for row in steps] == pytest.approx([
            sum(step_flops(run.model, layout).values()) / (world.world_size * 989e12)
            for layout in layouts], rel=1e-9, abs=0)
    inputs = [data.inputs[i] for i in layouts[0].example_id]
    with torch.no_grad():
        loss = sum(float(models.stock_loss(stock, one)) for one in inputs)
    return ([row for row in rows if "loss" in row or "validation_loss" in row],
            loss / sum(int((models.shifted(one) != -100).sum()) for one in inputs))


def losses(rows: list[dict]) -> dict[tuple[int, str], float]:
    """Of steps and of validations, of which three ranks share two examples."""
    return {(row["step"], name): row[name] for row in rows for name in ("loss", "validation_loss")
            if name in row and (name, row["step"]) != ("validation_loss", 2)}


@pytest.mark.parametrize("name", ["qwen3_vl", *OTHERS])
def test_a_run_is_the_same_balanced_unbalanced_and_resumed_on_other_ranks(name, tmp_path):
    saved(name, tmp_path / "model")
    run = recipe(tmp_path / "two", ModelConfig(pretrained=str(tmp_path / "model")), 4)
    run = replace(run, balance=replace(run.balance, measure_every=3))
    off = replace(run, run=RunConfig(dir=str(tmp_path / "off")),
                  balance=replace(run.balance, enabled=False),
                  fsdp=replace(run.fsdp, loss_chunk_rows=7),
                  train=replace(run.train, accumulation_steps=2))
    start = replace(run, run=RunConfig(dir=str(tmp_path / "one")),
                    train=replace(run.train, num_steps=2))
    rest = replace(start, train=run.train)
    balanced, by_stock = run_ranks(trained, 2, run, name)[0]
    unbalanced, _ = run_ranks(trained, 2, off, name)[0]
    resumed = [row for ranks, part in ((1, start), (3, rest))
               for row in run_ranks(trained, ranks, part, name)[0][0]]
    exact = models.LOOSE.get(name, models.EXACT)
    assert losses(balanced)[0, "loss"] == pytest.approx(by_stock, rel=exact)
    assert losses(balanced) == pytest.approx(losses(unbalanced), rel=exact)
    assert losses(balanced) == pytest.approx(losses(resumed), rel=exact)
    moved = [[sum(row["phases"][phase]["moved_bytes"] for phase in ENCODERS)
              for row in rows if "phases" in row] for rows in (balanced, unbalanced)]
    assert moved[0][2] == 0 < sum(moved[0])  # the third step is measured as it was sampled
    assert not any(moved[1])


def drawn(world, folder: Path) -> dict[str, np.ndarray]:
    """The parameters that each rank draws its rows of. They are spread as those that the class
    draws in one process, and the buffers are the same."""
    settings = read_config(folder)
    torch.manual_seed(0)
    stock = model_class(settings)._from_config(settings)
    model = ModelConfig(config=str(folder))
    whole = load_whole(folder, model, FsdpConfig(), torch.device("cpu"),
                       dict.fromkeys(PHASES, "none"), seed=5)
    found = {n: p.full_tensor().detach() for n, p in whole.hf.named_parameters()}
    buffers, wanted = dict(whole.hf.named_buffers()), dict(stock.named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(b, buffers[n]) for n, b in stock.named_buffers())
    for n, want in wanted.items():
        got, size = found[n], want.numel()
        std = float(want.std(correction=0))
        assert abs(float((got - want).mean())) <= 7 * std * (2 / size)**0.5 + 1e-9, n
        assert size < 400 or float(got.std(correction=0)) == pytest.approx(std, rel=0.2), n
        assert torch.equal((got == 0).reshape(len(got), -1).all(1),
                           (want == 0).reshape(len(got), -1).all(1)), n  # the row of padding
    return {n: p.numpy() for n, p in found.items()}


@pytest.mark.parametrize("name", [
    name if name == "gemma3" else pytest.param(name, marks=pytest.mark.slow)
    for name in models.ADMITTED])
def test_every_rank_draws_its_rows_as_the_class_of_the_model_would(name, tmp_path):
    config = models.build(name).config
    config.get_text_config().pad_token_id = 3
    config.save_pretrained(tmp_path)
    one, three = (run_ranks(drawn, ranks, tmp_path)[0] for ranks in (1, 3))
    assert all(np.array_equal(one[n], three[n]) for n in one)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json"]


DRAWN = """
import re, torch
from pathlib import Path
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.plan.assign import PHASES
from orchmllm.sharding import load_whole

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])

def sharded(*args, shard_all=load_whole.shard_all):
    global before
    shard_all(*args)
    before = kilobytes("VmRSS")  # with the objects of a model without memory
    Path("/proc/self/clear_refs").write_text("5")  # the largest resident set counts from here

distributed.init_process_group("fake", store=FakeStore(), rank={rank}, world_size=2560)
load_whole.shard_all = sharded
whole = load_whole.load_whole(Path("{folder}"), ModelConfig(config="{folder}"), FsdpConfig(),
                      torch.device("cpu"), dict.fromkeys(PHASES, "none"))
print(1024 * (kilobytes("VmHWM") - before), sum(p.to_local().nbytes for p in whole.parameters()),
      sum(p.numel() for p in whole.parameters()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1700])
def test_a_rank_of_many_draws_a_large_model_in_the_memory_of_its_rows(rank, tmp_path):
    config = transformers.AutoConfig.from_pretrained(ROOT / "recipes/configs/qwen3_vl_8b")
    config.vision_config.out_hidden_size = 8192
    for name, value in {"hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 88,
                        "num_attention_heads": 64}.items():
        setattr(config.text_config, name, value)
    config.save_pretrained(tmp_path)
    peak, rows, size = map(int, python("-c", DRAWN.format(rank=rank, folder=tmp_path)
                                       ).stdout.split())
    print(f"{size / 1e9:.1f}e9 parameters: rows {rows / 1e6:.0f} MB, peak {peak / 1e6:.0f} MB")
    assert size > 80e9 and peak <= 1.2 * rows


@pytest.mark.slow
@pytest.mark.parametrize("name, key", [
    ("qwen3_vl", "config"), ("qwen2_audio", "config"),
    *((name, "pretrained") for name in models.ADMITTED)])
def test_an_export_before_learning_is_the_folder_it_started_from(name, key, tmp_path):
    """Name by name, tied weights too; weights drawn from run.seed are the same on other numbers of
    ranks."""
    saved(name, tmp_path / "model", tied=True)
    first = load_file(tmp_path / "model" / "model.safetensors")
    exported, computed = [], []
    for ranks in (2, 1, 3)[: 3 if key == "config" else 1]:
        run = recipe(tmp_path / f"run{ranks}", ModelConfig(**{key: str(tmp_path / "model")}), 1,
                     lr=1e-300)
        computed.append(losses(run_ranks(trained, ranks, run, name)[0][0]))
        assert computed[-1] == pytest.approx(computed[0], rel=1e-7)
        export(tmp_path / f"run{ranks}" / "checkpoints" / "step_00000001", tmp_path / f"{ranks}")
        exported.append(load_file(tmp_path / f"{ranks}" / "model.safetensors"))
    for tensors in exported:
        assert tensors.keys() == first.keys()
        assert unlike(tensors, exported[0]) == []
    assert bool(unlike(first, exported[0])) is (key == "config")


def unlike(some: dict, others: dict) -> list[str]:
    """Names of tensors that differ by more than a learning rate of next to nothing makes of 0."""
    return [n for n in some if float((some[n] - others[n]).abs().max()) > 1e-200]
