"""A part's config.json against the recipe, and what this code cannot compute of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from orchmllm.config.checkpoint_shapes import KEYS, MODEL_TYPES, part_config
from orchmllm.config.model import CLIP_MEAN, CLIP_STD, ModelConfig
from orchmllm.hf.folder import Folder, read_json

# key of config.json -> the value that can be computed, which is transformers' default, too
FIXED: dict[str, dict[str, Any]] = {
    "vit": {},
    "qwen2_vl": {"hidden_act": "quick_gelu", "in_channels": 3, "temporal_patch_size": 2,
                 "rope_theta": 10_000.0},
    "audio": {"activation_function": "gelu", "scale_embedding": False},
    "llm": {"hidden_act": "silu", "use_sliding_window": False, "rope_type": "default"},
}
OTHER_MODELS = ("; other models train in a loop of your own or in a Trainer, with "
                'BalancedDataLoader or balance_trainer, and balance_encoders ("Which model, which '
                'way" in docs/loader.md)')


def mismatches(part: str, model: ModelConfig, folder: Folder) -> Iterator[str]:
    """Every way in which a folder's configuration is not the recipe's."""
    kind, where = model.vision.family if part == "vision" else part, f"model.{part}"
    given = f"{where}.pretrained = {str(folder.path)!r}"
    model_type = folder.config.get("model_type")
    if model_type not in MODEL_TYPES[kind]:
        cure = "".join(f": set model.vision.family={family}" for family in ("vit", "qwen2_vl")
                       if part == "vision" and model_type in MODEL_TYPES[family])
        yield (f"{given}: config.json has model_type {model_type!r}, expected "
               f"{' or '.join(map(repr, MODEL_TYPES[kind]))}{cure or OTHER_MODELS}")
        return
    config = part_config(kind, folder.config)
    section = getattr(model, part)
    for ours, theirs in KEYS[kind].items():
        want, value = getattr(section, ours), config.get(theirs)
        if value is None:
            yield f"{given}: config.json lacks {theirs}"
        elif value != want:
            yield f"{where}.{ours}: recipe {want}, checkpoint {value}"
    for key, needed in FIXED[kind].items():
        value = config.get(key, needed)
        if value != needed:
            yield (f"{given}: config.json has {key} {value!r}; only {needed!r} can be computed"
                   f"{OTHER_MODELS}")
    if kind == "qwen2_vl":
        yield from _normalisation(given, folder)


def _normalisation(given: str, folder: Folder) -> Iterator[str]:
    """Pixels have to be normalised as in training: CLIP's mean and deviation."""
    if not (folder.path / "preprocessor_config.json").is_file():
        return
    processor = read_json(folder.path / "preprocessor_config.json")
    for key, known in (("image_mean", CLIP_MEAN), ("image_std", CLIP_STD)):
        values = processor.get(key)
        if values is not None and any(abs(a - b) > 1e-4 for a, b in
                                      zip(values, known, strict=True)):
            yield (f"{given}: preprocessor_config.json has {key} {values}; only CLIP's "
                   f"{list(known)} can be computed")
