"""What the parts of a model of transformers are: asked of the methods that make features of media,
and of the modules that these methods read."""

from __future__ import annotations

import re

from torch import nn

from orchmllm.encoders.infer import infer_encoders
from orchmllm.plan.layout import GENERATOR

# Layers of a tower, after its blocks, that make features as the LLM takes them; that they are no
# last layers of the tower itself, only their names tell.
_CONNECTORS = re.compile(r"merger|connector|projector|aligner|^proj\d*$")


def places(model: nn.Module) -> dict[str, str]:
    """Name of a module, with a dot behind it -> vision, audio, connector, llm or generator. A
    parameter is of the longest name that it begins with. Raises ValueError for a model whose
    encoders are not understood."""
    owner, encoders = infer_encoders(model)
    table = owner.get_input_embeddings()
    prefix = next(f"{name}." if name else "" for name, m in model.named_modules() if m is owner)
    found = {"": "llm", prefix: "llm", f"{GENERATOR}.": GENERATOR}
    for name, _ in owner.named_parameters(recurse=False):  # such as the end of a line of an image
        found[f"{prefix}{name}"] = "connector"
    for encoder in encoders:
        part = "audio" if encoder.name == "audio" else "vision"
        read = {name: module for name, module in (
            *encoder.tower_modules(owner),
            *((name, owner.get_submodule(name)) for name in encoder.passes))
            if not any(m is table for m in module.modules())}
        main = max(read, key=lambda name: sum(p.numel() for p in read[name].parameters()))
        found |= {f"{prefix}{name}.": "connector" for name in read}
        found[f"{prefix}{main}."] = part
        found |= {f"{prefix}{main}.{name}.": "connector" for name in _connectors(read[main])}
    return found


def _connectors(tower: nn.Module) -> list[str]:
    """Names in a tower."""
    stacks = [m for name, m in tower.named_modules() if isinstance(m, nn.ModuleList)
              and not _CONNECTORS.search(name.rpartition(".")[2])]
    blocks = max(stacks, key=lambda m: sum(p.numel() for p in m.parameters()), default=None)
    names = [name for name, _ in tower.named_children()]
    first = next((k for k, name in enumerate(names) if any(
        m is blocks for m in tower.get_submodule(name).modules())), 0)
    return [name for name in names[first + 1:] if _CONNECTORS.search(name)]


def part_of(found: dict[str, str], name: str) -> str:
    """Of a parameter or a module. found: see `places`."""
    return found[max((place for place in found if name.startswith(place)), key=len)]
