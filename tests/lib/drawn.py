"""Tiny compositions whose weights are drawn, with a tokenizer of the tests."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch

from orchmllm.config.model import ModelConfig
from orchmllm.models.families import model_class, read_config
from orchmllm.models.hf import WholeModel
from orchmllm.sharding.hf import freeze
from orchmllm.tools.doctor.synthetic import MODEL

TOWERS = ((2, 16, 32, 2), (2, 16, 32, 2))  # layers, width, width of the MLP, heads
LLM = (2, 32, 48, 4)
LAYERS = {"text": "num_hidden_layers", "vision": "depth", "audio": "encoder_layers"}


def model_of(**changes: Mapping[str, Any] | int) -> ModelConfig:
    """The tiny model of the self-test with other values: text, vision, audio: keys of these parts
    of its config.json; num_layers: of each part. For examples that are made from their index, so
    there is no processor."""
    return ModelConfig(config=str(_folder(json.dumps(changes, sort_keys=True))))


@cache
def _folder(changes: str) -> Path:
    config = json.loads((Path(MODEL.config) / "config.json").read_text())
    given = json.loads(changes)
    layers = given.pop("num_layers", None)
    for part, values in given.items():
        config[f"{part}_config"] |= values
    for part, key in LAYERS.items() if layers else ():
        config[f"{part}_config"][key] = layers
    folder = Path(tempfile.mkdtemp(prefix="model_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_model(folder: Path, tokenizer: Path, max_side: int = 112) -> Path:
    """Writes a model with its processor to `folder`; returns it. tokenizer: a tokenizer.json."""
    from orchmllm.tools.compose.drawn import shapes, write_drawn

    write_drawn(shapes(LLM, *TOWERS, vocab_size=512, num_mels=8), tokenizer, folder, max_side)
    return folder


def build(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32) -> WholeModel:
    """A model with drawn weights, in train mode, in this process alone."""
    torch.manual_seed(0)
    config = read_config(Path(model.folder))
    whole = WholeModel(model_class(config)._from_config(config, dtype=dtype), dtype).train()
    freeze(whole, model)
    return whole
