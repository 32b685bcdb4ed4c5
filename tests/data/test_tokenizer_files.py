"""What lies beside a tokenizer.json is read as transformers reads it, or it is refused."""

from __future__ import annotations

import json

import pytest

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.text.tokenizer import ChatTokenizer
from tests.lib.tokenizers import SPECIAL, write_tokenizer

TALK = [Turn("user", ("What is drawn?",), False), Turn("assistant", ("a red square",), True)]
MESSAGES = [{"role": turn.role, "content": turn.parts[0]} for turn in TALK]
ENDED = ("{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}"
         "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}")
GENERATION = ("{% for m in messages %}<|im_start|>{% if m.role == 'assistant' %}@generation@"
              "{{ m.content }}@endgeneration@{% else %}{{ m.content }}{% endif %}<|im_end|>"
              "{% endfor %}")
MAP = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}
KNOWN = {"9": {"content": "<c>", "special": True}}


def write(folder, template: str, **files) -> None:
    """files: what tokenizer_config, special_tokens_map hold."""
    write_tokenizer(folder, (*SPECIAL, "<s>", "</s>", "<c>"))
    (folder / "chat_template.jinja").write_text(template)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("config, beside, ends", [
    ({}, MAP, "</s>"), ({"eos_token": "<c>"}, MAP, "</s>"), ({"eos_token": None}, MAP, "</s>"),
    ({**MAP, "eos_token": "<c>"}, {}, "<c>"),
    ({**MAP, "eos_token": "<c>", "added_tokens_decoder": KNOWN}, MAP, "<c>"),
    ({**MAP, "eos_token": None}, {}, "")])
def test_special_tokens_are_those_of_transformers(tmp_path, config, beside, ends):
    from transformers import AutoTokenizer

    write(tmp_path, ENDED, special_tokens_map=beside, tokenizer_config={
        "tokenizer_class": "PreTrainedTokenizerFast", **config})
    ours = ChatTokenizer(tmp_path)
    token_ids, mask = ours.tokenize(TALK)
    expected = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(MESSAGES, tokenize=False)
    assert ours.decode(token_ids) == expected and expected.startswith("<s>user")
    assert ours.decode(token_ids[mask]) == f" a red square{ends}"  # a token with its space


@pytest.mark.parametrize("config, missing", [
    ({}, "bos_token"), ({"bos_token": "<s>"}, "eos_token")])
def test_a_token_that_no_file_names_is_refused(tmp_path, config, missing):
    """It was rendered as nothing: answers did not learn to end."""
    write(tmp_path, ENDED, tokenizer_config=config)
    with pytest.raises(ValueError, match=f"template writes {missing}, which neither .*copy them"):
        ChatTokenizer(tmp_path)
    write(tmp_path, "{% set bos_token, eos_token = '<s>', '</s>' %}" + ENDED)
    token_ids, mask = ChatTokenizer(tmp_path).tokenize(TALK)
    assert ChatTokenizer(tmp_path).decode(token_ids[mask]) == " a red square</s>"


def test_a_file_that_is_not_json_is_named(tmp_path):
    write(tmp_path, ENDED)
    (tmp_path / "special_tokens_map.json").write_text("{")
    with pytest.raises(ValueError, match=r"special_tokens_map\.json: not JSON"):
        ChatTokenizer(tmp_path)


@pytest.mark.parametrize("tag", ["{%% %s %%}", "{%%- %s -%%}", "{%%+ %s +%%}", "{%%%s%%}"])
def test_generation_tags_of_every_kind(tmp_path, tag):
    """Marks stayed in the text around a tag with a plus."""
    template = GENERATION
    for word in ("generation", "endgeneration"):
        template = template.replace(f"@{word}@", tag % word)
    write(tmp_path, template)
    tokenizer = ChatTokenizer(tmp_path)
    token_ids, mask = tokenizer.tokenize(TALK)
    assert tokenizer.decode(token_ids) == (
        "<|im_start|>What is drawn?<|im_end|><|im_start|>a red square<|im_end|>")
    assert tokenizer.decode(token_ids[mask]) == "a red square"
    assert tokenizer.decode([tokenizer.vocab_size]) == ""  # of a padded embedding


def test_ids_with_gaps_are_refused(tmp_path):
    """A token that is added in memory would get the id of another."""
    content = json.loads(write_tokenizer(tmp_path).read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary[max(vocabulary, key=vocabulary.get)] += 100
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="its token ids have gaps"):
        ChatTokenizer(tmp_path)


def test_the_digest_changes_with_the_ids_and_not_with_how_the_files_are_written(tmp_path):
    write(tmp_path, ENDED, tokenizer_config=MAP)
    first, path = ChatTokenizer(tmp_path), tmp_path / "tokenizer.json"
    assert first.template == (ENDED, {"bos_token": "<s>", "eos_token": "</s>"})
    content = json.loads(path.read_text())
    path.write_text(json.dumps(content, indent=3, sort_keys=True))
    assert ChatTokenizer(tmp_path).digest == first.digest
    (tmp_path / "chat_template.jinja").write_text(ENDED + " ")
    assert ChatTokenizer(tmp_path).digest != first.digest
    (tmp_path / "chat_template.jinja").write_text(ENDED)
    vocab = content["model"]["vocab"]
    last, before = sorted(vocab, key=vocab.get)[-2:]
    vocab[last], vocab[before] = vocab[before], vocab[last]
    path.write_text(json.dumps(content))
    assert ChatTokenizer(tmp_path).digest != first.digest
