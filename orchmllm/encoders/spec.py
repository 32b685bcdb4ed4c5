"""`Encoder`: what balance_encoders has to know of one encoder of a model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from orchmllm.encoders.items import Layout
from orchmllm.plan.cost import CostModel

EQUAL = "equal"  # Encoder.rows: every item has as many rows of features


@dataclass(frozen=True)
class Encoder:
    """One encoder of a model whose code stays as it is.

    name: what logs and errors call it. calls: by attribute of the owner that its forward calls (a
    method, or a submodule such as "vision_tower"), how the arguments of the owner's forward divide
    into items; the call gets them by position, in the layout's order. Several calls (images and
    video of one tower) are encoded together, by the first of them.
    outputs: the fields of the result that the model reads (attributes, keys or places of a tuple);
    (): the result itself. The others become None. layers: of these, fields that hold a list with
    one entry per layer. A field is a tensor with one row per item, (n, ..., D), a list with a
    tensor (rows of the item, D) per item, or, where `rows` is given, a flat tensor (R, D).
    rows: rows of features of each item, of (owner, meta (n, columns)); EQUAL: all items have as
    many. cost: of an item, given its length in the layout (default: the length).
    towers: submodules that encode, to be checked for dropout and batch normalisation (default:
    the calls that are submodules). options, keywords: arguments of forward, and fixed ones, that
    the call gets by keyword. passes: submodules called on the result, which `run` has applied.
    run: (owner, *arguments, **keywords) -> result, where the call itself does not encode.
    cast: media may be moved in the tower's dtype, because the encoder casts to it first."""

    name: str
    calls: Mapping[str, Layout]
    outputs: tuple[str | int, ...] = ()
    layers: tuple[str | int, ...] = ()
    rows: Callable[[nn.Module, np.ndarray], np.ndarray] | str | None = None
    cost: CostModel | Callable[[nn.Module], CostModel] = CostModel(linear=1000, quadratic=0)
    towers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    run: Callable[..., Any] | None = None
    cast: bool = False

    def __post_init__(self) -> None:
        kinds = {type(layout) for layout in self.calls.values()}
        if len(kinds) != 1:
            raise ValueError(f"Encoder {self.name!r}: calls must be one or more layouts of one "
                             f"kind, got {sorted(k.__name__ for k in kinds)}")

    @property
    def layout(self) -> Layout:
        """That of the first call; the others have the same kind."""
        return next(iter(self.calls.values()))

    def tower_modules(self, owner: nn.Module) -> list[tuple[str, nn.Module]]:
        """(path, module) of what encodes. Raises ValueError if there is none."""
        names = self.towers or tuple(
            name for name in self.calls if isinstance(resolve(owner, name), nn.Module))
        if not names:
            raise ValueError(f"Encoder {self.name!r}: name the submodules that encode in `towers`; "
                             f"{', '.join(self.calls)} are methods")
        return [(name, owner.get_submodule(name)) for name in names]


    def media_dtype(self, owner: nn.Module) -> torch.dtype | None:
        """The tower's, if media may be moved in it."""
        _, tower = self.tower_modules(owner)[0]
        floating = (p.dtype for p in tower.parameters() if p.is_floating_point())
        return next(floating, None) if self.cast else None


def parent_of(owner: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that holds the attribute of a dotted `name`, and its last part."""
    path, _, last = name.rpartition(".")
    return owner.get_submodule(path), last


def resolve(owner: nn.Module, name: str) -> Any:
    """The attribute of a dotted name. Raises ValueError if it does not exist."""
    try:
        parent, last = parent_of(owner, name)
        return getattr(parent, last)
    except AttributeError:
        raise ValueError(f"{type(owner).__name__} has no {name!r}") from None


def bind(module: nn.Module, args: tuple, kwargs: dict) -> dict[str, Any]:
    """Arguments of forward by name; those of a dict among them, too."""
    inputs = dict(zip(inspect.signature(module.forward).parameters, args, strict=False)) | kwargs
    for value in [v for v in inputs.values() if isinstance(v, Mapping)]:
        inputs = {**value, **inputs}
    return inputs
