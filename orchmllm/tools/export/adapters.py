"""A checkpoint of a whole model of transformers, or of adapters, as the folder that peft writes or
merged into the model that they are beside."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from orchmllm.config.model import ModelConfig
from orchmllm.hf.sources import find_sources, fingerprint
from orchmllm.hf.tensors import TORCH_DTYPES, FileTensor, renamed, write_file
from orchmllm.models.families import model_class, read_config
from orchmllm.tools.export.checkpoints import other_tokenizer
from orchmllm.tools.export.whole import copy_processor, of_checkpoint, save_model, write_whole

WEIGHTS = "adapter_model.safetensors"  # as peft names it


def write_model(
    model: ModelConfig, state: dict, saved: dict[str, FileTensor], *, dtype: str,
    max_file_bytes: int, folder: Path, merged: bool, log: Callable[[str], None],
) -> dict:
    """Writes a model, or its adapters, to `folder`, and returns what orchmllm.json says of it.
    state: state.json of the checkpoint; the rest as in orchmllm.tools.export.export. Raises
    ValueError."""
    if warning := other_tokenizer(Path(model.folder), state):
        log(warning)
    if merged:
        note = write_merged(model, state["attempt"]["settings"]["model.weights"], saved, dtype,
                            max_file_bytes, folder, log)
    elif model.lora.rank:
        note = write_adapters(model, saved, dtype, folder, log)
    else:
        note = write_whole(Path(model.folder), saved, dtype, max_file_bytes, folder, log)
    return {"parts": {"model": note}}


def write_adapters(model: ModelConfig, saved: dict[str, FileTensor], dtype: str, folder: Path,
                   log: Callable[[str], None]) -> dict:
    """Writes the adapters, and the connector where it learnt, and returns the model's part of
    orchmllm.json. dtype: as safetensors names it, "" as saved. Raises ValueError where the
    checkpoint is of another model."""
    from orchmllm.models import adapters
    from orchmllm.models.whole_model import meta_model

    adapters.check_adapters(model)
    whole, source = meta_model(model.folder), Path(model.folder).absolute()
    cls = type(whole.hf)  # for peft's AutoPeftModel
    tensors = []
    for name, shape in adapters.learnt(whole, model):
        key = "base_model.model." + name.replace(f".{adapters.ADAPTER}.weight", ".weight")
        stored = of_checkpoint(saved, name, shape, dtype, source)
        tensors.append(renamed(stored, key, shape))
    adapters.peft_config(
        whole, model, base_model_name_or_path=str(source), inference_mode=True,
        auto_mapping={"base_model_class": cls.__name__, "parent_library": cls.__module__},
        modules_to_save=adapters.connectors(whole) if model.lora.connector else None,
    ).save_pretrained(folder)
    write_file(folder / WEIGHTS, tensors)
    copy_processor(source, folder)
    log(f"{WEIGHTS}: {len(tensors)} tensors, for the model of {source}")
    return {"class": "peft.PeftModel", "tensors": len(tensors), "files": 1}


def write_merged(model: ModelConfig, trained_from: str, saved: dict[str, FileTensor], dtype: str,
                 max_file_bytes: int, folder: Path, log: Callable[[str], None]) -> dict:
    """Writes the whole model, its adapters merged by peft. trained_from: fingerprint of the weights
    that the run started from. The rest as in write_adapters and write_whole. Raises ValueError
    where the folder of model.pretrained has other weights now."""
    source, found = Path(model.folder), f"{fingerprint(find_sources(model)):012x}"
    if found != trained_from:
        raise ValueError(f"{source}: its weights are not those that the adapters were trained with "
                         f"(fingerprint {found}, the checkpoint has {trained_from}): restore them")
    import torch
    from peft import PeftModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    kept = next(t.dtype for name, t in saved.items() if name.startswith("model."))
    config = read_config(source)
    made = getattr(torch, TORCH_DTYPES[dtype or kept])
    wide = torch.promote_types(made, getattr(torch, TORCH_DTYPES[kept]))  # in which it is added up
    hf = model_class(config).from_pretrained(source, config=config, dtype=wide,
                                             local_files_only=True)
    with TemporaryDirectory(dir=folder.parent) as adapters:
        note = write_adapters(model, saved, "", Path(adapters), lambda text: None)
        hf = PeftModel.from_pretrained(hf, adapters).merge_and_unload(safe_merge=True)
    hf.to(made)
    return save_model(hf, note["tensors"], source, max_file_bytes, folder, log)
