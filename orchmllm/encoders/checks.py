"""What is refused at the call of balance_encoders, before anything is hooked, and what is looked at
again in each forward."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from orchmllm.encoders.spec import Encoder, resolve

_RANDOM = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout",
           "hidden_dropout_prob", "attention_probs_dropout_prob", "layerdrop", "encoder_layerdrop",
           "drop_path_rate", "attn_dropout", "proj_dropout")


def check_encoder(owner: nn.Module, encoder: Encoder, captures: bool) -> None:
    """Raises ValueError naming the encoder, the module and the cure, if the result for an item
    depends on the items beside it or on the rank's random numbers. captures: the model reads
    hidden states that transformers records."""
    for name in (*encoder.calls, *encoder.passes):
        if not callable(resolve(owner, name)):
            raise ValueError(f"encoder {encoder.name!r}: {type(owner).__name__}.{name} is no "
                             "method or submodule")
    check_towers(encoder, owner, captures)
    for path, tower in encoder.tower_modules(owner):
        for name, module in tower.named_modules():
            if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
                at = ".".join(p for p in (path, name) if p)
                raise ValueError(f"encoder {encoder.name!r}: {at} has dropout {module.p}: its "
                                 "masks would depend on where an item is encoded; set it to 0")
        _check_config(encoder, path, getattr(tower, "config", None))


def check_towers(encoder: Encoder, owner: nn.Module, captures: bool) -> None:
    """What may change after the call. Raises ValueError for batch normalisation over the items that
    a rank encodes, which model.train() switches on where it was in eval mode. transformers finds
    the hidden states to record by the name of the tower's class, which fully_shard changes: then
    the model fails with or without balancing, and ValueError says so."""
    for path, tower in encoder.tower_modules(owner):
        for name, module in tower.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not _frozen(module):
                raise ValueError(
                    f"encoder {encoder.name!r}: {'.'.join(p for p in (path, name) if p)} is a "
                    f"{type(module).__name__}, whose result depends on the other items of the "
                    "rank: use another normalisation, or freeze its parameters and put it in eval "
                    "mode after each model.train()")
        if captures and isinstance(tower, FSDPModule):
            raise ValueError(
                f"encoder {encoder.name!r}: {path} was given to fully_shard, which renames its "
                "class, and transformers then records no hidden states, which this model reads: "
                "give the layers of the tower to fully_shard, not the tower itself")


def _frozen(module: nn.Module) -> bool:
    return not module.training and not any(p.requires_grad for p in module.parameters())


def _check_config(encoder: Encoder, path: str, config: Any) -> None:
    for name in _RANDOM:
        value = getattr(config, name, 0)
        if isinstance(value, float | int) and value > 0:
            raise ValueError(f"encoder {encoder.name!r}: {path}.config.{name} is {value}: its "
                             "random masks would depend on where an item is encoded; set it to 0 "
                             "before the model is built")
