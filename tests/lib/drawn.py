"""Tiny compositions whose weights are drawn, with a tokenizer of the tests."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchmllm.config.model import ModelConfig
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import WholeModel
from orchmllm.sharding.load_whole import freeze
from orchmllm.tools.doctor.synthetic import MODEL
from tests.lib.tokenizers import write_tokenizer

if TYPE_CHECKING:
    from orchmllm.data.processed import ProcessedReader

TOWER, LLM = (16, 32, 2), (32, 48, 4)  # width, width of the MLP, heads
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
    folder = _made()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@cache
def shortened(model: ModelConfig, num_layers: int) -> ModelConfig:
    """A model with at most so many layers in each part; it has no tokenizer."""
    folder = Path(model.folder)
    config, out = json.loads((folder / "config.json").read_text()), _made()
    of_parts = [(config[name], key) for part, key in LAYERS.items()
                if (name := f"{part}_config") in config]
    if "generator_config" in config:
        of_parts.append((config["generator_config"]["transformer"], "num_layers"))
    for values, key in of_parts:
        values[key] = min(num_layers, values[key])
    (out / "config.json").write_text(json.dumps(config))
    shutil.copy(folder / "preprocessor_config.json", out)
    return replace(model, config=str(out))


def _made() -> Path:
    """A folder that is there as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="model_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def with_processor() -> Path:
    """A folder as write_model writes it, with the tokenizer of write_tokenizer, for all tests of a
    process."""
    folder = _made()
    return write_model(folder / "model", write_tokenizer(folder))


def write_recipe(folder: Path, data: str, more: str = "") -> str:
    """Writes r.yaml, of the model of with_processor and with an index in the same folder, and
    returns its path. data: keys of the section, in a line; more: other sections."""
    path = folder / "r.yaml"
    path.write_text(f"data: {{{data}, index_dir: {folder}/index}}\n"
                    f"model: {{config: {with_processor()}}}\n{more}", encoding="utf-8")
    return str(path)


def drawn_model() -> ModelConfig:
    """The model of with_processor."""
    return ModelConfig(config=str(with_processor()))


def reader_in(folder: Path) -> ProcessedReader:
    """Of a model that is written anew to folder/model, with the tokenizer and the chat template of
    `folder`."""
    shutil.rmtree(folder / "model", ignore_errors=True)
    return reader_of(write_model(folder / "model", folder / "tokenizer.json"))


def reader_of(model: Path, max_example_tokens: int = 0) -> ProcessedReader:
    """What measures and loads rows for a model's folder."""
    from orchmllm.data.processed import ProcessedReader
    from orchmllm.data.text.processor import Processor

    return ProcessedReader(Processor(model), max_example_tokens)


@cache
def shared_reader(max_example_tokens: int = 0) -> ProcessedReader:
    """Of the model of with_processor, for all tests of a process: none changes it."""
    return reader_of(with_processor(), max_example_tokens)


def write_model(folder: Path, tokenizer: Path, max_side: int = 112, num_layers: int = 2) -> Path:
    """Writes a model with its processor to `folder`; returns it. tokenizer: a tokenizer.json."""
    from orchmllm.tools.compose.drawn import shapes, write_drawn

    llm, *towers = ((num_layers, *part) for part in (LLM, TOWER, TOWER))
    write_drawn(shapes(llm, *towers, vocab_size=512, num_mels=8), tokenizer, folder, max_side)
    return folder


def build(model: ModelConfig = MODEL, dtype: torch.dtype = torch.float32) -> WholeModel:
    """A model with drawn weights, in train mode, in this process alone."""
    torch.manual_seed(0)
    config = read_config(Path(model.folder))
    whole = WholeModel(model_class(config)._from_config(config, dtype=dtype), dtype).train()
    freeze(whole, model)
    return whole
