"""When FSDP2 gathers the parameters of which unit: at most once for a forward pass and once for a
backward pass, and not at all where nothing reads them (orchmllm.sharding.units.gathers says how
often).

The embedding and a frozen encoder are not read in the backward pass. The head's backward pass
follows its forward pass at once, so it stays gathered, as does the model's root.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

from orchmllm.comm.fsdp import param_groups
from orchmllm.config.recipe import FsdpConfig


class ShardUnit(NamedTuple):
    """reshard: full, node or none, what is freed after the forward pass. backward: the backward
    pass reads the parameters."""

    module: nn.Module
    reshard: str
    backward: bool = True


def shard_units(orders: tuple[list[ShardUnit], list[ShardUnit]], config: FsdpConfig,
                ranks_per_node: int, options: dict[str, Any]) -> None:
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
            shared = param_groups(unit.module)[0].post_forward_mesh_info
        elif unit.reshard == "node" and part:
            _share_mesh(unit.module, shared)
        unit.module.set_unshard_in_backward(unit.backward)
    if config.prefetch:
        _set_prefetch(forward, backward, config.prefetch)


def of_encoder(module: nn.Module, reshard: str) -> ShardUnit:
    """The unit of an encoder or of one of its blocks, which has no backward pass if nothing in it
    learns."""
    learns = any(p.requires_grad for p in module.parameters())
    return ShardUnit(module, reshard if learns else "full", learns)


def _share_mesh(unit: FSDPModule, mesh: Any) -> None:
    """fully_shard would make process groups of its own for every unit that is given a number of
    ranks, on NCCL a communicator each."""
    for group in param_groups(unit):
        for owner in (group, *group.fsdp_params):
            owner.post_forward_mesh_info = mesh


def _set_prefetch(forward: Sequence[ShardUnit], backward: Sequence[ShardUnit], ahead: int) -> None:
    """Every unit gathers the next `ahead` units while it computes, across the phases' borders too:
    the first LLM layers arrive while the last audio block runs."""
    for order, choose in ((forward, FSDPModule.set_modules_to_forward_prefetch),
                          (backward, FSDPModule.set_modules_to_backward_prefetch)):
        for index, unit in enumerate(order):
            read = (u.module for u in order[index + 1:] if order is forward or u.backward)
            choose(unit.module, list(islice(read, ahead)))
