"""The shapes of a part in the config.json of a checkpoint: one table of keys."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS = "orchmllm_vit"  # model_type of an exported vision encoder
MODEL_TYPES = {
    "vision": (OURS,),
    "audio": ("whisper",),
    "llm": ("qwen2",),
}
# recipe key -> key of config.json
KEYS = {
    "vision": {key: key for key in ("num_layers", "hidden_size", "intermediate_size", "num_heads",
                                    "patch_size", "merge_size")},
    "audio": {"num_layers": "encoder_layers", "hidden_size": "d_model",
              "intermediate_size": "encoder_ffn_dim", "num_heads": "encoder_attention_heads",
              "num_mels": "num_mel_bins"},
    "llm": {"vocab_size": "vocab_size", "num_layers": "num_hidden_layers",
            "hidden_size": "hidden_size", "intermediate_size": "intermediate_size",
            "num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads",
            "rope_theta": "rope_theta", "rms_norm_eps": "rms_norm_eps"},
}
# Of these the defaults are those of Qwen2, and a plan does not depend on them.
NOT_NEEDED = {"rope_theta", "rms_norm_eps"}


def shapes_of(part: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the config.json of model.PART.pretrained says of keys that are not among those `given`
    in the recipe. Raises ValueError naming the keys where there is no such
    file; one that is of no use is left to the check before a run."""
    path = Path(given["pretrained"]).expanduser() / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        missing = sorted(KEYS[part].keys() - given.keys() - NOT_NEEDED)
        if not missing:
            return {}
        raise ValueError(f"{path}: {error.strerror or error}; give a local copy of the model (its "
                         f"config.json is enough to plan), or write {', '.join(missing)} in the "
                         "recipe") from error
    except ValueError:
        return {}
    if not isinstance(config, dict) or config.get("model_type") not in MODEL_TYPES[part]:
        return {}
    keys = part_config(config)
    return {ours: keys[theirs] for ours, theirs in KEYS[part].items()
            if keys.get(theirs) is not None and ours not in given}


def part_config(config: dict) -> dict:
    """The part's own keys of a config.json, as a flat dictionary; spellings of older versions of
    transformers are those of newer ones."""
    flat = dict(config)
    rope = {**(flat.get("rope_scaling") or {}), **(flat.get("rope_parameters") or {})}
    if "rope_theta" in rope:
        flat["rope_theta"] = rope["rope_theta"]
    flat["rope_type"] = rope.get("rope_type", rope.get("type", "default"))
    return flat
