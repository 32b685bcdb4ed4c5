"""What an export takes from elsewhere than the checkpoint, and what is said where that is not what
the checkpoint was trained with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from orchmllm.config import RunConfig, load_recipe, to_yaml
from orchmllm.data.tokenizer import ChatTokenizer
from orchmllm.hf import export
from orchmllm.models.config import ModelConfig
from orchmllm.runtime.run_state import check_resumable, resume_keys
from tests.lib.hf_models import HF_MODEL, write_checkpoint, write_models
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.tokenizers import write_tokenizer
from tests.lib.training import train


def warnings(checkpoint: Path, tokenizer: Path | None = None) -> list[str]:
    """Those of an export of ROOT/run/checkpoints/NAME to ROOT/out."""
    lines: list[str] = []
    export.export(checkpoint, checkpoint.parents[2] / "out", tokenizer=tokenizer, verify=False,
                  say=lines.append)
    return [x for x in lines if x.startswith("warning: ")]


@pytest.fixture
def tokenizers(tmp_path) -> list[Path]:
    """Two of them: the second has another chat template."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_tokenizer(folder)
    (folders[1] / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}")
    return folders


def trained_with(tokenizer: Path, recipe_names: Path, root: Path) -> Path:
    """A checkpoint in root/run, whose recipe.yaml names another run's tokenizer perhaps."""
    checkpoint = root / "run" / "checkpoints" / "aside_step_00000001_save_1"
    write_checkpoint(checkpoint, HF_MODEL, 1, data={"tokenizer": ChatTokenizer(tokenizer).digest})
    (root / "run" / "recipe.yaml").write_text(f"data: {{path: x, tokenizer: {recipe_names}}}\n")
    return checkpoint


def test_the_tokenizer_of_a_later_run_is_not_taken(tokenizers, tmp_path):
    a, b = tokenizers
    checkpoint = trained_with(a, b, tmp_path)
    assert warnings(checkpoint) == [
        f"warning: llm/ has no tokenizer: {b}, which run.dir/recipe.yaml names, is "
        "not the tokenizer that the checkpoint was trained with; name it with --tokenizer"]
    assert not (tmp_path / "out" / "llm" / "tokenizer.json").exists()
    assert warnings(checkpoint, a) == []
    assert warnings(checkpoint, b) == [
        f"warning: --tokenizer {b} differs from the one that the checkpoint was trained with "
        "(tokenizer.json, chat template or special tokens): the same text may be other token ids"]
    assert (tmp_path / "out" / "llm" / "chat_template.jinja").is_file()  # as asked for


def test_the_tokenizer_of_the_run_is_taken(tokenizers, tmp_path):
    assert warnings(trained_with(tokenizers[1], tokenizers[1], tmp_path)) == []
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / "llm" / name).read_bytes() == (
            tokenizers[1] / name).read_bytes()


def test_what_the_start_had_and_an_export_lacks_is_named(tmp_path):
    start = write_models(tmp_path / "start")
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    write_checkpoint(checkpoint, start, 1)
    assert len(warnings(checkpoint)) == 1  # of the tokenizer
    (tmp_path / "start").rename(tmp_path / "away")
    audio, llm, _ = warnings(checkpoint)
    where = f"{tmp_path}/start/{{0}}/config.json cannot be read (model.{{0}}.pretrained; "
    assert audio.startswith("warning: audio/config.json has defaults for max_source_positions: "
                            + where.format("audio"))
    assert llm.startswith(
        "warning: llm/config.json has defaults for bos_token_id, eos_token_id, pad_token_id, "
        "max_position_embeddings, and there is no generation_config.json: " + where.format("llm"))


def resumed_without_the_folders(world, model: ModelConfig, folder: Path) -> None:
    data = SyntheticDataset(vision=model.vision.geometry, audio=model.audio.geometry)
    run = recipe(model=model, run=RunConfig(dir=str(folder)))
    run = replace(run, train=replace(run.train, num_steps=1))
    train(world, run, data)
    train(world, replace(run, model=HF_MODEL, train=replace(run.train, num_steps=2)), data)


@pytest.mark.dist
def test_a_checkpoint_names_the_start_after_a_resume_without_it(tmp_path):
    start = write_models(tmp_path / "start")
    run_ranks(resumed_without_the_folders, 1, start, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert json.loads((newest / "state.json").read_text())["model"] == asdict(start)


def test_shapes_of_a_folder_that_is_left_out_on_resume(tmp_path):
    write_models(tmp_path / "start")
    (tmp_path / "r.yaml").write_text(
        f"data: {{path: x}}\nmodel: {{llm: {{pretrained: {tmp_path}/start/llm}}}}\n")
    run = load_recipe(tmp_path / "r.yaml")
    state = {"version": 1, "data": {}, "global_batch_size": 4, **resume_keys(run)}
    with pytest.raises(ValueError, match="model.llm.vocab_size is .*, the checkpoint has 64: that "
                       "was read in .*/llm/config.json perhaps, .* start from recipe.yaml in run"):
        check_resumable(state, load_recipe(tmp_path / "r.yaml", ["model.llm.pretrained="]), {})
    (tmp_path / "recipe.yaml").write_text(to_yaml(run))  # as a run writes it
    (tmp_path / "start").rename(tmp_path / "away")
    check_resumable(state, load_recipe(tmp_path / "recipe.yaml", ["model.llm.pretrained="]), {})
