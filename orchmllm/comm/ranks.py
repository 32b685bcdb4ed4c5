"""The ranks of a process group, and those of them that share a node."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist

from orchmllm.launch import current_world


def rank_list(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks of a group (default: all). Raises ValueError if this process is not in it, or
    if there is no process group."""
    if not dist.is_initialized():
        raise ValueError("torch.distributed is not initialised: start under torchrun and call "
                         "init_process_group first (one process is a group of one)")
    ranks = list(range(dist.get_world_size())) if group is None else (
        dist.get_process_group_ranks(group))
    if dist.get_rank() not in ranks:
        raise ValueError(f"rank {dist.get_rank()} is not in the group {ranks}")
    return ranks


def node_size(ranks: Sequence[int], given: int) -> int:
    """Consecutive ranks of the group that share a node: as given, else from the launcher. Raises
    ValueError for a negative number."""
    if given < 0:
        raise ValueError(f"ranks_per_node is {given}: must be >= 0")
    world = current_world()
    if given or world is None:
        return given or len(ranks)
    return sum(r // world.local_world_size == ranks[0] // world.local_world_size for r in ranks)
