"""The tokenizer that the data was read with, as a folder that transformers' AutoTokenizer loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from orchmllm.hf.folder import read_json

# ChatML as orchmllm.data.tokenizer writes it where a tokenizer brings no template of its own.
CHATML = (
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\n"
    "You are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
          "added_tokens.json", "vocab.json", "merges.txt", "chat_template.jinja")


def copy_tokenizer(path: Path, folder: Path) -> list[str]:
    """Copies a tokenizer.json and what lies beside it; returns the names of the files. A
    configuration and ChatML's template are written where there are none. Raises ValueError if
    `path` is no tokenizer.json nor a folder with one."""
    source = path / "tokenizer.json" if path.is_dir() else path
    if not source.is_file():
        raise ValueError(f"{source}: no such file: give --tokenizer a tokenizer.json or its folder")
    names = [name for name in COPIED if (source.parent / name).is_file()]
    for name in names:
        shutil.copyfile(source.parent / name, folder / name)
    if source.name not in names:
        shutil.copyfile(source, folder / "tokenizer.json")
        names.append("tokenizer.json")
    _complete_configuration(folder)
    return sorted({*names, "tokenizer_config.json"})


def _complete_configuration(folder: Path) -> None:
    """Adds to tokenizer_config.json what it lacks: class, special tokens of ChatML, template."""
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.is_file() else {}
    tokens = {t["content"] for t in read_json(folder / "tokenizer.json").get("added_tokens", [])}
    if not path.is_file():
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
        for key, token in (("eos_token", "<|im_end|>"), ("pad_token", "<|endoftext|>")):
            config |= {key: token} if token in tokens else {}
    if not config.get("chat_template") and not (folder / "chat_template.jinja").is_file():
        config["chat_template"] = CHATML
    path.write_text(json.dumps(config, indent=1), encoding="utf-8")
