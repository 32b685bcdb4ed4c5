"""A checkpoint of adapters as the folder that peft writes, or merged into the model that they are
beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from orchmllm.config.model import ModelConfig
from orchmllm.hf.sources import find_sources, fingerprint
from orchmllm.hf.tensors import TORCH_DTYPES, FileTensor, renamed, write_file
from orchmllm.tools.export.whole import copy_processor

WEIGHTS = "adapter_model.safetensors"  # as peft names it


def write_adapters(model: ModelConfig, saved: dict[str, FileTensor], dtype: str, folder: Path,
                   log: Callable[[str], None]) -> dict:
    """Writes the adapters, and the connector where it learnt, and returns the model's part of
    orchmllm.json. dtype: as safetensors names it, "" as saved. Raises ValueError where the
    checkpoint is of another model."""
    from orchmllm.models.adapters import ADAPTER, connectors, learnt, peft_config
    from orchmllm.models.hf import meta_model

    whole, source = meta_model(model.folder), Path(model.folder).absolute()
    tensors = []
    for name, shape in learnt(whole, model):
        if f"model.hf.{name}" not in saved:
            raise ValueError(f"the checkpoint lacks {name}: it is of another model than that of "
                             f"{source}")
        tensors.append(renamed(saved[f"model.hf.{name}"], "base_model.model." + name.replace(
            f".{ADAPTER}.weight", ".weight"), shape, dtype))
    peft_config(
        whole, model, base_model_name_or_path=str(source), inference_mode=True,
        modules_to_save=connectors(whole) if model.lora.connector else None,
    ).save_pretrained(folder)
    write_file(folder / WEIGHTS, tensors)
    copy_processor(source, folder)
    size = sum(t.num_bytes for t in tensors) / 1e6
    log(f"{WEIGHTS}: {len(tensors)} tensors, {size:.1f} MB, for the model of {source}")
    return {"class": "peft.PeftModel", "tensors": len(tensors), "files": 1}


def write_merged(model: ModelConfig, trained_from: str, saved: dict[str, FileTensor], dtype: str,
                 max_file_bytes: int, folder: Path, log: Callable[[str], None]) -> dict:
    """Writes the whole model with its adapters merged by peft. trained_from: fingerprint of the
    weights of model.pretrained when the run was trained. The rest as in write_adapters and
    orchmllm.tools.export.whole.write_whole. Raises ValueError where these weights are others
    now."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = Path(model.folder)
    found = f"{fingerprint(find_sources(model)):012x}"
    if found != trained_from:
        raise ValueError(f"{source}: its weights are not those that the adapters were trained with "
                         f"(fingerprint {found}, the checkpoint has {trained_from}): restore them")
    with TemporaryDirectory(dir=folder.parent) as adapters:
        note = write_adapters(model, saved, "", Path(adapters), lambda text: None)
        kept = next(t.dtype for name, t in saved.items() if name.startswith("model."))
        hf = AutoModelForImageTextToText.from_pretrained(
            source, dtype=getattr(torch, TORCH_DTYPES[kept]), local_files_only=True)
        hf = PeftModel.from_pretrained(hf, adapters).merge_and_unload(safe_merge=True)
    written = TORCH_DTYPES[dtype or kept]
    hf.to(getattr(torch, written)).save_pretrained(folder, max_shard_size=max_file_bytes)
    copy_processor(source, folder)
    files = len(list(folder.glob("*.safetensors")))
    log(f"{type(hf).__name__}: merged, in {files} file{'s' * (files > 1)}, with the processor of "
        f"{source}")
    return {"class": f"transformers.{type(hf).__name__}", "tensors": note["tensors"],
            "files": files}
