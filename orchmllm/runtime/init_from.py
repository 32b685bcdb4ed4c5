"""run.init_from: the weights of another run's checkpoint, from which a new run starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from orchmllm.config.model import ModelConfig


def other_kind(path: Path, saved: Mapping, model: ModelConfig) -> str:
    """Why a model cannot start from the checkpoint in `path`, of which `saved` is the model
    section; "" if it can."""
    adapters = bool(saved.get("lora", {}).get("rank"))
    if adapters and model.lora.rank:
        for key in ("rank", "alpha", "use_rslora"):  # what an adapter computes
            there, here = saved["lora"][key], getattr(model.lora, key)
            if there != here:
                return (f"run.init_from: the adapters of {path} have model.lora.{key} {there}, and "
                        f"here it is {here}: use that value, or name what orchmllm export --merged "
                        "writes in model.pretrained in place of run.init_from")
    if adapters == bool(model.lora.rank):
        return ""
    kinds = ("all weights", "adapters alone")
    export = "orchmllm export --merged" if adapters else "orchmllm export"
    return (f"run.init_from: {path} has {kinds[adapters]}, and this recipe trains "
            f"{kinds[not adapters]} (model.lora.rank): write it to a folder with {export}, and "
            "name that in model.pretrained in place of run.init_from")


def mismatch(path: Path, parameters: Mapping[str, Tensor]) -> str:
    """The first parameter that has another shape in a checkpoint, or that one of both lacks; "" if
    there is none. parameters: by their names there, of any shapes."""
    metadata = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    there = {name: tuple(x.size) for name, x in metadata.items() if name.startswith("model.")}
    here = {name: tuple(x.shape) for name, x in parameters.items()}
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            shapes = (there.get(name, "no such parameter"), here.get(name, "no such parameter"))
            return (f"run.init_from: {path} is of another model: {name.removeprefix('model.')} is "
                    f"{shapes[0]} there and {shapes[1]} here: use the model of that run, and its "
                    "model.lora")
    return ""
