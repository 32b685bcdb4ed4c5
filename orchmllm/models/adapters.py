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

if TYPE_CHECKING:
    import peft

    from orchmllm.models.whole_model import WholeModel

ADAPTER = "default"  # peft's name of an adapter that was given none
WEIGHTS = (f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight")
EXPERTS = ("gate_proj", "up_proj", "down_proj")


def check_adapters(model: ModelConfig, written: tuple[str, ...] = ("",)) -> None:
    """written: how the names of the weights that are in files begin; a run draws the others. Raises
    ValueError if model.lora cannot be used with the model of model.pretrained, or peft is not
    installed."""
    from orchmllm.models.whole_model import meta_model

    need_peft()
    whole = meta_model(model.folder)
    if whole.generator is not None:
        raise ValueError("model.lora: adapters are not trained beside a generator: freeze parts "
                         "(model.llm.frozen) instead")
    found = targets(whole, model)
    if whole.hf.config.model_type == "glm4v_moe" and (
            taken := next((n for n in found if n.endswith(EXPERTS)), None)):
        raise ValueError(f"model.lora.target_modules: peft takes {taken} of a glm4v_moe for "
                         "weights of experts, and puts no adapter there: name other layers, such "
                         "as q_proj")
    with_adapters = set(map(whole.part_of, found))
    for part in whole.blocks():
        if part != "llm" and model.learns(part) and part not in with_adapters:
            raise ValueError(f"model.lora.target_modules: no layer of {part} is among them: set "
                             f"model.{part}.frozen to true, or name one of its layers, too")
    drawn = [name for name, _ in whole.hf.named_parameters() if not name.startswith(written)]
    if drawn and not model.lora.connector:
        raise ValueError(f"model.lora: {drawn[0]} is in no file of {model.folder}, and neither a "
                         "checkpoint nor an export of adapters would hold what is drawn for it: "
                         "set model.lora.connector to true, or train the connectors first")
    for name in connectors(whole) if model.lora.connector else ():
        if any(whole.hf.get_submodule(name).children()):
            raise ValueError(f"model.lora.connector: {name} has a weight of the connector beside "
                             "its layers, which an adapter folder cannot hold: set it to false")


def need_peft() -> None:
    """Raises ValueError where it is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ValueError("adapters need the package peft, which is not installed: pip install "
                         "'.[lora]'")


def targets(whole: WholeModel, model: ModelConfig) -> dict[str, nn.Linear]:
    """Name in whole.hf -> linear layer that gets an adapter, in the blocks of the parts that are
    not frozen. Raises ValueError for one of model.lora.target_modules that none is called."""
    stacks = {p: s for p, s in whole.blocks().items() if not getattr(model, p).frozen}
    layers = [(name, m) for stack in stacks.values() for block in stack
              for name, m in block.named_modules() if isinstance(m, nn.Linear)]
    wanted, inner = model.lora.target_modules, sorted({name for name, _ in layers})
    for end in wanted:
        if not any(_ends(name, end) for name in inner):
            last = sorted({name.rpartition(".")[2] for name in inner})
            raise ValueError(
                f"model.lora.target_modules: no linear layer in a block of {', '.join(stacks)} is "
                f"called {end!r}: {did_you_mean(end, (*last, *inner))}choose of {', '.join(last)}")
    names = {m: name for name, m in whole.hf.named_modules()}
    return {names[m]: m for name, m in layers
            if not wanted or any(_ends(name, end) for end in wanted)}


def _ends(name: str, end: str) -> bool:
    return f".{name}".endswith(f".{end}")


def connectors(whole: WholeModel) -> list[str]:
    """Names in whole.hf of the layers of the connector that have weights."""
    return sorted({name.rpartition(".")[0] for name, _ in whole.hf.named_parameters()
                   if whole.part_of(name) == "connector"})


def peft_config(whole: WholeModel, model: ModelConfig, **options: Any) -> peft.LoraConfig:
    """options: more of peft's own."""
    from peft import LoraConfig

    lora = model.lora
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, use_rslora=lora.use_rslora,
                      target_modules=list(targets(whole, model)), **options)


def inject(whole: WholeModel, model: ModelConfig) -> dict[str, nn.Module]:
    """Puts the adapters into the model, in place; without memory, in the dtype of the weights that
    they are beside. Returns peft's layers by name."""
    from peft import inject_adapter_in_model

    found = targets(whole, model)
    inject_adapter_in_model(peft_config(whole, model), whole.hf, ADAPTER, low_cpu_mem_usage=True)
    return {name: whole.hf.get_submodule(name).to(layer.weight.dtype)
            for name, layer in found.items()}


def take_out(hf: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Puts the layers that adapters are beside back in their places, in place, so that their
    weights have the names that they have in a folder."""
    for name, layer in layers.items():
        hf.set_submodule(name, layer.base_layer)


def put_back(hf: nn.Module, layers: Mapping[str, nn.Module], device: torch.device) -> None:
    """Undoes take_out; the adapters then have memory on `device`, without values."""
    for name, layer in layers.items():
        hf.set_submodule(name, layer)
        layer.lora_A.to_empty(device=device)
        layer.lora_B.to_empty(device=device)


def learns(whole: WholeModel, name: str, model: ModelConfig) -> bool:
    """Whether a parameter of a model with adapters learns."""
    return name.endswith(WEIGHTS) or model.lora.connector and whole.part_of(name) == "connector"


def learnt(whole: WholeModel, model: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(Name, shape) of all that will learn, by a model without adapters."""
    for name, layer in targets(whole, model).items():
        yield f"{name}.{WEIGHTS[0]}", (model.lora.rank, layer.in_features)
        yield f"{name}.{WEIGHTS[1]}", (layer.out_features, model.lora.rank)
    for name, parameter in whole.hf.named_parameters():
        if learns(whole, name, model):
            yield name, tuple(parameter.shape)
