"""Nothing that is read can run code: a pickle in every place, and a grep over the package."""

from __future__ import annotations

import os
import pickle
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orchmllm.config.recipe import Recipe, RecipeError, load_recipe
from orchmllm.runtime.checkpoint import CheckpointError
from tests.lib.commands import ROOT
from tests.lib.ranks import RankFailure, run_ranks
from tests.lib.resume import find, run_recipe, train_recorded

PACKAGE = ROOT / "orchmllm"
FORBIDDEN = re.compile(r"pickle\.loads?\(|torch\.load\((?!.*weights_only=True)|"
                       r"weights_only=False|all_gather_object|"
                       r"yaml\.(unsafe_load|full_load)|trust_remote_code(?!=False|\x22: False)|"
                       r"(?<![.\w])(eval|exec)\(")


class Evil:
    def __init__(self, sentinel: Path) -> None:
        self.sentinel = str(sentinel)

    def __reduce__(self):
        return os.system, (f"touch {self.sentinel}",)


def test_the_package_never_unpickles():
    for path in PACKAGE.rglob("*.py"):
        found = FORBIDDEN.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path}: {found.group()}"


def test_yaml_tags(tmp_path):
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"run: !!python/object/apply:os.system ['touch {tmp_path}/sentinel']\n")
    with pytest.raises(RecipeError):
        load_recipe(recipe)
    with pytest.raises(RecipeError):
        load_recipe(recipe, ["data.path=!!python/object/apply:os.system ['true']"])
    assert not (tmp_path / "sentinel").exists()


def spoiled_one_by_one(world, run: Recipe, evil: bytes) -> None:
    assert len(train_recorded(world, run)) == 2
    newest = Path(run.run.dir, "checkpoints", "step_00000002")
    names = sorted(p.name for p in newest.iterdir())
    for extra in (".metadata", "__0_0.distcp", "model.pt", "optimizer.bin"):
        (newest / extra).write_bytes(evil)
    assert train_recorded(world, run) == []  # resumes; the extra files are not read
    for name in names:
        saved = (newest / name).read_bytes()
        (newest / name).write_bytes(evil)
        path, why = find(world, run)
        assert path == "step_00000001" and (name in why or name == "manifest.json"), name
        (newest / name).write_bytes(saved)
    (newest / "state.json").unlink()
    path, why = find(world, run)
    assert path == "step_00000001" and "state.json" in why
    (newest / "manifest.json").write_text('{"version": 1, "files": {"../../x": {}}}')
    assert find(world, run)[0] == "step_00000001"


@pytest.mark.dist
def test_pickles_in_a_checkpoint(tmp_path):
    """In place of every file, and beside them under the names torch would read. A file that is not
    what was saved, or is missing, is named, and the checkpoint before is used."""
    sentinel = tmp_path / "sentinel"
    run_ranks(spoiled_one_by_one, 1, run_recipe(tmp_path / "run", train={"num_steps": 2}),
              pickle.dumps(Evil(sentinel)))
    assert not sentinel.exists()


@pytest.mark.dist
def test_a_safetensors_file_of_other_shapes_is_an_error(tmp_path):
    run = run_recipe(tmp_path / "run", keep_last=1, train={"num_steps": 1})
    run_ranks(train_recorded, 1, run)
    newest = tmp_path / "run" / "checkpoints" / "step_00000001"
    (shard,) = newest.glob("*.safetensors")
    save_file({"x": torch.zeros(1)}, shard)
    with pytest.raises(RankFailure) as failure:
        run_ranks(train_recorded, 1, replace(run, train=replace(run.train, num_steps=2)))
    assert failure.value.errors[0][0] == CheckpointError.__name__
