"""Where the weights of a composed model are before it was trained: in the folders of its parts,
under the names that they have there."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

from safetensors import safe_open
from transformers import GenerationConfig
from transformers.utils import GENERATION_CONFIG_NAME

from orchmllm.composition.configuration import ComposedConfig
from orchmllm.hf.folder import PARTS, Stored, open_folder


def load_linked(folder: str | PathLike | None, options: dict[str, Any]) -> bool:
    """Whether the weights of a composed model's folder are in those of its parts. If so, `options`
    of from_pretrained get its configuration and tensors, which are read where they are asked
    for."""
    if folder is None or not (Path(folder) / PARTS).is_file():
        return False
    files: dict[Path, Any] = {}
    options["state_dict"] = {
        name: _slice(stored, files) for name, stored in open_folder(Path(folder)).items()}
    if not isinstance(options.get("config"), ComposedConfig):
        options["config"] = ComposedConfig.from_pretrained(folder)
    if (Path(folder) / GENERATION_CONFIG_NAME).is_file():
        options.setdefault("generation_config", GenerationConfig.from_pretrained(folder))
    return True


def _slice(stored: Stored, files: dict[Path, Any]) -> Any:
    if stored.file not in files:
        files[stored.file] = safe_open(stored.file, framework="pt")
    return files[stored.file].get_slice(stored.key)
