"""A part's config.json against the recipe, and what this code cannot compute of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchmllm.config.checkpoint_shapes import KEYS, MODEL_TYPES, part_config
from orchmllm.config.model import ModelConfig
from orchmllm.hf.folder import Folder

# key of config.json -> the value that can be computed, which is transformers' default, too
FIXED: dict[str, dict[str, Any]] = {
    "vision": {},
    "audio": {"activation_function": "gelu", "scale_embedding": False},
    "llm": {"hidden_act": "silu", "use_sliding_window": False, "rope_type": "default"},
}
OTHER_MODELS = ("; other models train in a loop of your own or in a Trainer, with "
                'BalancedDataLoader or balance_trainer, and balance_encoders ("Which model, which '
                'way" in docs/loader.md)')


def mismatches(part: str, model: ModelConfig, folder: Folder) -> Iterator[str]:
    """Every way in which a folder's configuration is not the recipe's."""
    where = f"model.{part}"
    given = f"{where}.pretrained = {str(folder.path)!r}"
    model_type = folder.config.get("model_type")
    if model_type not in MODEL_TYPES[part]:
        yield (f"{given}: config.json has model_type {model_type!r}, expected "
               f"{' or '.join(map(repr, MODEL_TYPES[part]))}{OTHER_MODELS}")
        return
    config = part_config(folder.config)
    section = getattr(model, part)
    for ours, theirs in KEYS[part].items():
        want, value = getattr(section, ours), config.get(theirs)
        if value is None:
            yield f"{given}: config.json lacks {theirs}"
        elif value != want:
            yield f"{where}.{ours}: recipe {want}, checkpoint {value}"
    for key, needed in FIXED[part].items():
        value = config.get(key, needed)
        if value != needed:
            yield (f"{given}: config.json has {key} {value!r}; only {needed!r} can be computed"
                   f"{OTHER_MODELS}")
