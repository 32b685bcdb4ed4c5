"""The parameters of a model of transformers and where they are, kept like what was counted of it,
so that a known model is divided and added up without torch."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from orchmllm.counts.kept import kept


class Placed(NamedTuple):
    """A parameter of a part: vision, audio, connector, llm or generator. role: `block`, with
    `block`, its number in the part's stack; `embed` or `head`, where these are two tables; else
    `root`. learns: unless its class fixes it."""

    name: str
    shape: tuple[int, ...]
    part: str
    role: str = "root"
    block: int = 0
    learns: bool = True


def description(folder: str) -> str:
    """The text of config.json, or the folder where it has none."""
    config = Path(folder, "config.json")
    return config.read_text(encoding="utf-8") if config.is_file() else folder


@lru_cache(maxsize=8)
def placed(folder: str) -> list[Placed]:
    """All parameters, in the model's order. Raises ValueError for a folder that cannot be used."""
    found = kept(["placed", description(folder)], lambda: _placed(folder))
    return [Placed(name, tuple(shape), *rest) for name, shape, *rest in found]


def _placed(folder: str) -> list[Placed]:
    from orchmllm.models.whole_model import meta_model  # with torch

    whole = meta_model(folder)
    places = {id(p): ("block", k) for stack in whole.blocks().values()
              for k, block in enumerate(stack) for p in block.parameters()}
    table, head = whole.hf.get_input_embeddings().weight, whole.hf.get_output_embeddings().weight
    if table is not head:
        places |= {id(table): ("embed", 0), id(head): ("head", 0)}
    return [Placed(name, tuple(p.shape), whole.part_of(name), *places.get(id(p), ("root", 0)),
                   p.requires_grad) for name, p in whole.hf.named_parameters()]
