"""Adapters of peft on models of transformers under our sharding: what learns and travels,
against peft on stock transformers in one process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from math import prod
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.hf.folder import read_header
from orchmllm.hf.sources import PretrainedError, find_sources, fingerprint
from orchmllm.hf.tensors import FileTensor
from orchmllm.models import adapters
from orchmllm.models.flops import Lengths
from orchmllm.models.whole_flops import phase_work
from orchmllm.models.whole_model import WholeModel, meta_model
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.initial_values import local_rows, seed_adapters
from orchmllm.sharding.load_whole import freeze, load_whole, ordered
from orchmllm.sharding.units import units
from orchmllm.tools.export.adapters import write_adapters, write_merged
from tests.lib import whole_models as models
from tests.lib.adapters import ENDS, as_tensors, by_peft, drawn, lora_model
from tests.lib.collectives import Log
from tests.lib.composed import write_composed
from tests.lib.ranks import run_ranks
from tests.lib.whole_models import Item
from tests.sharding.test_whole_models import OTHERS, saved

pytestmark = pytest.mark.whole


def computed(world, model: ModelConfig, name: str, shard_size: int, choice: str) -> list[str]:
    """Gradients are those of peft, example by example, and the ranks sum nothing else. Returns the
    names of what learns."""
    cls = type(models.build(name))
    stock = cls.from_pretrained(
        model.folder, dtype=torch.float64, experts_implementation="eager").train()
    config = FsdpConfig(param_dtype="float64", shard_size=shard_size, loss_chunk_rows=3)
    whole = load_whole(Path(model.folder), model, config, torch.device("cpu"),
                       dict.fromkeys(PHASES, choice), seed=5)
    for n, p in whole.hf.named_parameters():
        if n.endswith(ENDS[1]):
            local, first = local_rows(p.detach())
            local.copy_(drawn(n, p)[first:first + len(local)])
    kinds = models.kinds_of(name)
    inputs = [[models.sample(name, stock, [Item(k, r + 1) for k in kinds], r), models.sample(
        name, stock, [], 9 + r)] for r in range(world.world_size)]
    loss = whole(whole.join([models.as_example(i, one)
                             for i, one in enumerate(inputs[world.rank])]))
    with Log() as log:
        loss.backward()
    found = {n: p for n, p in whole.hf.named_parameters() if p.requires_grad}
    assert all(p.grad is None for n, p in whole.hf.named_parameters() if n not in found)
    read = {n: p for n, p in found.items() if p.grad is not None}  # llava skips its last block
    weights = {n: p.full_tensor().detach() for n, p in found.items()}
    reference = by_peft(stock, model, weights)
    for one in (one for each in inputs for one in each):
        models.stock_loss(reference, one).backward()
    wanted = {n: g for n, g in models.gradients(reference).items() if n in found}
    got = {n: p.grad.full_tensor() if n in read else torch.zeros_like(weights[n])
           for n, p in found.items()}
    assert models.difference(got, wanted) <= models.LOOSE.get(name, models.EXACT)
    if world.world_size > 1:
        shards = shard_size or world.world_size
        learnt = sum(-(-p.shape[0] // shards) * shards * prod(p.shape[1:]) for p in read.values())
        sent = sum(max(c.sizes[1:]) for c in log.found if c.name == "_reduce_scatter_base_")
        assert sent == learnt
        again = sum(c.sizes[1] for c in log.found if c.name == "allreduce_")
        assert again == (learnt // shards if shards < world.world_size else 0)
    return list(found)


@pytest.mark.dist
def test_adapters_alone_learn_and_travel(tmp_path):
    saved("qwen3_vl", tmp_path)
    model = lora_model(tmp_path, "vision", alpha=5, use_rslora=True, connector=True)
    found = run_ranks(computed, 2, model, "qwen3_vl", 0, "none")[0]
    connector = [n for n, part in zip(found, models.named_parts(models.build("qwen3_vl"), found),
                                      strict=True) if part == "connector"]
    assert connector and not any(n.endswith(ENDS) for n in connector)
    found = [n for n in found if n not in connector]
    layers = {n.rpartition(".lora_")[0] for n in found}
    assert layers == {n for n, m in models.build("qwen3_vl").named_modules() if isinstance(
        m, nn.Linear) and n.startswith("model.language_model.layers.")}
    assert len(found) == 2 * len(layers) and all(n.endswith(ENDS) for n in found)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("name", ["qwen3_vl", *OTHERS])
def test_adapters_of_tower_and_text_of_every_family(name, tmp_path):
    saved(name, tmp_path)
    model = lora_model(tmp_path, alpha=5, use_rslora=True)
    if name == "glm4v_moe":
        with pytest.raises(PretrainedError, match="for weights of experts, and puts no adapter"):
            find_sources(model)
        model = lora_model(tmp_path, target_modules=("q_proj", "qkv"))
    found = run_ranks(computed, 2, model, name, 0, "full")[0]
    assert {*models.named_parts(models.build(name), found)} == {
        "llm", *meta_model(str(tmp_path)).blocks()}
    assert all(n.endswith(ENDS) for n in found)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("ranks, shard_size, choice", [(1, 0, "none"), (3, 0, "selective"),
                                                       (4, 2, "full")])
def test_the_same_on_other_numbers_of_ranks(ranks, shard_size, choice, tmp_path):
    """Also with a connector that learns, and adapters on some layers."""
    saved("qwen3_vl", tmp_path)
    model = lora_model(tmp_path, connector=True, target_modules=("q_proj", "attn.qkv"))
    found = run_ranks(computed, ranks, model, "qwen3_vl", shard_size, choice)[0]
    assert {*models.named_parts(models.build("qwen3_vl"), found)} == {"vision", "connector", "llm"}
    assert {n.split(".lora")[0].rpartition(".")[2] for n in found if n.endswith(ENDS)} == {
        "q_proj", "qkv"}


def test_adapters_begin_as_those_of_peft():
    weights = {name: torch.ones(shape) for name, shape in zip(
        adapters.WEIGHTS, ((4, 900), (900, 4)), strict=True)}
    seed_adapters(SimpleNamespace(named_parameters=weights.items), 0)
    a, b = (weight.abs() for weight in weights.values())
    assert 0.99 / 30 < float(a.max()) <= 1 / 30 and not b.any()
    drawn_before = weights[adapters.WEIGHTS[0]].clone()
    for seed, same in ((0, True), (1, False)):
        seed_adapters(SimpleNamespace(named_parameters=weights.items), seed)
        assert torch.equal(weights[adapters.WEIGHTS[0]], drawn_before) == same
    wide = torch.ones(4, 2**21)  # drawn in blocks
    seed_adapters(SimpleNamespace(named_parameters={adapters.WEIGHTS[0]: wide}.items), 0)
    assert len(wide[:, :9].unique(dim=0)) == 4


@pytest.mark.parametrize("kept, dtype, written", [
    ("F64", "", "F64"), ("F64", "BF16", "BF16"), ("BF16", "F64", "F64")])
def test_a_merged_export_has_the_dtype_that_is_asked_for(kept, dtype, written, tmp_path):
    """Without one, that of what was saved; what is beside adapters is read in no narrower one, and
    is named for peft."""
    stock = saved("qwen3_vl", tmp_path / "model")
    model, out = lora_model(tmp_path / "model", connector=True), tmp_path / "merged"
    out.mkdir()
    dtypes = {"F64": torch.float64, "BF16": torch.bfloat16}
    values = {name: drawn(name, torch.empty(shape)).to(dtypes[kept])
              for name, shape in adapters.learnt(meta_model(model.folder), model)}
    stored = {f"model.hf.{name}": FileTensor(f"model.hf.{name}", kept, tuple(value.shape),
                                             lambda value=value: value)
              for name, value in values.items()}
    write_merged(model, f"{fingerprint(find_sources(model)):012x}", stored, dtype, 10**9, out,
                 lambda text: None)
    [file] = out.glob("*.safetensors")
    assert {tensor.dtype for tensor in read_header(file)[1].values()} == {written}
    merged, scale = models.stock_of(out).state_dict(), model.lora.alpha / model.lora.rank
    for name, weight in stock.state_dict().items():
        if "self_attn.q_proj.weight" in name:
            a, b = (values[name.replace("weight", end)].double() for end in ENDS)
            added = (weight + scale * b @ a).to(dtypes[written]).double()
            assert torch.allclose(merged[name], added, rtol=1e-6, atol=1e-6)
    write_adapters(model, stored, dtype, tmp_path, lambda text: None)
    said = json.loads((tmp_path / "adapter_config.json").read_text())
    beside = {name.rpartition(".")[0] for name, _ in adapters.learnt(
        meta_model(model.folder), model) if not name.endswith(ENDS)}
    assert set(said["modules_to_save"]) == beside != set()


def first_values(world, model: ModelConfig) -> dict[str, np.ndarray]:
    whole = load_whole(Path(model.folder), model, FsdpConfig(), torch.device("cpu"),
                       {"vision": "none", "llm": "none"}, seed=5)
    return {n: p.full_tensor().detach().numpy() for n, p in whole.hf.named_parameters()
            if p.requires_grad}


@pytest.mark.slow
@pytest.mark.dist
def test_initial_values_are_those_of_peft_on_any_number_of_ranks(tmp_path):
    """Each weight is drawn apart, evenly between the bounds of kaiming_uniform."""
    import peft

    stock = saved("qwen3_vl", tmp_path)
    one, three = (as_tensors(run_ranks(first_values, ranks, lora_model(tmp_path, rank=64))[0])
                  for ranks in (1, 3))
    assert one.keys() == three.keys() and all(torch.equal(one[n], three[n]) for n in one)
    theirs = dict(peft.get_peft_model(stock, peft.LoraConfig(r=64, target_modules=[
        n.split(".lora_A")[0] for n in one if "lora_A" in n])).get_base_model().named_parameters())
    for n, value in one.items():
        assert value.abs().max() == pytest.approx(float(theirs[n].abs().max()), rel=0.02), n
        assert value.std() == pytest.approx(float(theirs[n].std()), rel=0.1), n
    a = [v.flatten() for n, v in one.items() if "lora_A" in n and "q_proj" in n]
    assert torch.corrcoef(torch.stack(a))[0, 1].abs() < 0.1


def test_what_adapters_cannot_be_on_is_refused_before_ranks_start(tmp_path, monkeypatch):
    saved("qwen3_vl", tmp_path / "qwen")
    saved("llava_next", tmp_path / "llava")
    write_composed("siglip_whisper_qwen2", tmp_path / "composed", linked=True)
    qwen = tmp_path / "qwen"
    for model, told in (
            (lora_model(qwen, target_modules=("self_attn.q_proj", "q_prj")),
             "of vision, llm is called 'q_prj': did you mean 'q_proj'[?] choose of .*qkv, up_proj"),
            (lora_model(qwen, "vision", target_modules=("qkv",)), "of llm is called 'qkv': "),
            (lora_model(qwen, target_modules=("1.self_attn.q_proj",)),
             "did you mean 'self_attn.q_proj'[?]"),
            (lora_model(qwen, target_modules=("q_proj",)),
             "no layer of vision is among them: set model.vision.frozen to true"),
            (replace(lora_model(qwen, "vision", "llm", rank=0), connectors_frozen=True),
             "nothing would learn: .* has vision, llm and connectors, and all of them are frozen"),
            (lora_model(tmp_path / "composed"), "model.vision_projector.* is in no file of .*: set "
             "model.lora.connector to true"),
            (lora_model(tmp_path / "llava", connector=True), "connector: model has a weight of")):
        with pytest.raises(PretrainedError, match=told):
            find_sources(model)
    assert find_sources(lora_model(tmp_path / "composed", connector=True))
    assert find_sources(lora_model(qwen, "vision", target_modules=("q_proj",), connector=True))
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(PretrainedError, match="package peft, which is not installed: pip install"):
        find_sources(lora_model(qwen))


@pytest.mark.slow
@pytest.mark.parametrize("frozen, connector", [((), False), (("vision",), True)])
def test_units_are_those_that_are_sharded(frozen, connector, tmp_path):
    saved("qwen3_vl", tmp_path)
    model = lora_model(tmp_path, *frozen, connector=connector)
    wanted = [(u.size, u.trained_size) for u in units(model) for _ in range(u.copies) if u.size]
    meta_model.cache_clear()
    whole = meta_model(str(tmp_path))
    adapters.inject(whole, model)
    freeze(whole, model)
    forward, _ = ordered(whole, FsdpConfig())
    sizes, inside = {}, set()
    for unit in reversed(forward):
        own = [p for p in unit.module.parameters() if id(p) not in inside]
        inside |= {id(p) for p in own}
        sizes[unit] = (sum(p.numel() for p in own), sum(
            p.numel() for p in own if p.requires_grad))
    meta_model.cache_clear()
    assert [sizes[unit] for unit in forward] == wanted


@pytest.mark.slow
def test_flop_of_what_is_beside_adapters_are_those_that_torch_counts(tmp_path):
    """Forward, and backward towards the inputs alone; nothing in front of the first adapter."""
    hf = models.build("qwen3_vl").float()
    hf.save_pretrained(tmp_path)
    whole, model = WholeModel(hf, torch.float32), lora_model(tmp_path)
    row = whole.join([models.as_example(0, models.sample("qwen3_vl", hf, [Item("image", 5)], 7))])
    adapters.put_back(hf, adapters.inject(whole, model), torch.device("cpu"))
    seed_adapters(hf, 0)
    freeze(whole, model)
    with FlopCounterMode(display=False) as counter:
        whole(row).backward()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items()
                  if "attention" not in str(op) and "bmm" not in str(op))
    n, patches = row.inputs["input_ids"].numel(), len(row.inputs["pixel_values"])
    features = int((row.inputs["input_ids"] == hf.config.image_token_id).sum())
    predicted = 0
    for phase, sizes in (("vision", (patches, patches, features)), ("llm", (len(row.kept), n, n))):
        work = phase_work(phase, model, Lengths(*np.array(sizes)[:, None]))
        predicted += work.forward[0, 0] + work.backward[0, 0]
    added = sum(3 * 2 * p.numel() * (patches if whole.part_of(name) == "vision" else n)
                for name, p in hf.named_parameters() if p.requires_grad)
    first = whole.blocks()["vision"][0].attn.qkv  # passes no gradient on, which counts as if it did
    saved_there = 2 * patches * (first.base_layer.weight.numel() + 3 * first.in_features)
    assert counted == predicted + added - saved_there
