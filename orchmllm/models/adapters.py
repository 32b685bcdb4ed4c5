"""LoRA by peft on a whole model of transformers: which linear layers get an adapter, and what
learns then.

peft puts a layer of its own in the place of a linear layer, which becomes its `base_layer`. Its
weights are called NAME.lora_A.default.weight, (rank, in), and NAME.lora_B.default.weight, (out,
rank).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from orchmllm.config.model import ModelConfig
from orchmllm.config.schema import did_you_mean
from orchmllm.models.families import part_of

if TYPE_CHECKING:
    import peft

    from orchmllm.models.hf import WholeModel

ADAPTER = "default"  # peft's name of an adapter that was given none
WEIGHTS = (f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight")


def check_adapters(model: ModelConfig) -> None:
    """Raises ValueError if model.lora cannot be used with the model of model.pretrained, or peft is
    not installed."""
    from orchmllm.models.hf import meta_model

    if importlib.util.find_spec("peft") is None:
        raise ValueError("model.lora needs the package peft, which is not installed: pip install "
                         "'.[lora]'")
    whole = meta_model(model.folder)
    targets(whole, model)
    if model.lora.connector:
        inside = tuple(f"{name}." for name in connectors(whole))
        for name, _ in whole.hf.named_parameters():
            if part_of(name) == "connector" and not name.startswith(inside):
                raise ValueError(f"model.lora.connector: {name} is no weight of a layer of the "
                                 "connector, so an adapter folder cannot hold it: set it to false")


def targets(whole: WholeModel, model: ModelConfig) -> dict[str, nn.Linear]:
    """Name in whole.hf -> linear layer that gets an adapter, in the blocks of the parts that are
    not frozen. Raises ValueError for one of model.lora.target_modules that none is called."""
    names, found = {m: name for name, m in whole.hf.named_modules()}, {}
    parts = [part for part in whole.blocks() if not getattr(model, part).frozen]
    for part in parts:
        found |= {names[m]: m for m in whole.blocks()[part].modules() if isinstance(m, nn.Linear)}
    wanted = model.lora.target_modules
    for end in wanted:
        if not any(_ends(name, end) for name in found):
            last = sorted({name.rpartition(".")[2] for name in found})
            raise ValueError(
                f"model.lora.target_modules: no linear layer in the blocks of {', '.join(parts)} "
                f"is called {end!r}: {did_you_mean(end, (*last, *found))}choose of "
                f"{', '.join(last)}")
    return {name: m for name, m in found.items()
            if not wanted or any(_ends(name, end) for end in wanted)}


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def connectors(whole: WholeModel) -> list[str]:
    """Names in whole.hf of the layers of the connector, as few as there can be."""
    found: list[str] = []
    for name, module in whole.hf.named_modules():
        inner = [f"{name}.{p}".removeprefix(".") for p, _ in module.named_parameters()]
        inside = name.startswith(tuple(f"{above}." for above in found))
        if inner and not inside and not isinstance(module, nn.ModuleList) and (
                {part_of(p) for p in inner} == {"connector"}):
            found.append(name)
    return found


def peft_config(whole: WholeModel, model: ModelConfig, **options: Any) -> peft.LoraConfig:
    """options: more of peft's own."""
    from peft import LoraConfig

    lora = model.lora
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora,
                      target_modules=list(targets(whole, model)), **options)


def inject(whole: WholeModel, model: ModelConfig) -> None:
    """Puts the adapters into the model, in place; without memory, in the dtype of the weights that
    they are beside."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(peft_config(whole, model), whole.hf, ADAPTER, low_cpu_mem_usage=True)
    for layer in _adapted(whole.hf).values():
        layer.to(layer.base_layer.weight.dtype)


def _adapted(hf: nn.Module) -> dict[str, nn.Module]:
    """Name -> peft's layer."""
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in hf.named_modules() if isinstance(m, LoraLayer)}


def take_out(hf: nn.Module) -> dict[str, nn.Module]:
    """Puts the layers that adapters are beside back in their places, in place, so that their
    weights have the names that they have in a folder. Returns what put_back takes."""
    layers = _adapted(hf)
    for name, layer in layers.items():
        hf.set_submodule(name, layer.base_layer)
    return layers


def put_back(hf: nn.Module, layers: Mapping[str, nn.Module], device: torch.device) -> None:
    """Undoes take_out; the adapters then have memory on `device`, without values."""
    for name, layer in layers.items():
        hf.set_submodule(name, layer)
        layer.lora_A.to_empty(device=device)
        layer.lora_B.to_empty(device=device)


def learns(name: str, model: ModelConfig) -> bool:
    """Whether a parameter of a model with adapters learns."""
    return name.endswith(WEIGHTS) or model.lora.connector and part_of(name) == "connector"


def learnt(whole: WholeModel, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Name, shape) of all that will learn, by a model without adapters."""
    for name, layer in targets(whole, model).items():
        yield f"{name}.{WEIGHTS[0]}", (model.lora.rank, layer.in_features)
        yield f"{name}.{WEIGHTS[1]}", (layer.out_features, model.lora.rank)
    for name, parameter in whole.hf.named_parameters():
        if learns(name, model):
            yield name, tuple(parameter.shape)
