"""The JSON files of an exported part: what transformers' classes need beside the weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from orchmllm.config.checkpoint_shapes import KEYS, OURS
from orchmllm.config.model import AudioConfig, ModelConfig
from orchmllm.hf.folder import read_json

CLASSES = {"llm": "Qwen2ForCausalLM", "audio": "WhisperEncoder", "vision": ""}
WHISPER_POSITIONS = 1500  # 30 s
# Not computed here, so kept from the folder that training started from.
KEPT = {"llm": ("bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"),
        "audio": ("max_source_positions",)}


def part_json(part: str, model: ModelConfig, dtype: str) -> dict[str, dict]:
    """File name -> contents of a part. dtype: of its weights, as torch calls it."""
    if part == "vision":
        shapes = _shapes("vision", model.vision)
        return {"config.json": {"model_type": OURS, "dtype": dtype, **shapes}}
    kept, _ = started_from(part, model)
    if part == "audio":
        return {"config.json": _written(_whisper(model.audio, kept), CLASSES["audio"], dtype),
                "preprocessor_config.json": _mel_extractor(model.audio)}
    from orchmllm.models.llm import hf_config

    config = hf_config(model.llm)
    config.use_cache = True
    for key, value in kept.items():
        setattr(config, key, value)
    files = {"config.json": _written(config, CLASSES["llm"], dtype)
             | {"rope_theta": model.llm.rope_theta}}  # where transformers 4 looks for it
    start = Path(model.llm.pretrained).expanduser() / "generation_config.json"
    if model.llm.pretrained and start.is_file():
        files[start.name] = read_json(start)
    return files


def positions_of(model: ModelConfig) -> int:
    """Rows of Whisper's position table."""
    kept, _ = started_from("audio", model)
    return kept.get("max_source_positions", WHISPER_POSITIONS)


def started_from(part: str, model: ModelConfig) -> tuple[dict[str, Any], str]:
    """The keys KEPT of a part, from the folder that training started from, and what an export
    lacks if that folder is gone; empty where it is there, or training started from scratch."""
    start = getattr(model, part).pretrained if part in KEPT else ""
    if not start:
        return {}, ""
    path = Path(start).expanduser() / "config.json"
    try:
        config = read_json(path)
    except ValueError:
        also = ", and there is no generation_config.json" if part == "llm" else ""
        return {}, (
            f"{part}/config.json has defaults for {', '.join(KEPT[part])}{also}: {path} cannot "
            f"be read (model.{part}.pretrained; a relative path begins in the current folder); "
            "bring it back and export again")
    return {key: config[key] for key in KEPT[part] if config.get(key) is not None}, ""


def _written(config: Any, name: str, dtype: str) -> dict:
    """What save_pretrained would write of a configuration."""
    return json.loads(config.to_json_string()) | {"architectures": [name], "dtype": dtype}


def _shapes(part: str, section: Any) -> dict[str, Any]:
    """Keys of config.json, from a section of the recipe."""
    return {theirs: getattr(section, ours) for ours, theirs in KEYS[part].items()}


def _whisper(audio: AudioConfig, kept: dict[str, Any]) -> Any:
    from transformers import WhisperConfig

    return WhisperConfig(**_shapes("audio", audio),
                         **{"max_source_positions": WHISPER_POSITIONS, **kept})


def _mel_extractor(audio: AudioConfig) -> dict:
    from transformers import WhisperFeatureExtractor

    geometry = audio.geometry
    return json.loads(WhisperFeatureExtractor(
        feature_size=geometry.num_mels, sampling_rate=geometry.sample_rate,
        hop_length=geometry.hop_length).to_json_string())
