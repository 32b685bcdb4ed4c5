"""When FSDP2 gathers the parameters of which unit: at most once for a forward pass and once for a
backward pass, and not at all where nothing reads them (orchmllm.sharding.units.gathers says how
often).

The embedding and a frozen encoder are not read in the backward pass, so a connector that learns
behind a frozen encoder is a unit of its own. The head's backward pass follows its forward pass at
once, so it stays gathered, as does the model's root, which holds one norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from orchmllm.config.recipe import FsdpConfig
from orchmllm.models.audio import AudioEncoder
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.vision import VisionEncoder


class Unit(NamedTuple):
    """reshard: full, node or none, what is freed after the forward pass. backward: the backward
    pass reads the parameters."""

    module: nn.Module
    reshard: str
    backward: bool = True


def shard_units(orders: tuple[list[Unit], list[Unit]], config: FsdpConfig, ranks_per_node: int,
                options: dict[str, Any]) -> None:
    """fully_shard on every unit, in place; collective over all ranks. orders: the units in the
    order of the forward pass and in that of the backward pass. ranks_per_node: consecutive
    ranks that a unit is sharded over between forward and backward where its choice is `node`; where
    that is no part of a shard group, `node` is the same as `full`. options: of fully_shard."""
    forward, backward = orders
    mesh = options["mesh"]
    group = mesh.size(mesh.ndim - 1)
    part = 1 < ranks_per_node < group and group % ranks_per_node == 0
    shared = None
    for unit in reversed(forward):  # blocks before the module around them
        first_of_node = unit.reshard == "node" and part and shared is None
        fully_shard(unit.module, **options,
                    reshard_after_forward=ranks_per_node if first_of_node else
                    unit.reshard != "none")
        if first_of_node:
            shared = _groups(unit.module)[0].post_forward_mesh_info
        elif unit.reshard == "node" and part:
            _share_mesh(unit.module, shared)
        unit.module.set_unshard_in_backward(unit.backward)
    if config.prefetch:
        _set_prefetch(forward, backward, config.prefetch)


def ordered(model: MultimodalModel, config: FsdpConfig) -> tuple[list[Unit], list[Unit]]:
    """The units in the order of the forward pass and in that of the backward pass, in which an
    encoder's own unit, and the connector's, come before its blocks."""
    towers = [_tower(model.vision, config.reshard("vision")),
              _tower(model.audio, config.reshard("audio"))]
    root, head = Unit(model, "none"), Unit(model.llm.lm_head, "none")
    embed = Unit(model.llm.embed_tokens, "full", backward=False)
    layers = [Unit(layer, config.reshard("llm")) for layer in model.llm.layers]
    forward = [root, *chain(*towers), embed, *layers, head]
    backward = [head, root, *reversed(layers), embed]
    for own, *blocks in reversed(towers):
        backward += [own, *reversed(blocks)]
    return forward, backward


def _tower(encoder: VisionEncoder | AudioEncoder, reshard: str) -> list[Unit]:
    """The units of an encoder in the order of the forward pass. Its connector is in the first one,
    or the last one where the connector alone learns."""
    own, *blocks = [of_encoder(m, reshard) for m in (encoder, *encoder.blocks)]
    if own.backward and not blocks[0].backward:
        return [Unit(encoder, "full", backward=False), *blocks, Unit(encoder.connector, reshard)]
    return [own, *blocks]


def of_encoder(module: nn.Module, reshard: str) -> Unit:
    """The unit of an encoder or of one of its blocks, which has no backward pass if nothing in it
    learns."""
    learns = any(p.requires_grad for p in module.parameters())
    return Unit(module, reshard if learns else "full", learns)


def _groups(unit: FSDPModule) -> list:
    """FSDP2's own records of a unit's parameters (torch 2.12 made a list of the one)."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return list(groups) if groups is not None else [state._fsdp_param_group]


def _share_mesh(unit: FSDPModule, mesh: Any) -> None:
    """fully_shard would make process groups of its own for every unit that is given a number of
    ranks, on NCCL a communicator each."""
    for group in _groups(unit):
        for owner in (group, *group.fsdp_params):
            owner.post_forward_mesh_info = mesh


def _set_prefetch(forward: Sequence[Unit], backward: Sequence[Unit], ahead: int) -> None:
    """Every unit gathers the next `ahead` units while it computes, across the phases' borders too:
    the first LLM layers arrive while the last audio block runs."""
    for order, choose in ((forward, FSDPModule.set_modules_to_forward_prefetch),
                          (backward, FSDPModule.set_modules_to_backward_prefetch)):
        for index, unit in enumerate(order):
            read = (u.module for u in order[index + 1:] if order is forward or u.backward)
            choose(unit.module, list(islice(read, ahead)))
