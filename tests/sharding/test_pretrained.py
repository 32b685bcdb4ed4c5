"""Weights from folders: nothing in them is executed, and nodes whose copies differ are told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.hf import load_whole
from orchmllm.trainer import Trainer
from tests.lib.composed import write_composed
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe

pytestmark = [pytest.mark.whole, pytest.mark.dist]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("composed") / "model"
    write_composed("whisper_qwen3", folder)
    return folder


def _load(world, folder: Path) -> None:
    load_whole(folder, ModelConfig(pretrained=str(folder)), FsdpConfig(), torch.device("cpu"),
               dict.fromkeys(PHASES, "none"))


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
    run_ranks(_load, 1, copy)
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
