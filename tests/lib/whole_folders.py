"""Folders of tiny models of transformers with weights and processors, and rows for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from tests.lib import encoder_models
from tests.lib.processors import write_processor

# What the processors of tests.lib.processors cut images into.
_VISION = {"qwen2_vl": {"patch_size": 14}, "qwen2_5_vl": {"patch_size": 14, "window_size": 56},
           **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
                           {"patch_size": 16}),
           **dict.fromkeys(("glm4v", "glm4v_moe"), {"patch_size": 14, "image_size": 56}),
           "internvl": {"patch_size": [7, 7], "image_size": [28, 28]},
           "mistral3": {"patch_size": 7, "image_size": 112}}
_TOKENS = {"video_token_id": "<|video_pad|>", "vision_start_token_id": "<|vision_start|>",
           "vision_end_token_id": "<|vision_end|>", "image_start_token_id": "<|begin_of_image|>",
           "image_end_token_id": "<|end_of_image|>"}


def write_model(family: str, folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Writes model, processor and tokenizer; returns the model."""
    import transformers

    write_processor(family, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    image_token = transformers.AutoConfig.from_pretrained(folder).image_token_id
    tiny = encoder_models.FAMILIES[family].build()
    config = tiny.config
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    text.pad_token_id = text.bos_token_id = text.eos_token_id = None
    text.max_position_embeddings = 4096
    config.image_token_id = image_token
    for name in ("image_token_index", "video_token_index"):
        if hasattr(config, name):
            setattr(config, name, image_token if "image" in name else len(tokenizer))
    for name, token in _TOKENS.items():
        if hasattr(config, name):
            known = token in tokenizer.get_vocab()
            setattr(config, name, tokenizer.convert_tokens_to_ids(token) if known
                    else len(tokenizer))  # that of no token
    for name, value in _VISION.get(family, {"patch_size": 7, "image_size": 28}).items():
        setattr(config.vision_config, name, value)
    if hasattr(config, "image_grid_pinpoints"):
        config.image_grid_pinpoints = [[a * 28, b * 28] for a in range(1, 4) for b in range(1, 4)]
    torch.manual_seed(0)
    model = type(tiny)(config).to(dtype)
    model.save_pretrained(folder)
    return model


def write_rows(folder: Path, count: int = 24) -> Path:
    """data.jsonl with its images: none to three an example."""
    rng = np.random.default_rng(0)
    path = folder / "data.jsonl"
    with open(path, "w", encoding="utf-8") as file:
        for i in range(count):
            parts = []
            for k in range(int(rng.integers(0, 4)) if i % 4 else 0):
                size = (*rng.integers(20, 90, 2).tolist(), 3)
                Image.fromarray(rng.integers(0, 256, size, np.uint8)).save(folder / f"{i}_{k}.png")
                parts += [{"type": "image", "image": f"{i}_{k}.png"},
                          {"type": "text", "text": f" picture {k}"}]
            parts.append({"type": "text", "text": "What is " + "it? " * int(rng.integers(1, 9))})
            answer = "the red row " * int(rng.integers(1, 6))
            file.write(json.dumps({"messages": [
                {"role": "user", "content": parts}, {"role": "assistant", "content": answer}]})
                + "\n")
    return path
