"""Weights from Hugging Face folders: which tensor goes where, read by rows on real ranks, and what
is said about folders that cannot be used."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from orchmllm.config.model import LLMConfig, ModelConfig
from orchmllm.config.recipe import FsdpConfig, RecipeError, explain, load_recipe, read_recipe
from orchmllm.hf.folder import Folder
from orchmllm.hf.sources import PretrainedError, find_sources, mismatches
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.names import PARTS, named
from orchmllm.runtime.resumable import check_resumable
from orchmllm.sharding.fsdp import build_model
from orchmllm.sharding.init import seed_weights
from orchmllm.trainer import Trainer
from tests.lib.commands import ROOT
from tests.lib.hf_models import HF_MODEL, edit_config, from_folders, write_models
from tests.lib.process import memory_kb
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.resume import settings
from tests.lib.synthetic import MODEL, SyntheticDataset, recipe

CPU = torch.device("cpu")
PREFIX = {"vision": "", "audio": "model.encoder.", "llm": ""}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("hf")
    write_models(root)
    return root


def stored(root: Path, model: ModelConfig = HF_MODEL, prefix=PREFIX) -> dict[str, torch.Tensor]:
    """Our name -> the value that the folders have for it."""
    out = {}
    for part in PARTS:
        tensors = {k: v for f in (root / part).glob("*.safetensors")
                   for k, v in load_file(f).items()}
        out |= {n.name: tensors[prefix[part] + n.hf] for n in named(part, model)}
    return out


def test_the_table_has_every_parameter_once():
    parameters = dict(MultimodalModel(HF_MODEL).named_parameters())
    found = [n for part in (*PARTS, "connectors") for n in named(part, HF_MODEL)]
    assert sorted(n.name for n in found) == sorted(parameters)
    for n in found:
        assert n.shape == tuple(parameters[n.name].shape), n


def _loaded(world, model: ModelConfig, fsdp: FsdpConfig) -> dict[str, np.ndarray] | None:
    built = build_model(model, fsdp, CPU, seed=3, sources=find_sources(model))
    full = {n: p.detach().full_tensor().numpy() for n, p in built.named_parameters()}
    return full if world.rank == 0 else None


@pytest.mark.dist
@pytest.mark.parametrize("ranks, shards", [
    pytest.param(3, 0, marks=pytest.mark.slow), (4, 2)], ids=["uneven", "hybrid"])
def test_every_rank_gets_its_rows(folders, ranks, shards):
    """40 and 24 rows over 3 ranks, and a 2 x 2 mesh; connectors are those of fsdp.meta_init."""
    model = from_folders(HF_MODEL, folders)
    fsdp = FsdpConfig(shard_size=shards, activation_checkpointing="full")
    got = run_ranks(_loaded, ranks, model, fsdp)[0]
    seeded = MultimodalModel(model)
    seed_weights(seeded, 3)
    want = {n: p.detach() for n, p in seeded.named_parameters()} | stored(folders)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert np.array_equal(got[name], value.numpy()), name


def load_here(model: ModelConfig) -> tuple[dict[str, torch.Tensor], list[str]]:
    """(parameters, log lines) of a model in this process alone."""
    sources = find_sources(model)
    full = run_ranks(_loaded, 1, model, FsdpConfig())[0]
    return {k: torch.from_numpy(v) for k, v in full.items()}, [s.describe() for s in sources]


@pytest.mark.dist
def test_half_precision_shards_and_tied_embeddings(tmp_path):
    """bfloat16 files in several shards; a tied head starts from the embeddings."""
    write_models(tmp_path, dtype=torch.bfloat16, tied=True, max_shard_size="20KB")
    assert len(list((tmp_path / "llm").glob("model-*.safetensors"))) > 2
    got, lines = load_here(from_folders(HF_MODEL, tmp_path, "audio", "llm"))
    tensors = {k: v for f in (tmp_path / "llm").glob("*.safetensors")
               for k, v in load_file(f).items()}
    assert "lm_head.weight" not in tensors
    table = tensors["model.embed_tokens.weight"].float()
    assert torch.equal(got["llm.hf.lm_head.weight"], table)
    assert torch.equal(got["llm.hf.model.embed_tokens.weight"], table)
    assert "tied embeddings: lm_head starts as a copy of embed_tokens" in lines[1]


@pytest.mark.parametrize("part, prefix", [
    ("audio", ""), ("audio", "encoder."), ("llm", None)])
def test_names_of_other_classes(folders, tmp_path, part, prefix):
    """An encoder saved alone or within WhisperModel, Qwen2Model without a head (tied)."""
    shutil.copytree(folders / part, tmp_path / part)
    file = tmp_path / part / "model.safetensors"
    tensors = load_file(file)
    if prefix is None:
        renamed = {k.removeprefix("model."): v for k, v in tensors.items() if k != "lm_head.weight"}
        edit_config(tmp_path / part, tie_word_embeddings=True)
    else:
        renamed = {prefix + k.removeprefix(PREFIX[part]): v for k, v in tensors.items()
                   if k.startswith(PREFIX[part])}
    save_file(renamed, file)
    (source,) = find_sources(from_folders(HF_MODEL, tmp_path, part))
    assert set(source.tensors) == {n.name for n in named(part, HF_MODEL)}


def break_missing(root):
    shutil.rmtree(root / "llm")


def break_shapes(root):
    edit_config(root / "llm", num_hidden_layers=24, vocab_size=100, rms_norm_eps=1e-5)
    edit_config(root / "audio", num_mel_bins=128)
    edit_config(root / "vision", intermediate_size=96)


def break_class(root):
    edit_config(root / "llm", model_type="llama")
    edit_config(root / "vision", model_type="qwen2_5_vl")


def break_unsupported(root):
    edit_config(root / "llm", use_sliding_window=True, rope_parameters={
        "rope_theta": 20_000.0, "rope_type": "yarn", "factor": 4.0})
    edit_config(root / "audio", activation_function="relu")


def break_pickle(root):
    (root / "llm" / "model.safetensors").rename(root / "llm" / "pytorch_model.bin")


def break_tensors(root):
    file = root / "llm" / "model.safetensors"
    tensors = load_file(file)
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = tensors["lm_head.weight"][:, :8].contiguous()
    save_file(tensors, file)


def break_truncated(root):
    file = root / "llm" / "model.safetensors"
    os.truncate(file, file.stat().st_size - 100)


def break_index(root):
    (root / "llm" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "../audio/model.safetensors"}}))


def break_quantised(root):
    file = root / "llm" / "model.safetensors"
    save_file({k: v.to(torch.int8) for k, v in load_file(file).items()}, file)


def break_config(root):
    edit_config(root / "llm", rope_parameters=["default"])
    (root / "audio" / "config.json").write_text("[]")


def break_positions(root):
    file = root / "audio" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.encoder.embed_positions.weight"][3, 1] += 0.5
    save_file(tensors, file)


BROKEN = {
    break_missing: ["model.llm.pretrained = 'ROOT/llm': no such folder: give a local copy of the "
                    "model (nothing is downloaded)"],
    break_shapes: ["model.vision.intermediate_size: recipe 72, checkpoint 96",
                   "model.audio.num_mels: recipe 8, checkpoint 128",
                   "model.llm.vocab_size: recipe 64, checkpoint 100",
                   "model.llm.num_layers: recipe 2, checkpoint 24",
                   "model.llm.rms_norm_eps: recipe 1e-06, checkpoint 1e-05",
                   "(set the recipe's values to the checkpoint's, or give another folder)"],
    break_class: ["model.llm.pretrained = 'ROOT/llm': config.json has model_type 'llama', expected "
                  "'qwen2'; other models train in a loop of your own or in a Trainer, with "
                  "BalancedDataLoader or balance_trainer, and balance_encoders ",
                  "config.json has model_type 'qwen2_5_vl', expected 'orchmllm_vit'; other "],
    break_unsupported: ["config.json has use_sliding_window True; only False can be computed",
                        "config.json has rope_type 'yarn'; only 'default' can be computed",
                        "config.json has activation_function 'relu'; only 'gelu'"],
    break_pickle: ["the weights are pickles (pytorch_model.bin), which can execute code and are "
                   "never read: convert to safetensors"],
    break_tensors: ["lacks model.norm.weight: give the folder of a whole model",
                    "lm_head.weight has shape (64, 8), expected (64, 40)"],
    break_truncated: ["llm/model.safetensors: truncated, or not a safetensors file: copy it again"],
    break_index: ["model.safetensors.index.json: '../audio/model.safetensors' is not a file name"],
    break_quantised: ["model.norm.weight is I8, but only F64, F32, F16, BF16 can be used: give "
                      "weights that are not quantised"],
    break_config: ["model.llm.pretrained = 'ROOT/llm': config.json is malformed: ",
                   "model.audio.pretrained = 'ROOT/audio': config.json is not a JSON object"],
    break_positions: ["embed_positions.weight differs from Whisper's sinusoids by 0.5: learnt "
                      "positions cannot be used"],
}


@pytest.mark.parametrize("break_it", BROKEN, ids=lambda f: f.__name__)
def test_what_is_said_about_a_folder_that_cannot_be_used(folders, tmp_path, break_it):
    root = tmp_path / "hf"
    shutil.copytree(folders, root)
    break_it(root)
    with pytest.raises(PretrainedError) as error:
        find_sources(from_folders(HF_MODEL, root))
    for part in BROKEN[break_it]:
        assert part.replace("ROOT", str(root)) in str(error.value)


def test_the_command_line_says_it_before_ranks_are_started(folders, tmp_path):
    (tmp_path / "r.yaml").write_text(
        f"data: {{path: x}}\nmodel:\n  llm: {{pretrained: {folders}/llm, vocab_size: 512}}\n"
        f"  connectors: {tmp_path}/none\n")
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchmllm.train", "r.yaml",
         "--validate"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = [x for x in run.stderr.splitlines() if not x.startswith("import time:")]
    assert run.returncode == 2 and run.stdout == ""
    assert said[0] == "error: pretrained weights cannot be used: 2 problems"
    assert said[1] == "  model.llm.vocab_size: recipe 512, checkpoint 64"
    assert (f"  model.connectors = '{tmp_path}/none': no such file: give "
            "connectors.safetensors of an export") in said
    assert any(x.startswith("error: x: no such file or folder") for x in said)
    assert not any(x.endswith("| torch") for x in run.stderr.splitlines())


def test_shapes_that_the_recipe_leaves_out_are_those_of_the_checkpoint(folders, tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\nmodel:\n  vision: {max_side: 112, pretrained: F/vision}\n"
                    "  audio: {pretrained: F/audio}\n  llm: {pretrained: F/llm}\n"
                    .replace("F/", f"{folders}/"))
    loaded = read_recipe(path)
    assert loaded.recipe.model == from_folders(HF_MODEL, folders)
    assert not find_problems(loaded.recipe.model)
    said = explain(loaded).splitlines()
    assert any(re.match(r" +num_kv_heads: 2 +# config.json$", line) for line in said)
    given = load_recipe(path, ["model.llm.num_layers=7"]).model  # the recipe's own value wins
    assert given.llm.num_layers == 7
    with pytest.raises(PretrainedError, match="num_layers: recipe 7, checkpoint 2"):
        find_sources(given)


def find_problems(model: ModelConfig) -> str:
    try:
        find_sources(model)
    except PretrainedError as error:
        return str(error)
    return ""


def test_a_plan_without_the_folder_needs_the_shapes(tmp_path):
    """Otherwise a dry run would describe a model that nobody asked for."""
    path = tmp_path / "r.yaml"
    path.write_text("data: {path: x}\nmodel:\n"
                    f"  llm: {{pretrained: {tmp_path}/none, num_layers: 3}}\n")
    with pytest.raises(RecipeError, match="line 3: model.llm.pretrained: .*config.json: No such "
                       "file.* or write hidden_size, intermediate_size, num_heads, num_kv_heads, "
                       "vocab_size in the recipe"):
        load_recipe(path)
    assert load_recipe(ROOT / "recipes" / "pretrained_7b.yaml").model.llm.num_layers == 28


def test_a_run_goes_on_without_the_folder_and_from_older_checkpoints(folders):
    """Where the weights started does not matter to a checkpoint; keys that came later have their
    defaults in one."""
    def of(model: ModelConfig) -> dict:
        return settings(recipe(model=model))

    started = of(from_folders(HF_MODEL, folders))
    changed = check_resumable(started, of(HF_MODEL), 2)
    assert changed == {f"model.{part}.pretrained": [started[f"model.{part}.pretrained"], ""]
                       for part in PARTS}
    later = ("model.connectors", *changed)
    older = {key: value for key, value in of(MODEL).items() if key not in later}
    assert check_resumable(older | {"model.vision.family": "vit"}, of(MODEL), 2) == {}
    with pytest.raises(ValueError, match="model.vision.family is 'vit', the checkpoint has 'qwen"):
        check_resumable(older | {"model.vision.family": "qwen2_vl"}, of(MODEL), 2)


def test_the_ready_recipe_fits_the_published_configurations(tmp_path):
    """The keys that matter of Qwen2-7B-Instruct's and Whisper large-v3's config.json, in the
    spelling of transformers 4."""
    configs = {
        "llm": {"model_type": "qwen2", "hidden_act": "silu", "hidden_size": 3584,
                "intermediate_size": 18944, "num_attention_heads": 28, "num_hidden_layers": 28,
                "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
                "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064,
                "tie_word_embeddings": False},
        "audio": {"model_type": "whisper", "activation_function": "gelu", "d_model": 1280,
                  "encoder_attention_heads": 20, "encoder_ffn_dim": 5120, "encoder_layers": 32,
                  "num_mel_bins": 128, "scale_embedding": False},
    }
    model = load_recipe(ROOT / "recipes" / "pretrained_7b.yaml").model
    assert {part for part in PARTS if getattr(model, part).pretrained} == {*configs}
    for part, config in configs.items():
        assert list(mismatches(part, model, Folder(tmp_path, config, {}))) == []


def test_nothing_in_a_folder_is_executed(folders, tmp_path):
    """A pickle beside the safetensors and code named in config.json."""
    shutil.copytree(folders, tmp_path / "hf")
    sentinel = tmp_path / "executed"
    llm = tmp_path / "hf" / "llm"
    (llm / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + str(sentinel).encode() + b"'\ntR.")
    (llm / "modeling_evil.py").write_text(f"open({str(sentinel)!r}, 'w')\n")
    edit_config(llm, auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    load_here(from_folders(HF_MODEL, tmp_path / "hf"))
    assert not sentinel.exists()


def _two_copies(world, roots: list[Path]) -> None:
    model = from_folders(HF_MODEL, roots[world.rank])
    Trainer(recipe(model=model), world, dataset=SyntheticDataset())


@pytest.mark.dist
def test_nodes_with_different_copies_are_told(folders, tmp_path):
    """One bias of another revision on the last rank: every rank raises before anything is built."""
    shutil.copytree(folders, tmp_path / "hf")
    file = tmp_path / "hf" / "llm" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.k_proj.bias"] += 0.01
    save_file(tensors, file)
    with pytest.raises(RankFailure) as error:
        run_ranks(_two_copies, 3, [folders, folders, tmp_path / "hf"])
    assert {(kind, text) for kind, text, _ in error.value.errors.values()} == {
        ("AgreedError", "pretrained weights: rank 2 reads other weights than the rest: give every "
         "node the same copy of the folders")}
    assert len(error.value.errors) == 3


def _rise_mb(world, warm_up: ModelConfig, model: ModelConfig) -> tuple[float, float]:
    """(peak, final) rise of this process's resident memory in building and loading, in MB."""
    build_model(warm_up, FsdpConfig(), CPU, 0, sources=find_sources(warm_up))  # lazy imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = memory_kb("VmRSS")
    built = build_model(model, FsdpConfig(), CPU, 0, sources=find_sources(model))
    after, peak = memory_kb("VmRSS"), memory_kb("VmHWM")
    assert next(built.parameters()).device == CPU
    return (peak - before) / 1e3, (after - before) / 1e3


def write_large(root: Path, model: ModelConfig) -> None:
    """A random Qwen2 folder, a file per layer."""
    from transformers import Qwen2Config

    c = model.llm
    Qwen2Config(
        vocab_size=c.vocab_size, num_hidden_layers=c.num_layers, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads, rms_norm_eps=c.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    ).save_pretrained(root)
    files: dict[str, dict] = {}
    for n in named("llm", model):
        layer = n.hf.split(".")[2] if ".layers." in n.hf else n.hf.split(".")[-2]
        files.setdefault(f"model-{layer}.safetensors", {})[n.hf] = torch.rand(n.shape)
    for name, tensors in files.items():
        save_file(tensors, root / name)
    (root / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        key: name for name, tensors in files.items() for key in tensors}}))


@pytest.mark.slow
@pytest.mark.dist
def test_memory_of_loading_a_gigabyte(folders, tmp_path):
    """On 4 ranks: each rank's memory rises by at most 1.2 times its share plus one file."""
    root = tmp_path / "llm"
    model = replace(HF_MODEL, llm=LLMConfig(
        vocab_size=32_000, num_layers=18, hidden_size=1024, intermediate_size=3072, num_heads=16,
        num_kv_heads=8, pretrained=str(root)))
    write_large(root, model)
    sizes = [f.stat().st_size / 1e6 for f in root.glob("*.safetensors")]
    ranks = run_ranks(_rise_mb, 4, from_folders(HF_MODEL, folders), model)
    limit = 1.2 * sum(sizes) / 4 + max(sizes)
    print(f"checkpoint {sum(sizes):.0f} MB in {len(sizes)} files of at most {max(sizes):.0f} MB; "
          f"rise at its peak {max(p for p, _ in ranks):.0f} MB, after loading "
          f"{max(a for _, a in ranks):.0f} MB; limit {limit:.0f} MB")
    assert max(peak for peak, _ in ranks) <= limit
