"""What a whole model of transformers says of itself before it is built: its weights, rows, tokens
and parts, for orchmllm.models.spec."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from orchmllm.config.data import DataConfig
from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import Recipe
from orchmllm.config.train import TrainConfig
from orchmllm.data.formats.scanned import digest
from orchmllm.hf.folder import ELEMENT_BYTES, open_folder
from orchmllm.hf.sources import PretrainedError, WeightSource
from orchmllm.models.families import COMPOSED, read_config
from orchmllm.plan.layout import ENCODERS

if TYPE_CHECKING:
    from orchmllm.data.dataset import ConversationDataset
    from orchmllm.data.text.tokenizer import ChatTokenizer


def weights(model: ModelConfig) -> list[WeightSource]:
    """Those that transformers reads itself. Raises PretrainedError."""
    path = Path(model.folder)
    try:
        config = read_config(path)
        for part in ENCODERS:
            if getattr(model, part).frozen and not hasattr(config, f"{part}_config"):
                raise ValueError(f"model.{part}.frozen has no effect with a {config.model_type}, "
                                 "which has no such part: leave it out")
        from orchmllm.models.hf import meta_model  # with torch

        meta_model(model.folder)  # its parts have to be understood
        parts = [*(p for p in ENCODERS if hasattr(config, f"{p}_config")), "llm"]
        if not any(map(model.learns, (*parts, "connector"))):
            raise ValueError(f"nothing would learn: a {config.model_type} has {', '.join(parts)} "
                             "and connectors, and all of them are frozen: set one to false")
        if not model.pretrained:
            return []
        if model.lora.rank:
            from orchmllm.models.adapters import check_adapters  # with torch

            check_adapters(model)
        return [WeightSource("model", path, {  # buffers may be integers, which nobody reads
            name: stored for name, stored in open_folder(path).tensors.items()
            if stored.dtype in ELEMENT_BYTES and stored.shape})]
    except ValueError as e:
        key = "model.pretrained" if model.pretrained else "model.config"
        raise PretrainedError(f"{key}: {e}") from e


def check(recipe: Recipe) -> None:
    """Raises ValueError for a learning rate or a weight decay of an encoder that the model has
    not."""
    config = read_config(Path(recipe.model.folder))
    for part in ENCODERS:
        for name in (f"{part}_lr", f"{part}_weight_decay"):
            if getattr(recipe.train, name) != getattr(TrainConfig, name) and (
                    not hasattr(config, f"{part}_config")):
                raise ValueError(f"train.{name} has no effect with a {config.model_type}, which "
                                 "has no such part: leave it out")


def open_dataset(data: DataConfig, model: ModelConfig, *, seed: int) -> ConversationDataset:
    """See orchmllm.data.stream.with_reader. Raises ValueError naming what cannot be read."""
    read_config(Path(model.folder))  # other versions of transformers lack what reads rows
    from orchmllm.data.processed import ProcessedReader, open_processor
    from orchmllm.data.stream import with_reader

    reader = ProcessedReader(open_processor(model.folder, data), data.max_example_tokens)
    return with_reader(data, reader, seed=seed)


def tokenizer(data: DataConfig, model: ModelConfig) -> ChatTokenizer:
    """That of the model's processor. Raises ValueError, also where `data` names another one."""
    from orchmllm.data.processed import open_processor  # with transformers

    return open_processor(model.folder, data).tokenizer


def vocabulary(model: ModelConfig) -> tuple[int, str]:
    """(Tokens of the model's text, what says so). Raises ValueError for a folder that cannot be
    used."""
    config = read_config(Path(model.folder))
    size = config.get_text_config(decoder=True).vocab_size
    while config.model_type == COMPOSED and size in (config.image_token_id, config.audio_token_id):
        size += 1  # it has no embedding and needs none
    return size, f"{model.folder}/config.json: vocab_size"


def identity(model: ModelConfig) -> dict[str, str]:
    """Digest of the config.json, without what says nothing of the model."""
    config = json.loads((Path(model.folder) / "config.json").read_text(encoding="utf-8"))
    for name in ("_name_or_path", "dtype", "torch_dtype", "transformers_version"):
        config.pop(name, None)
    return {"config_json": digest([config])}
