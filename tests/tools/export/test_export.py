"""From drawn weights over two sharded steps to a folder of transformers: every tensor is the
trained one, and transformers' own models load it."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

from orchmllm.config.recipe import CheckpointConfig, FsdpConfig, Recipe, RunConfig
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.tensors import read_sharded, renamed
from orchmllm.tools.export import export
from orchmllm.tools.export.command import main
from orchmllm.trainer import Trainer
from tests.lib.drawn import with_processor
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import MODEL, SyntheticDataset, recipe

pytestmark = pytest.mark.dist


def trained_parameters(world, run: Recipe) -> list[dict[str, np.ndarray]] | None:
    """Runs the recipe on synthetic examples; returns the gathered parameters before and after on
    rank 0."""
    trainer, found = Trainer(run, world, dataset=SyntheticDataset()), []

    def gather() -> None:
        found.append({n.removeprefix("hf."): p.detach().full_tensor().numpy().copy()
                      for n, p in trainer.model.named_parameters()})

    try:
        gather()
        trainer.run()
        gather()
    finally:
        trainer.close()
    return found if world.rank == 0 else None


class Trip:
    """root/model: the folder that training on 4 ranks starts from; before, after: gathered
    parameters; out: the export."""

    def __init__(self, root: Path) -> None:
        self.start, self.out = root / "model", root / "exported"
        shutil.copytree(with_processor(), self.start)
        shutil.copy(Path(MODEL.folder) / "config.json", self.start)  # of the synthetic examples
        base = recipe(
            model=replace(MODEL, config=str(self.start)), run=RunConfig(dir=str(root / "run")),
            fsdp=FsdpConfig(activation_checkpointing="selective"),
            checkpoint=CheckpointConfig())
        run = replace(base, train=replace(base.train, num_steps=2, warmup_steps=0, lr=1e-2))
        self.before, self.after = run_ranks(trained_parameters, 4, run)[0]
        self.checkpoint = root / "run" / "checkpoints" / "step_00000002"
        self.lines: list[str] = []
        self.note = export.export(self.checkpoint, self.out, log=self.lines.append,
                                  max_file_bytes=20_000)


@pytest.fixture(scope="module")
def trip(tmp_path_factory) -> Trip:
    return Trip(tmp_path_factory.mktemp("trip"))


def test_every_tensor_is_the_trained_one(trip):
    found = dict(AutoModelForMultimodalLM.from_pretrained(trip.out).named_parameters())
    assert found.keys() == trip.after.keys()
    for name, value in found.items():
        assert torch.equal(value, torch.from_numpy(trip.after[name])), name
        moved = np.abs(trip.after[name] - trip.before[name]).max()
        is_fixed = name.endswith("embed_positions.weight")  # Whisper's table
        assert (moved > 0) != is_fixed and moved < 0.1, name
    assert len(list((trip.out / "llm").glob("model-*-of-*.safetensors"))) > 1
    assert not [p for p in trip.out.rglob("*") if p.suffix in (".bin", ".pt", ".pkl")]


@torch.no_grad()
def test_the_llm_computes_the_same_alone(trip):
    ids = torch.randint(0, 64, (1, 23), generator=torch.Generator().manual_seed(1))
    whole = AutoModelForMultimodalLM.from_pretrained(trip.out)
    alone = AutoModelForCausalLM.from_pretrained(trip.out / "llm")
    assert torch.equal(alone(ids).logits, whole(input_ids=ids).logits)


def test_values_that_a_dtype_does_not_have_are_refused(tmp_path):
    save_file({"w": torch.tensor([1.0, 70_000.0])}, tmp_path / "w.safetensors")
    tensor = read_sharded(tmp_path)["w"]
    assert renamed(tensor, "w", (2,), "BF16").load().dtype == torch.bfloat16
    with pytest.raises(ValueError, match="w has values that float16 does not have: export bf"):
        renamed(tensor, "w", (2,), "F16").load()


def test_the_note_and_the_lines(trip):
    note = json.loads((trip.out / "orchmllm.json").read_text())
    assert note["step"] == 2 and note["model"]["config"] == str(trip.start)
    assert note["parts"]["model"]["tensors"] == len(trip.after)
    assert trip.lines[0].endswith("every file is what was saved (SHA-256)")
    assert trip.lines[-1] == f"written: {trip.out}"
    assert not [line for line in trip.lines if line.startswith("warning")]


def run(capsys, *argv: object) -> tuple[int, str, str]:
    code = main([str(a) for a in argv])
    return code, *capsys.readouterr()


def test_the_command_line(trip, tmp_path, capsys):
    """bfloat16; an export is replaced only on demand, anything else never."""
    argv = [trip.checkpoint, "--out", tmp_path / "a", "--dtype", "bfloat16"]
    assert run(capsys, *argv)[0] == 0
    got = load_file(tmp_path / "a" / "llm" / "model.safetensors")["lm_head.weight"]
    want = torch.from_numpy(trip.after["lm_head.weight"])
    assert got.dtype == torch.bfloat16 and torch.equal(got, want.bfloat16())
    code, _, error = run(capsys, *argv)
    assert code == 2 and error == (f"error: --out {tmp_path / 'a'} is an export already: add "
                                   "--overwrite to replace it\n")
    assert run(capsys, *argv, "--overwrite")[0] == 0
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    argv[2] = tmp_path / "mine"
    code, _, error = run(capsys, *argv, "--overwrite")
    assert code == 2 and "exists and is no export: give another folder" in error
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    argv[2] = trip.checkpoint / "exported"
    code, _, error = run(capsys, *argv)
    assert code == 2 and "lies among the checkpoints of a run" in error


def test_a_tokenizer_that_changed_since_is_warned_of(trip, tmp_path, capsys):
    changed = tmp_path / "step_00000002"
    shutil.copytree(trip.checkpoint, changed)
    state = json.loads((changed / "state.json").read_text())
    argv = changed, "--no-verify", "--overwrite", "--out", tmp_path / "out"
    for digest, is_warned in ((ChatTokenizer(trip.start).digest, False), ("another", True)):
        state["attempt"]["settings"]["content.tokenizer"] = digest
        (changed / "state.json").write_text(json.dumps(state))
        code, said, _ = run(capsys, *argv)
        assert code == 0 and ("warning: the tokenizer of" in said) == is_warned


def test_what_is_said_about_checkpoints_that_cannot_be_exported(trip, tmp_path, capsys):
    out = tmp_path / "out"

    def said(checkpoint: Path, *argv: str) -> str:
        code, _, error = run(capsys, checkpoint, "--out", out, *argv)
        assert code == 2 and not out.exists() and not (tmp_path / ".staged_out").exists()
        return error

    assert "or a folder run.dir/checkpoints/step_..." in said(trip.checkpoint.parent)
    broken = tmp_path / "step_00000002"
    shutil.copytree(trip.checkpoint, broken)
    shard = next(broken.glob("shard-00002*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert f"{shard.name} is not what was saved (size or SHA-256 differs): export" in said(broken)
    shard.unlink()
    assert "the checkpoint is not complete" in said(broken, "--no-verify")
    state = json.loads((broken / "state.json").read_text())
    del state["model"]
    (broken / "state.json").write_text(json.dumps(state))
    assert "is not that of a checkpoint of a run, or of a newer version" in said(
        broken, "--no-verify")
