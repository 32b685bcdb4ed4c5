"""A checkpoint of a model of transformers as the folder that transformers writes, with the
processor of the folder that the run started from."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.hf.folder import INDEX, PARTS, VAE, links_of, open_folder
from orchmllm.hf.tensors import FileTensor, renamed
from orchmllm.models.families import COMPOSED, model_class, read_config

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import GenerationConfig, PreTrainedModel

PROCESSOR_FILES = ("*.json", "*.jinja", "*.txt", "*.model")  # tokenizer and templates, too
GENERATION = "generation_config.json"
OWN = ("config.json", INDEX, PARTS)  # that transformers writes anew


def of_checkpoint(saved: dict[str, FileTensor], name: str, shape: tuple[int, ...], dtype: str,
                  source: Path) -> FileTensor:
    """A parameter of a checkpoint of the model of `source`. Raises ValueError where it is of
    another."""
    if f"model.hf.{name}" not in saved:
        raise ValueError(f"the checkpoint lacks {name}: it is of another model than that of "
                         f"{source}")
    return renamed(saved[f"model.hf.{name}"], name, shape, dtype)


def copy_processor(source: Path, folder: Path) -> None:
    """Everything of a model's folder but weights and configuration."""
    names = {path.name for pattern in PROCESSOR_FILES for path in source.glob(pattern)}
    for name in sorted(names.difference(OWN)):
        shutil.copyfile(source / name, folder / name)
    for name in (VAE, "additional_chat_templates"):
        if (source / name).is_dir():
            shutil.copytree(source / name, folder / name)


def save_model(model: PreTrainedModel, learnt: int, source: Path, max_file_bytes: int,
               folder: Path, log: Callable[[str], None]) -> dict:
    """Writes a model with the processor of `source`, and returns its part of orchmllm.json. learnt:
    number of tensors that are from the checkpoint."""
    copy_processor(source, folder)
    end_as_trained(model.generation_config, source)
    settings = model.generation_config  # of which transformers may refuse to write a part
    model.generation_config = type(settings)()
    if model.config.model_type == COMPOSED:
        from orchmllm.tools.compose.write import save_parts

        save_parts(model, folder, max_file_bytes)
    else:
        model.save_pretrained(folder, max_shard_size=max_file_bytes)
    for path in (folder, *folder.glob("llm")) if settings else ():
        settings.to_json_file(path / GENERATION)
    files, name = len(list(folder.rglob("*.safetensors"))), type(model).__name__
    log(f"{name}: {learnt} tensors in {files} file{'s' * (files > 1)}, with the "
        f"processor of {source}")
    return {"class": f"{type(model).__module__.partition('.')[0]}.{name}", "tensors": learnt,
            "files": files}


def write_whole(source: Path, saved: dict[str, FileTensor], dtype: str, max_file_bytes: int,
                folder: Path, log: Callable[[str], None]) -> dict:
    """Writes the model and returns its part of orchmllm.json. See trained_model."""
    model = trained_model(source, saved, dtype)
    count = sum(1 for _ in model.named_parameters())
    return save_model(model, count, source, max_file_bytes, folder, log)


def trained_model(source: Path, saved: dict[str, FileTensor], dtype: str) -> PreTrainedModel:
    """The model of a checkpoint, in memory. source: the folder that the run started from. dtype: as
    safetensors names it, "" as saved. Raises ValueError where the source is gone, or the checkpoint
    is of another model."""
    import torch
    from transformers import GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = read_config(source)
    with torch.device("meta"):
        model = model_class(config)._from_config(config)
    tensors = _buffers(model, source)
    for name, parameter in model.named_parameters():
        stored = of_checkpoint(saved, name, tuple(parameter.shape), dtype, source)
        tensors[name] = stored.load()
    model.load_state_dict(tensors, strict=False, assign=True)
    model.tie_weights()
    if (source / GENERATION).is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return model


def end_as_trained(settings: GenerationConfig | None, folder: Path) -> None:
    """Has `generate` stop, beside what a model's own settings say, at the token that ends an answer
    in its template, which training taught. folder: with the tokenizer, if there is one."""
    with suppress(ValueError):  # of a tokenizer that no run can be trained with (other_tokenizer)
        end, ends = ChatTokenizer(folder).end_id, getattr(settings, "eos_token_id", None)
        ends = [ends] if isinstance(ends, int) else list(ends or ())
        if settings is not None and end not in (None, *ends):
            settings.eos_token_id = [*ends, end]


def _buffers(model: PreTrainedModel, source: Path) -> dict[str, Tensor]:
    """What belongs to a model and is not learnt, such as what GLM-4.5V adds to the scores of its
    experts: as the run found it, in the folder or drawn."""
    import torch
    from transformers import PreTrainedModel

    found, part = {}, {}
    for path, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            part |= dict.fromkeys(module.modules(), module)  # the innermost one comes last
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                module.register_buffer(name, torch.empty_like(buffer, device="cpu"))
                found[f"{path}.{name}"] = module
    for module in found.values():
        part[module]._init_weights(module)  # of parameters nothing: they have no memory yet
    if not found or not (any(source.glob("*.safetensors")) or links_of(source)):
        return {}
    out = {}
    for name, stored in open_folder(source).items():
        if name in found:
            with safe_open(stored.file, framework="pt") as file:
                out[name] = file.get_tensor(stored.key)
    return out
