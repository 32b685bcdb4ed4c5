"""FSDP2's own records of the modules that were given to it."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FSDPModule


def param_groups(unit: FSDPModule) -> list:
    """The records of a unit's parameters (torch 2.12 made a list of the one)."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    found = [state._fsdp_param_group] if groups is None else groups
    return [group for group in found if group is not None]


def ranks_of(model: nn.Module, part: nn.Module) -> set[tuple[frozenset[int], bool]]:
    """The global ranks over which FSDP2 shards, and reduces the gradients of, parameters of `part`;
    whether these have gradients. Parameters of units that are not within `model` are left out."""
    modules = set(part.modules())
    return {(frozenset(group.mesh_info.mesh.mesh.flatten().tolist()),
             parameter.sharded_param.requires_grad)
            for unit in model.modules() if isinstance(unit, FSDPModule)
            for group in param_groups(unit) for parameter in group.fsdp_params
            if parameter._module_info.module in modules}
