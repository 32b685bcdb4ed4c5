"""Folders of tiny models of transformers with weights and processors, and rows for them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import soundfile
import torch
from PIL import Image
from torch import nn

from tests.lib import encoder_models
from tests.lib.processors import write_processor

# What the processors of tests.lib.processors cut images into.
_VISION = {"qwen2_5_omni": {"patch_size": 14, "window_size": 56},
           "qwen2_vl": {"patch_size": 14}, "qwen2_5_vl": {"patch_size": 14, "window_size": 56},
           **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
                           {"patch_size": 16}),
           **dict.fromkeys(("glm4v", "glm4v_moe"), {"patch_size": 14, "image_size": 56}),
           "internvl": {"patch_size": [7, 7], "image_size": [28, 28]},
           "mistral3": {"patch_size": 7, "image_size": 112}}
_TOKENS = {"video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
           "vision_end_token_id": "<|vision_end|>", "image_start_token_id": "<|begin_of_image|>",
           "image_end_token_id": "<|end_of_image|>"}
_OMNI = {"vision_start_token_id": "<|vision_bos|>", "vision_end_token_id": "<|vision_eos|>",
         "audio_start_token_id": "<|audio_bos|>", "audio_end_token_id": "<|audio_eos|>"}


def write_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Writes model, processor and tokenizer; returns the model."""
    import transformers

    write_processor(family, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    written = transformers.AutoConfig.from_pretrained(folder)
    tiny = encoder_models.FAMILIES[family].build()
    config = tiny.config
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    text.max_position_embeddings = 4096
    for kind in ("image", "audio"):
        token = getattr(written, f"{kind}_token_id", None)
        for name in (f"{kind}_token_id", f"{kind}_token_index"):
            if hasattr(config, name):
                setattr(config, name, token)
    if hasattr(config, "video_token_index"):
        config.video_token_index = len(tokenizer)
    for name, token in (_TOKENS | (_OMNI if "omni" in family else {})).items():
        if hasattr(config, name):
            known = token in tokenizer.get_vocab()
            setattr(config, name, tokenizer.convert_tokens_to_ids(token) if known
                    else len(tokenizer))  # that of no token
    if hasattr(config, "vision_config"):
        for name, value in _VISION.get(family, {"patch_size": 7, "image_size": 28}).items():
            setattr(config.vision_config, name, value)
    if hasattr(config, "audio_config"):
        config.audio_config.max_source_positions = 50  # of a second
    if hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = [[a * 28, b * 28] for a in range(1, 4) for b in range(1, 4)]
    torch.manual_seed(0)
    model = type(tiny)(config).to(dtype)
    model.save_pretrained(folder)
    return model


def write_medium(kind: str, folder: Path, name: str, rng: np.random.Generator,
                 longest: float = 1.0) -> dict[str, str]:
    """An image, or a clip of up to so many seconds, as a part of a conversation."""
    name += ".png" if kind == "image" else ".wav"
    if kind == "image":
        write_image(folder / name, rng)
    else:
        write_clip(folder / name, rng.uniform(0.1, longest), rng)
    return {"type": kind, kind: name}


def write_counted(folder: Path, counts: Sequence[int], kinds: Sequence[str] = ("image",), *,
                  longest: float = 1.0, named: bool = True, long_texts: Sequence[int] = ()) -> None:
    """data.jsonl with so many media in each example, of these kinds in turn. longest: see
    write_medium; named: a text follows each medium; long_texts: examples with a long text before
    and in the answer."""
    rng = np.random.default_rng(0)
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for i, count in enumerate(counts):
            parts = []
            for k in range(count):
                parts += [write_medium(kinds[k % len(kinds)], folder, f"{i}_{k}", rng, longest),
                          *[{"type": "text", "text": f" picture {k}"}] * named]
            long_text = "so " * 100 * (i in long_texts)
            parts += [{"type": "text", "text": long_text}] * (i in long_texts)
            file.write(asked(parts, rng, long_text))


def write_image(path: Path, rng: np.random.Generator) -> None:
    """Noise of 20 to 89 pixels a side."""
    size = (*rng.integers(20, 90, 2).tolist(), 3)
    Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(path)


def write_rows(folder: Path, count: int = 24, family: str = "") -> Path:
    """data.jsonl with its images, or with what the family takes: none to three media an example, at
    most one clip that audioflamingo3 takes."""
    rng = np.random.default_rng(0)
    path = folder / "data.jsonl"
    kinds = [kind for kind in encoder_models.FAMILIES[family].make if kind != "video"] if (
        family) else ["image"]
    most = 1 if family == "audioflamingo3" else 3
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            parts = []
            for k in range(min(most, int(rng.integers(0, 4))) if i % 4 else 0):
                kind = kinds[k % len(kinds)]
                name = f"{i}_{k}.{'png' if kind == 'image' else 'wav'}"
                if kind == "image":
                    write_image(folder / name, rng)
                else:
                    seconds = rng.uniform(0.1, 3.0 if most == 1 else 1.0)
                    write_clip(folder / name, seconds, rng, rate=int(rng.choice([16000, 22050])))
                parts += [{"type": kind, kind: name}, {"type": "text", "text": f" picture {k}"}]
            file.write(asked(parts, rng))
    return path


def asked(parts: list[dict], rng: np.random.Generator, ends: str = "") -> str:
    """A line of data.jsonl: media with a question and its answer, both of any length. ends: how
    the answer does."""
    question = {"type": "text", "text": "What is " + "it? " * int(rng.integers(1, 9))}
    return json.dumps({"messages": [
        {"role": "user", "content": [*parts, question]},
        {"role": "assistant", "content": "the red row " * int(rng.integers(1, 6)) + ends}]}) + "\n"


def write_clip(path: Path, seconds: float, rng: np.random.Generator, rate: int = 16000) -> None:
    """Noise."""
    samples = rng.standard_normal(int(seconds * rate)) / 4
    soundfile.write(path, samples.astype(np.float32), rate, "FLOAT")
