"""Weights from folders: what is said of those that cannot be used, nothing in them is executed,
nodes whose copies differ are told, and no rank holds more than its share while it reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import safetensors
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.hf.sources import PretrainedError, find_sources, fingerprint
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.load_whole import load_whole
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.composed import write_composed
from tests.lib.process import memory_kb
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe

pytestmark = [pytest.mark.whole, pytest.mark.dist]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("composed") / "model"
    write_composed("whisper_qwen3", folder)
    return folder


def indexed(folder: Path, file: str) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": file}}))


BROKEN = {  # name -> (what is done to a folder, what is said)
    "gone": (shutil.rmtree, "gone has no config.json: give a local copy of the model (nothing is "
             "downloaded)"),
    "no object": (lambda f: (f / "config.json").write_text("[]"), "config.json cannot be read: "),
    "pickles": (lambda f: (f / SINGLE).rename(f / "pytorch_model.bin"),
                "the weights are pickles (pytorch_model.bin), which can execute code and are never "
                "read: convert to safetensors"),
    "no weights": (lambda f: (f / SINGLE).unlink(),
                   f"neither {SINGLE} nor {INDEX} is in it: give a folder with weights"),
    "truncated": (lambda f: os.truncate(f / SINGLE, (f / SINGLE).stat().st_size - 100),
                  f"truncated/{SINGLE}: truncated, or not a safetensors file: copy it again"),
    "outside": (lambda f: indexed(f, "../model.safetensors"),
                f"{INDEX}: '../model.safetensors' is not a file name"),
    "a file lacks": (lambda f: indexed(f, "model-2.safetensors"),
                     f"{INDEX}: model-2.safetensors is missing: copy the folder completely"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_said_of_a_folder_that_cannot_be_used(name, folder, tmp_path):
    """By headers alone, before ranks start."""
    spoil, told = BROKEN[name]
    shutil.copytree(folder, tmp_path / name)
    spoil(tmp_path / name)
    with pytest.raises(PretrainedError) as error:
        find_sources(ModelConfig(pretrained=str(tmp_path / name)))
    assert str(error.value).startswith("model.pretrained: ") and told in str(error.value)


def _load(world, folder: Path) -> WholeModel:
    return load_whole(folder, ModelConfig(pretrained=str(folder)), FsdpConfig(),
                      torch.device("cpu"), dict.fromkeys(PHASES, "none"))


def _loaded(world, folder: Path) -> None:
    _load(world, folder)


def test_nothing_in_a_folder_is_executed(folder, tmp_path):
    """A pickle beside the safetensors and code named in config.json."""
    copy, sentinel = tmp_path / "copy", tmp_path / "executed"
    shutil.copytree(folder, copy)
    (copy / "pytorch_model.bin").write_bytes(
        b"cos\nsystem\n(S'touch " + str(sentinel).encode() + b"'\ntR.")
    (copy / "modeling_evil.py").write_text(f"open({str(sentinel)!r}, 'w')\n")
    config = json.loads((copy / "config.json").read_text())
    evil = {name: "modeling_evil.Evil" for name in ("AutoConfig", "AutoModelForMultimodalLM")}
    (copy / "config.json").write_text(json.dumps({**config, "auto_map": evil}))
    run_ranks(_loaded, 1, copy)
    assert not sentinel.exists()


def _two_copies(world, folders: list[Path]) -> None:
    model = ModelConfig(pretrained=str(folders[world.rank]))
    Trainer(recipe(model=model), world, dataset=SyntheticDataset())


def test_nodes_with_different_copies_are_told(folder, tmp_path):
    """One row of another revision on the last rank: every rank raises before anything is built."""
    shutil.copytree(folder, tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    tensors = load_file(file)
    tensors[max(tensors)][-1] += 0.01
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(RankFailure) as error:
        run_ranks(_two_copies, 3, [folder, folder, tmp_path / "copy"])
    assert {(kind, text) for kind, text, _ in error.value.errors.values()} == {
        ("AgreedError", "pretrained weights: rank 2 reads other weights than the rest: give every "
         "node the same copy of the folders")}
    assert len(error.value.errors) == 3


def test_a_fingerprint_is_of_the_tensors_and_opens_each_file_once(folder, tmp_path, monkeypatch):
    """All ranks open them at one time."""
    opened = []
    monkeypatch.setattr(safetensors, "safe_open", lambda file, **how: (
        opened.append(Path(file).name), safe_open(file, **how))[1])
    split = tmp_path / "split"
    shutil.copytree(folder, split)
    tensors = load_file(split / SINGLE)
    (split / SINGLE).unlink()
    files = {name: f"model-{k % 2}.safetensors" for k, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_file({n: tensors[n] for n in tensors if files[n] == file}, split / file)
    (split / INDEX).write_text(json.dumps({"weight_map": files}))
    one, two = (fingerprint(find_sources(ModelConfig(pretrained=str(f)))) for f in (folder, split))
    assert one == two and opened.count(SINGLE) == 1
    assert sorted(opened[-2:]) == sorted(set(files.values())) and len(opened) == len(set(opened))


def write_large(folder: Path) -> list[int]:
    """A model with a large text model, in files of at most 100 MB; their sizes."""
    config = models.build("llava").config
    for key, value in {"vocab_size": 32_000, "num_hidden_layers": 18, "hidden_size": 1024,
                       "intermediate_size": 3072, "num_attention_heads": 16,
                       "num_key_value_heads": 8, "head_dim": 64}.items():
        setattr(config.text_config, key, value)
    torch.manual_seed(0)
    transformers.LlavaForConditionalGeneration(config).save_pretrained(
        folder, max_shard_size="100MB")
    return [file.stat().st_size for file in folder.glob("*.safetensors")]


def _rise(world, warm_up: Path, folder: Path) -> tuple[int, int, int]:
    """Bytes of this rank's rows; by which this process's resident memory rises at most while they
    are loaded; and which it has of its own more when they were written to: until then they may be
    pages of the files."""
    _load(world, warm_up)  # imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, own = memory_kb("VmRSS"), memory_kb("RssAnon")
    whole = _load(world, folder)
    peak = memory_kb("VmHWM") - before
    rows = [p.detach().to_local() for p in whole.parameters()]
    for x in rows:
        x.mul_(2)
    return sum(x.nbytes for x in rows), 1024 * peak, 1024 * (memory_kb("RssAnon") - own)


@pytest.mark.slow
def test_memory_of_loading_a_gigabyte(folder, tmp_path):
    """On 4 ranks: each rank's memory rises by at most 1.2 times its share plus one file."""
    sizes = write_large(tmp_path)
    rows, peaks, own = zip(*run_ranks(_rise, 4, folder, tmp_path), strict=True)
    limit = 1.2 * sum(sizes) / 4 + max(sizes)
    print(f"{sum(sizes) / 1e6:.0f} MB in {len(sizes)} files of at most {max(sizes) / 1e6:.0f} MB; "
          f"rise at its peak {max(peaks) / 1e6:.0f} MB, written to {max(own) / 1e6:.0f} MB; limit "
          f"{limit / 1e6:.0f} MB")
    assert sum(rows) > 1e9 and max(*peaks, *own) <= limit
    assert all(0.9 * size <= held <= 1.2 * size for size, held in zip(rows, own, strict=True))
