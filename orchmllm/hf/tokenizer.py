"""The tokenizer that the data was read with, as a folder that transformers' AutoTokenizer loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.folder import read_json

# ChatML as orchmllm.data.text.tokenizer writes it where a tokenizer brings no template of its own.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")

SAMPLE = "don't, 12345  \n\n caf\u00e9 e\u0301 \u00bd \u4e2d\u6587"


def copy_tokenizer(path: Path, folder: Path, *, plain: bool = False) -> list[str]:
    """Copies a tokenizer.json and what lies beside it; returns the names of the files. A
    configuration and ChatML's template are written where there are none. plain: AutoTokenizer is to
    read tokenizer.json as it is, in a folder without a config.json. Raises ValueError if `path` is
    no tokenizer.json nor a folder with one."""
    source = path / "tokenizer.json" if path.is_dir() else path
    if not source.is_file():
        raise ValueError(f"{source}: no such file: give --tokenizer a tokenizer.json or its folder")
    names = [name for name in COPIED if (source.parent / name).is_file()]
    for name in names:
        shutil.copyfile(source.parent / name, folder / name)
    if source.name not in names:
        shutil.copyfile(source, folder / "tokenizer.json")
        names.append("tokenizer.json")
    _complete_configuration(folder, plain)
    return sorted({*names, "tokenizer_config.json"})


def _complete_configuration(folder: Path, plain: bool) -> None:
    """Adds to tokenizer_config.json what it lacks: class, special tokens of ChatML, template.
    plain: the class is the one that has no rules of its own."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    tokens = {t["content"] for t in read_json(folder / "tokenizer.json").get("added_tokens", [])}
    if plain or not path.is_file():
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if not path.is_file():
        for key, token in (("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>")):
            config |= {key: token} if token in tokens else {}
    if not config.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        config["chat_template"] = CHATML
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")


def write_ends(path: Path, folder: Path) -> str:
    """Writes the id of the token that ends an answer, and of padding, into the config.json and
    generation_config.json of `folder`, which copy_tokenizer copied `path` to. Returns what differs
    from training; empty: nothing, where AutoTokenizer encodes SAMPLE with the folder."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    ours = ChatTokenizer(path)
    end = ours.end_id
    auto, plain = (k.from_pretrained(folder) for k in (AutoTokenizer, PreTrainedTokenizerFast))
    if end is None:
        return "eos_token_id is not written: the chat template ends answers with no special token"
    pad = ours.tokenizer.token_to_id(plain.pad_token or "")
    for file in (folder / "config.json", folder / "generation_config.json"):
        kept = read_json(file) if file.is_file() else {}
        kept |= {"eos_token_id": end, "pad_token_id": end if pad is None else pad}
        file.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    want, got = (t.encode(SAMPLE, add_special_tokens=False) for t in (ours.tokenizer, auto))
    if got == want.ids:
        return ""
    return (f"AutoTokenizer gives other ids than training (for {SAMPLE!r}), because it applies the "
            f"rules of {type(auto).__name__} instead of those in tokenizer.json: load the "
            "tokenizer from tokenizer/, where it gives the ids of training")
