"""`Encoder`: what balance_encoders has to know of one encoder of a model, and what it refuses: some
at its call, before anything is hooked, some in each forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from orchmllm.comm.fsdp import ranks_of
from orchmllm.encoders.items import Layout
from orchmllm.plan.cost import CostModel

EQUAL = "equal"  # Encoder.rows: every item has as many rows of features
_RANDOM = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout",
           "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop", "encoder_layerdrop",
           "drop_path_rate", "attn_dropout", "proj_dropout")
# Arguments about media that only the LLM reads; others that no encoder names are refused.
HARMLESS = {"mm_token_type_ids", "video_second_per_grid", "use_audio_in_video",
             "audio_feature_lengths", "vision_aspect_ratio"}
_MEDIA = ("pixel_", "image", "video", "audio", "vision_", "input_features", "feature_", "mm_",
          "batch_num_images")


@dataclass(frozen=True)
class Encoder:
    """One encoder of a model whose code stays as it is.

    name: what logs and errors call it. calls: by attribute of the owner that its forward calls (a
    method, or a submodule such as "vision_tower"), how the arguments of the owner's forward divide
    into items; the call gets them by position, in the layout's order. Several calls (images and
    video of one tower) are encoded together, by the first of them.
    outputs: the fields of the result that the model reads (attributes, keys or places of a tuple);
    (): the result itself. The others become None. layers: of these, fields that hold a list with
    one entry per layer; optional: those that may be missing. A field is a tensor with one row per
    item, (n, ..., D), a list with a tensor (rows of the item, D) per item, or, where `rows` is
    given, a flat tensor (R, D).
    rows: rows of features of each item, of (owner, meta (n, columns)); EQUAL: all items have as
    many. padded: a field is (n, longest, D), of which only the first rows of each item are read.
    cost: of an item, given its length in the layout (default: the length).
    towers: submodules that encode, to be checked for dropout and batch normalisation (default:
    the calls that are submodules). options, keywords: arguments of forward, and fixed ones, that
    the call gets by keyword. passes: submodules called on the result, which `run` has applied.
    run: (owner, *arguments, **keywords) -> result, where the call itself does not encode.
    cast: media may be moved in the tower's dtype, because the encoder casts to it first. named: the
    call gets its arguments by the names of the layout. captures: the call reads hidden states that
    transformers records."""

    name: str
    calls: Mapping[str, Layout]
    outputs: tuple[str | int, ...] = ()
    layers: tuple[str | int, ...] = ()
    optional: tuple[str | int, ...] = ()
    rows: Callable[[nn.Module, np.ndarray], np.ndarray] | str | None = None
    padded: bool = False
    cost: CostModel | Callable[[nn.Module], CostModel] = CostModel(linear=1000, quadratic=0)
    towers: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    keywords: Mapping[str, Any] = field(default_factory=dict)
    passes: tuple[str, ...] = ()
    run: Callable[..., Any] | None = None
    cast: bool = False
    named: bool = False
    captures: bool = False

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


def resolve(owner: nn.Module, name: str) -> Any:
    """The attribute of a dotted name. Raises ValueError if it does not exist."""
    path, _, last = name.rpartition(".")
    try:
        return getattr(owner.get_submodule(path), last)
    except AttributeError:
        raise ValueError(f"{type(owner).__name__} has no {name!r}") from None


def check_encoder(owner: nn.Module, encoder: Encoder) -> None:
    """Raises ValueError naming the encoder, the module and the cure, if the result for an item
    depends on the items beside it or on the rank's random numbers."""
    for name in (*encoder.calls, *encoder.passes):
        if not callable(resolve(owner, name)):
            raise ValueError(f"encoder {encoder.name!r}: {type(owner).__name__}.{name} is no "
                             "method or submodule")
    check_towers(encoder, owner)
    for path, tower in encoder.tower_modules(owner):
        _check_config(encoder, path, getattr(tower, "config", None))


def check_towers(encoder: Encoder, owner: nn.Module) -> None:
    """What may change after the call. Raises ValueError for dropout, and for batch normalisation
    over the items that a rank encodes, which model.train() switches on where it was in eval mode.
    transformers finds the hidden states to record by the name of the tower's class, which
    fully_shard changes: then the model fails with or without balancing, and ValueError says so."""
    for path, tower in encoder.tower_modules(owner):
        for name, module in tower.named_modules(prefix=path):
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and (
                    module.p > 0):
                raise ValueError(f"encoder {encoder.name!r}: {name} has dropout {module.p}: its "
                                 "masks would depend on where an item is encoded; set it to 0")
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and (
                    module.training or module.running_mean is None):
                raise ValueError(
                    f"encoder {encoder.name!r}: {name} is a {type(module).__name__}, whose result "
                    "depends on the other items of the rank: use another normalisation, or put it "
                    "in eval mode after each model.train()")
        if encoder.captures and isinstance(tower, FSDPModule):
            raise ValueError(
                f"encoder {encoder.name!r}: {path} was given to fully_shard, which renames its "
                "class, and transformers then records no hidden states, which this model reads: "
                "give the layers of the tower to fully_shard, not the tower itself")


def check_sharding(encoder: Encoder, owner: nn.Module, ranks: Sequence[int]) -> set[int]:
    """The ranks over which FSDP2 shards a tower, if there are others beside `ranks`, which share
    its media. Raises ValueError where gradients of media that leave would not reach their tower, or
    ranks that shard it would be apart."""
    wider: set[int] = set()
    for path, tower in encoder.tower_modules(owner):
        for reduced, learns in ranks_of(owner, tower):
            if reduced > set(ranks):
                wider |= reduced
            elif reduced != set(ranks) and (learns or not reduced < set(ranks)):
                raise ValueError(
                    f"encoder {encoder.name!r}: FSDP2 reduces the gradients of {path} over the "
                    f"ranks {sorted(reduced)}, but the ranks {sorted(ranks)} share its media: give "
                    'the mesh or the process group of the former as group=, such as mesh["dp"]')
    return wider


def has_collectives(encoder: Encoder, owner: nn.Module) -> bool:
    """Whether ranks wait for each other within a tower."""
    return any(isinstance(part, FSDPModule | FullyShardedDataParallel | DTensor)
               for _, tower in encoder.tower_modules(owner)
               for part in (*tower.modules(), *tower.parameters()))


def _check_config(encoder: Encoder, path: str, config: Any) -> None:
    for name in _RANDOM:
        value = getattr(config, name, 0)
        if isinstance(value, float | int) and value > 0:
            raise ValueError(f"encoder {encoder.name!r}: {path}.config.{name} is {value}: its "
                             "random masks would depend on where an item is encoded; set it to 0 "
                             "before the model is built")


def known_arguments(encoders: Sequence[Encoder]) -> set[str]:
    """Names of the arguments about media that a forward may have."""
    return HARMLESS.union(*(e.options for e in encoders), *(
        layout.arguments for e in encoders for layout in e.calls.values()))


def refuse_unknown(known: set[str], inputs: Mapping[str, Any]) -> None:
    """Raises ValueError for an argument about media that is not `known`, such as features computed
    before."""
    for name, value in inputs.items():
        if value is None or name in known or not name.startswith(_MEDIA):
            continue
        if name == "batch_num_images" and (torch.as_tensor(value) == 1).all():
            continue
        raise ValueError(f"the argument {name} is not understood by balance_encoders: leave it "
                         "out, or do not balance this model's encoders")
