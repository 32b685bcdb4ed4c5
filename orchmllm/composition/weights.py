"""Where the weights of a composed model are before it was trained: in the folders of its parts,
under the names that they have there."""

from __future__ import annotations

from functools import cache, partial
from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from orchmllm.composition.configuration import ComposedConfig
from orchmllm.hf.folder import links_of, open_folder


def load_linked(folder: str | PathLike | None, options: dict[str, Any]) -> bool:
    """Whether the weights of a composed model's folder are in those of its parts. If so, `options`
    of from_pretrained get its configuration and tensors, which are read where they are asked
    for."""
    if folder is None or not links_of(Path(folder)):
        return False
    opened = cache(partial(safe_open, framework="pt"))
    options["state_dict"] = {name: opened(stored.file).get_slice(stored.key)
                             for name, stored in open_folder(Path(folder)).items()}
    if not isinstance(options.get("config"), ComposedConfig):
        options["config"] = ComposedConfig.from_pretrained(folder)
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        options.setdefault("generation_config", GenerationConfig.from_pretrained(folder))
    return True
