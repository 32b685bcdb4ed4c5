"""What an export takes from elsewhere than the checkpoint, and what is said where that is not what
the checkpoint was trained with."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import RunConfig, load_recipe, to_yaml
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.tokenizer import SAMPLE
from orchmllm.runtime.resumable import check_resumable
from orchmllm.tools.export import export
from tests.lib.hf_models import HF_MODEL, write_checkpoint, write_models
from tests.lib.ranks import run_ranks
from tests.lib.resume import settings
from tests.lib.synthetic import SyntheticDataset, recipe
from tests.lib.tokenizers import SPECIAL, write_tokenizer
from tests.lib.training import train


def warnings(checkpoint: Path, tokenizer: Path | None = None) -> list[str]:
    """Those of an export of ROOT/run/checkpoints/NAME to ROOT/out."""
    lines: list[str] = []
    export.export(checkpoint, checkpoint.parents[2] / "out", tokenizer=tokenizer, verify=False,
                  log=lines.append)
    return [x for x in lines if x.startswith("warning: ") and "AutoTokenizer gives" not in x]


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


def trained_with(tokenizer: Path, there: Path, root: Path) -> Path:
    """A checkpoint, at whose tokenizer's path there is another one by now perhaps."""
    checkpoint = root / "run" / "checkpoints" / "aside_step_00000001_save_1"
    write_checkpoint(checkpoint, HF_MODEL, 1, attempt={"settings": {
        "content.tokenizer": ChatTokenizer(tokenizer).digest,
        "data.tokenizer": str(there), "data.path": "x"}})
    return checkpoint


def test_a_tokenizer_that_changed_since_is_not_taken(tokenizers, tmp_path):
    a, b = tokenizers
    checkpoint = trained_with(a, b, tmp_path)
    assert warnings(checkpoint) == [
        f"warning: the export has no tokenizer: {b}, from where the run read it, is not the "
        "tokenizer that the checkpoint was trained with: name that with --tokenizer"]
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


LLAMA = ("{% for m in messages %}<|head|>{{ m.role }}<|/head|>{{ m.content | trim }}<|eot|>"
         "{% endfor %}")


@pytest.mark.parametrize("special, template, end", [
    (SPECIAL, "", "<|im_end|>"), (("<s>", "<|head|>", "<|/head|>", "<|eot|>"), LLAMA, "<|eot|>"),
    (("<s>",), "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "")])
def test_generation_stops_where_answers_ended_in_training(special, template, end, tmp_path):
    """Whatever the folder said that training started from."""
    (tmp_path / "tokenizer").mkdir()
    write_tokenizer(tmp_path / "tokenizer", special)
    if template:
        (tmp_path / "tokenizer" / "chat_template.jinja").write_text(template)
    model = write_models(tmp_path / "start")
    (tmp_path / "start/llm/generation_config.json").write_text('{"eos_token_id": 5, "top_k": 7}')
    checkpoint = tmp_path / "run" / "checkpoints" / "step_00000001"
    write_checkpoint(checkpoint, model, 1)
    told = warnings(checkpoint, tmp_path / "tokenizer")
    tokenizer = ChatTokenizer(tmp_path / "tokenizer").tokenizer
    ids = (tokenizer.token_to_id(end),) * 2 if end else (5, None)
    if special == SPECIAL:  # tokenizer_config.json is made for ChatML, with what pads there
        ids = ids[0], tokenizer.token_to_id("<|endoftext|>")
    llm = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "llm")
    for config in (llm.config, llm.generation_config):
        assert (config.eos_token_id, config.pad_token_id) == ids
    assert llm.generation_config.top_k == 7
    assert bool(told) == (not end) and all("ends answers with no special token" in x for x in told)


@pytest.mark.parametrize("same", [True, False])
def test_ids_of_autotokenizer_are_compared_with_those_of_training(same, tmp_path, tokenizers):
    """The tokenizer of Qwen2 itself is the one that AutoTokenizer makes of these files."""
    if same:
        from transformers import Qwen2TokenizerFast

        Qwen2TokenizerFast.from_pretrained(tokenizers[0]).save_pretrained(tokenizers[0])
    else:
        (tokenizers[0] / "tokenizer_config.json").write_text(
            '{"tokenizer_class": "Qwen2Tokenizer"}')
    lines: list[str] = []
    export.export(trained_with(tokenizers[0], tokenizers[0], tmp_path), tmp_path / "out",
                  verify=False, log=lines.append)
    told = [x for x in lines if "AutoTokenizer gives other ids than training" in x]
    assert len(told) == (not same)
    exported, kinds = tmp_path / "out" / "llm", (AutoTokenizer, PreTrainedTokenizerFast)
    auto, plain = (kind.from_pretrained(exported).encode(SAMPLE) for kind in kinds)
    assert plain == ChatTokenizer(tokenizers[0]).tokenizer.encode(SAMPLE).ids
    assert (auto == plain) == same
    assert same or "load the tokenizer from tokenizer/, where it gives the ids of tr" in told[0]
    alone = AutoTokenizer.from_pretrained(tmp_path / "out" / "tokenizer")
    assert alone.encode(SAMPLE) == plain


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
    assert json.loads((newest / "state.json").read_text())["model"] == json.loads(
        json.dumps(asdict(start)))


def test_shapes_of_a_folder_that_is_left_out_on_resume(tmp_path):
    write_models(tmp_path / "start")
    (tmp_path / "r.yaml").write_text(
        f"data: {{path: x}}\nmodel: {{llm: {{pretrained: {tmp_path}/start/llm}}}}\n")
    run, left = load_recipe(tmp_path / "r.yaml"), ["model.llm.pretrained="]
    with pytest.raises(ValueError, match="model.llm.vocab_size is .*, the checkpoint has 64;.*"
                       "recipe.yaml in run.dir has them all, also those that were read from a con"):
        check_resumable(settings(run), settings(load_recipe(tmp_path / "r.yaml", left)), 4)
    (tmp_path / "recipe.yaml").write_text(to_yaml(run))  # as a run writes it
    (tmp_path / "start").rename(tmp_path / "away")
    now = settings(load_recipe(tmp_path / "recipe.yaml", left))
    assert check_resumable(settings(run), now, 4) == {
        "model.llm.pretrained": [f"{tmp_path}/start/llm", ""]}
