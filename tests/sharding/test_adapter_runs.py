"""Runs with adapters: the same on any ranks, what they save, and what is exported."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.runtime.checkpoint import CheckpointError
from orchmllm.sharding.units import checkpoint_bytes
from orchmllm.tools.export.export import export
from orchmllm.trainer import Trainer
from tests.lib import whole_models as models
from tests.lib.adapters import ENDS, as_tensors, lora_model
from tests.lib.ranks import run_ranks
from tests.lib.training import listened
from tests.sharding.test_whole_models import losses, recipe, saved, trained

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.whole]


def learnt(world, run: Recipe, name: str) -> tuple[dict[str, np.ndarray], list[str], list[str]]:
    """Runs to the end: (all weights, those that learn, what the run said)."""
    said = listened()
    trainer = Trainer(run, world, dataset=models.WholeDataset(name, models.build(name), 24))
    try:
        trainer.run()
        found = dict(trainer.model.hf.named_parameters())
        return ({n: p.full_tensor().detach().numpy() for n, p in found.items()},
                [n for n, p in found.items() if p.requires_grad], said)
    finally:
        trainer.close()


@pytest.mark.parametrize("name", ["qwen3_vl", "internvl", "qwen2_5_omni"])
def test_a_run_is_the_same_balanced_unbalanced_and_resumed_on_other_ranks(name, tmp_path):
    saved(name, tmp_path / "model")
    run = recipe(tmp_path / "two", lora_model(tmp_path / "model", connector=True), 4)
    off = replace(run, run=replace(run.run, dir=str(tmp_path / "off")),
                  balance=replace(run.balance, enabled=False))
    start = replace(run, run=replace(run.run, dir=str(tmp_path / "one")),
                    train=replace(run.train, num_steps=2))
    rest = replace(start, train=run.train)
    balanced, by_stock = run_ranks(trained, 2, run, name)[0]
    unbalanced, _ = run_ranks(trained, 2, off, name)[0]
    resumed = [row for ranks, part in ((1, start), (3, rest))
               for row in run_ranks(trained, ranks, part, name)[0][0]]
    assert losses(balanced)[0, "loss"] == pytest.approx(by_stock, rel=models.EXACT)
    assert losses(balanced) == pytest.approx(losses(unbalanced), rel=models.EXACT)
    assert losses(balanced) == pytest.approx(losses(resumed), rel=models.EXACT)


def test_what_is_saved_and_exported(tmp_path):
    """The folder's weights stay bit for bit and are not saved; peft reads the export; what is
    merged is what peft merges; other weights beside the adapters are refused."""
    import peft
    from transformers import AutoModelForImageTextToText

    stock = saved("qwen3_vl", tmp_path / "model")
    run = recipe(tmp_path / "run", lora_model(tmp_path / "model", connector=True, alpha=6), 3)
    weights, names, said = run_ranks(learnt, 2, run, "qwen3_vl")[0]
    weights = as_tensors(weights)
    size = sum(weights[n].numel() for n in names)
    [line] = [text for text in said if "parameters learn" in text]
    assert line.startswith(f"{size:,} of {sum(p.numel() for p in weights.values()):,} parameters")
    before = dict(stock.named_parameters())
    kept = {n.replace("base_layer.", ""): p for n, p in weights.items() if n not in names}
    assert kept and all(torch.equal(p, before[n]) for n, p in kept.items())
    assert not any(torch.equal(weights[n], before[n]) for n in names if n in before)
    folder = tmp_path / "run/checkpoints/step_00000003"
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    stored = {key for tensors in files for key in tensors}
    assert stored == {f"{kind}.hf.{n}" for n in names for kind in (
        "model", "exp_avg", "exp_avg_sq")}
    assert sum(t.nbytes for tensors in files for t in tensors.values()) == 3 * 8 * size
    assert checkpoint_bytes(run) == 3 * 8 * size

    export(folder, tmp_path / "adapters")
    export(folder, tmp_path / "merged", merged=True)
    plain = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float64)
    read = peft.PeftModel.from_pretrained(plain, tmp_path / "adapters")
    assert read.peft_config["default"].base_model_name_or_path == str(tmp_path / "model")
    by_itself = peft.AutoPeftModel.from_pretrained(tmp_path / "adapters", dtype=torch.float64)
    assert type(by_itself.get_base_model()) is type(plain)
    active = {n.replace("modules_to_save.default.", "").removeprefix("base_model.model."): p
              for n, p in read.named_parameters() if n.endswith(ENDS) or "modules_to_save" in n}
    assert active.keys() == set(names)
    assert all(torch.equal(active[n].double(), weights[n]) for n in names)
    wanted = read.merge_and_unload().state_dict()
    merged = AutoModelForImageTextToText.from_pretrained(tmp_path / "merged", dtype="auto")
    assert merged.dtype == torch.float64 and merged.state_dict().keys() == wanted.keys()
    assert all((t - wanted[n]).abs().max() <= 1e-6 for n, t in merged.state_dict().items())

    with torch.no_grad():
        next(stock.parameters()).add_(1.0)
    stock.save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="are not those that the adapters were trained"):
        export(folder, tmp_path / "again", merged=True)
    more = replace(run, train=replace(run.train, num_steps=4))
    told = run_ranks(refused, 2, more, "qwen3_vl")[0]
    assert "model.weights is " in told and "the checkpoint has" in told


def test_a_merged_export_of_a_model_that_takes_clips(tmp_path):
    stock = saved("qwen2_audio", tmp_path / "model")
    run = recipe(tmp_path / "run", lora_model(tmp_path / "model"), 1)
    run_ranks(learnt, 1, run, "qwen2_audio")
    export(tmp_path / "run", tmp_path / "merged", merged=True)
    merged = models.stock_of(tmp_path / "merged").state_dict()
    before = stock.state_dict()
    changed = {n for n, t in merged.items() if not torch.equal(t, before[n])}
    assert merged.keys() == before.keys()
    assert {*models.named_parts(stock, changed)} == {"audio", "llm"}


def test_the_next_stage_of_adapters_is_that_of_the_same_weights(tmp_path):
    """It goes on with the adapters; other weights beside them, no adapters in either stage, are
    refused in one line."""
    stock = saved("qwen3_vl", tmp_path / "model")
    base = ModelConfig(pretrained=str(tmp_path / "model"))
    run = recipe(tmp_path / "first", lora_model(tmp_path / "model"), 1)
    weights, names, _ = run_ranks(learnt, 1, run, "qwen3_vl")[0]
    run_ranks(learnt, 1, replace(run, model=base, run=replace(run.run, dir=str(
        tmp_path / "full"))), "qwen3_vl")

    def next_of(first: str, model: ModelConfig) -> Recipe:
        return replace(run, model=model, train=replace(run.train, lr=1e-12), run=replace(
            run.run, dir=str(tmp_path / "next"), init_from=str(tmp_path / first)))

    for second, told in (
            (next_of("first", base), "has adapters alone, and this .* orchmllm export --merged"),
            (next_of("full", run.model), "has all weights, and this recipe trains adapters")):
        assert re.search(told, run_ranks(refused, 2, second, "qwen3_vl")[0])
    second = next_of("first", run.model)
    lora = replace(run.model.lora, alpha=run.model.lora.alpha + 1)
    assert re.search(f"have model.lora.alpha {lora.alpha - 1}, and here it is {lora.alpha}: use",
                     run_ranks(refused, 2, next_of("first", replace(run.model, lora=lora)),
                               "qwen3_vl")[0])
    after, *_ = run_ranks(learnt, 2, second, "qwen3_vl")[0]
    assert all(np.allclose(after[n], weights[n], rtol=0, atol=1e-9) for n in names)
    with torch.no_grad():
        next(stock.parameters()).add_(1.0)
    stock.save_pretrained(tmp_path / "model")
    second = replace(second, run=replace(second.run, dir=str(tmp_path / "other")))
    assert "has adapters of other weights" in run_ranks(refused, 2, second, "qwen3_vl")[0]


def refused(world, run: Recipe, name: str) -> str:
    with pytest.raises((ValueError, CheckpointError)) as found:
        learnt(world, run, name)
    return str(found.value)
