"""Which ranks share the data: those of a process group, or the data-parallel ones of a device mesh.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch.distributed as dist

from orchmllm.comm.exchange import rank_list

# Dimensions of meshes by their names in PyTorch's examples, torchtitan, transformers, accelerate
# and Lightning.
_DATA = {"dp", "ddp", "fsdp", "dp_replicate", "dp_shard", "replicate", "shard", "data_parallel"}
_REPLICA = {"tp", "cp", "sp", "pp", "tensor_parallel"}  # whose ranks need the same examples
_CURE = 'give the process group of the ranks that share the data, such as mesh["fsdp"].get_group()'


def data_ranks(group: dist.ProcessGroup | dist.DeviceMesh | None) -> list[int]:
    """Global ranks that share the data with this one, itself among them. group: these ranks, or a
    mesh with names; None: those of accelerate's mesh where it has one, else all. Raises ValueError
    if this process is not among them, or a mesh does not say which they are."""
    state = sys.modules.get("accelerate.state")
    if group is None and state is not None:
        group = state.AcceleratorState._shared_state.get("device_mesh")
    return _of_mesh(group) if isinstance(group, dist.DeviceMesh) else rank_list(group)


def _of_mesh(mesh: dist.DeviceMesh) -> list[int]:
    """The ranks of the mesh that differ from this one in data-parallel dimensions alone."""
    names, at = mesh.mesh_dim_names or ("",) * mesh.ndim, mesh.get_coordinate()
    if at is None:
        raise ValueError(f"rank {dist.get_rank()} is not in {mesh}")
    if mesh.ndim == 1 and not _REPLICA & {*names, *names[0].split("_")}:  # as in dp_shard_cp
        return mesh.mesh.tolist()
    for name, size in zip(names, mesh.shape, strict=True):
        if size > 1 and name not in _DATA | _REPLICA:
            raise ValueError(f"{mesh}: the name {name!r} of a dimension does not say whether its "
                             f"ranks need the same examples; {_CURE}")
    place = (slice(None) if name in _DATA else k for name, k in zip(names, at, strict=True))
    return mesh.mesh[tuple(place)].flatten().tolist()


def trainer_group(trainer: Any) -> dist.DeviceMesh | None:
    """The mesh of a model that transformers loaded by a DistributedConfig; None: see data_ranks.
    Raises ValueError where ranks of the Trainer have to share examples and no mesh says which."""
    manager = getattr(trainer.model, "_mesh_manager", None)
    mesh = manager and manager.get_mesh(("pp", "dp_replicate", "fsdp", "tp"))
    sizes = {f"{n}_size": getattr(trainer, f"get_{n}_size")() for n in ("tp", "cp", "sp")}
    ranks = data_ranks(mesh)
    if len(ranks) * math.prod(sizes.values()) != dist.get_world_size():
        raise ValueError(
            f"{sizes}, and by the device mesh ranks {ranks} of {dist.get_world_size()} share the "
            f"data: the ranks of a replica need the same examples, and which these are is not "
            f"known. Give group=: {_CURE}")
    return mesh


def refuse_parts(trainer: Any) -> None:
    """Raises ValueError where a rank of the Trainer has the mean over a part of its sequences."""
    sizes = {f"{n}_size": getattr(trainer, f"get_{n}_size")() for n in ("cp", "sp")}
    if math.prod(sizes.values()) > 1:
        raise ValueError(f"a loss that is a mean, with {sizes}: each rank has that of a part of "
                         "its sequences, whose targets are not counted; divide the loss by "
                         "num_items_in_batch")


def check_group(loader: Any, group: dist.ProcessGroup | dist.DeviceMesh | None) -> None:
    """Raises ValueError if a BalancedDataLoader is not over the ranks of a Trainer's group."""
    ranks = data_ranks(group)
    if loader.num_ranks != len(ranks):
        raise ValueError(f"the BalancedDataLoader is over {loader.num_ranks} ranks, but ranks "
                         f"{ranks} share the data: give it group=")
