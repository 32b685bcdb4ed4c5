"""A whole model of transformers without weights, and rows for it, which steps.py trains by
recipes/qwen3_vl_8b.yaml: the widths of Qwen3-VL-8B with few layers; pictures and texts.

`write` makes FOLDER/model (configuration, processor and a tokenizer of bytes) and
FOLDER/rows.jsonl with its pictures.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.gpu.setup import ROOT
from tests.lib.processors import write_processor

ROWS = 768
TINY = {"text_config": {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
                        "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512},
        "vision_config": {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
                          "out_hidden_size": 64}}


def write_model(folder: Path, tiny: bool) -> None:
    """4 layers of the text model and 6 blocks of the tower, whose features go to three layers."""
    published = ROOT / "recipes" / "configs" / "qwen3_vl_8b"
    write_processor("qwen3_vl", folder)
    made = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = json.loads((published / "config.json").read_text(encoding="utf-8"))
    config["text_config"]["num_hidden_layers"] = 4
    config["vision_config"] |= {"depth": 6, "deepstack_visual_indexes": [1, 3, 5]}
    for part, keys in TINY.items() if tiny else ():
        config[part] |= keys
    if tiny:
        config["text_config"]["rope_scaling"]["mrope_section"] = [3, 3, 2]
    config |= {key: value for key, value in made.items() if key.endswith("_token_id")}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "processor_config.json").unlink(missing_ok=True)  # the sizes of tests
    shutil.copy(published / "preprocessor_config.json", folder)


def write_rows(folder: Path, tiny: bool) -> None:
    """None to two pictures a row, with 30 to 1,500 characters of an answer."""
    rng, largest = np.random.default_rng(0), 96 if tiny else 1024
    with (folder / "rows.jsonl").open("w", encoding="utf-8") as file:
        for i in range(ROWS):
            names = [f"{i}_{k}.jpg" for k in range(int(rng.integers(0, 3)))]
            for name in names:
                size = rng.integers(largest // 4, largest, 2).tolist()
                noise = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
                noise.resize(size, Image.Resampling.BICUBIC).save(folder / name)
            asked = [{"type": "image", "image": name} for name in names]
            answer = "the red row " * int(rng.integers(3, 12 if tiny else 120))
            file.write(json.dumps({"messages": [
                {"role": "user", "content": [*asked, {"type": "text", "text": "What is it?"}]},
                {"role": "assistant", "content": answer}]}) + "\n")


def write(folder: Path, tiny: bool) -> None:
    (folder / "model").mkdir(parents=True, exist_ok=True)
    write_model(folder / "model", tiny)
    write_rows(folder, tiny)
