"""What an export takes from elsewhere than the checkpoint, and what is said where that is not what
the checkpoint was trained with."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchmllm.data.tokenizer import ChatTokenizer
from orchmllm.hf import export
from tests.lib.hf_models import HF_MODEL, write_checkpoint
from tests.lib.tokenizers import write_tokenizer


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
