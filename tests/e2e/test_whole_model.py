"""A model of transformers that cannot be trained, through the commands. The whole way of one that
can: tests/e2e/test_composed.py."""

from __future__ import annotations

import copy

import pytest

from orchmllm.cli import dispatch
from orchmllm.models import families
from orchmllm.models.whole_model import meta_model
from tests.lib.whole_folders import write_model, write_rows


@pytest.mark.whole
def test_what_cannot_be_trained_is_one_line_before_any_rank_starts(tmp_path, capsys):
    """A model whose encoders are not understood, a small vocabulary, and weights that are gone."""
    import transformers

    from orchmllm.train import main

    made = write_model("internvl", tmp_path / "model")
    write_rows(tmp_path, 1)
    (tmp_path / "recipe.yaml").write_text(f"model: {{pretrained: {tmp_path}/model}}\n"
                                          f"data: {{path: {tmp_path}/data.jsonl}}\n")

    def told() -> str:
        code = main([str(tmp_path / "recipe.yaml"), "--validate", f"run.dir={tmp_path}/run"])
        out, err = capsys.readouterr()
        assert code == (2 if err else 0) and err.count("\n") <= 1, err
        return out + err

    capsys.readouterr()
    assert "no problems" in told()
    meta_model.cache_clear()
    transformers.MllamaConfig().save_pretrained(tmp_path / "model")
    assert "MllamaForConditionalGeneration: its forward takes no media" in told()
    meta_model.cache_clear()  # else it is that of the folder as it was
    config = copy.deepcopy(made.config)
    config.get_text_config().vocab_size = 64
    config.save_pretrained(tmp_path / "model")
    assert "vocab_size is 64, but the tokenizer has" in told()
    (tmp_path / "model" / "model.safetensors").unlink()
    assert "model.pretrained: neither model.safetensors nor" in told()


def test_another_version_of_transformers_is_refused_in_one_line(tmp_path, capsys, monkeypatch):
    """Whatever needs the model says so before anything of transformers is imported that other
    versions do not have."""
    monkeypatch.setattr(families, "BEFORE", families.FIRST)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl"}')
    (tmp_path / "recipe.yaml").write_text(f"model: {{pretrained: {tmp_path}}}\n"
                                          f"data: {{path: {tmp_path}/data.jsonl}}\n")
    for command in ("train", "dry-run", "data index", "data preview"):
        words = [*command.split(), str(tmp_path / "recipe.yaml"), f"run.dir={tmp_path}/run"]
        assert dispatch(words) == 2, command
        told = capsys.readouterr().err
        assert "is installed, but whole models were tried with >=5.22,<5.22: pip install" in told
        assert told.count("\n") == 1, command
