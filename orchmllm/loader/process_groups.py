"""The process groups of a loader."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np
import torch.distributed as dist

from orchmllm.comm.exchange import RowGather, bytes_group, node_size


class Links(NamedTuple):
    """Groups of one loader. rank: in the group of num_ranks. shard: ranks of the group that are
    planned together, this one among them. gather: among the shard; everyone: among all, if that is
    more. cpu: group for bytes."""

    rank: int
    num_ranks: int
    shard: range
    gather: RowGather
    everyone: RowGather | None
    cpu: dist.ProcessGroup | None


class _Made:
    """Links of one kind that this process has made, in the order in which all ranks made them, and
    the numbers of those whose loader is no more."""

    def __init__(self) -> None:
        self.links: list[Links] = []
        self.idle: set[int] = set()
        self.control: RowGather | None = None

    def common_idle(self, ranks: list[int], per_node: int, timeout_s: float) -> int | None:
        """The first that is idle on all ranks, which may drop a loader at different times."""
        if not self.links:
            return None
        self.control = self.control or RowGather(per_node, timeout_s, ranks)
        mine = np.array([k in self.idle for k in range(len(self.links))], np.int64)
        free = np.flatnonzero(self.control(mine).all(axis=0))
        return int(free[0]) if len(free) else None


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, _Made]] = (
    weakref.WeakKeyDictionary())  # by the default group, which a program may make anew


def connect(
    owner: object, ranks: list[int], shard_size: int, ranks_per_node: int, timeout_s: float, *,
    cpu: bool,
) -> Links:
    """The groups of a loader, made by all ranks in one order, or those of one that is no more: a
    group costs descriptors and threads to the end of the process. owner: the loader. Raises
    ValueError."""
    key = tuple(ranks), shard_size, ranks_per_node, timeout_s, cpu
    made = _made.setdefault(dist.group.WORLD, {}).setdefault(key, _Made())
    number = made.common_idle(ranks, node_size(ranks, ranks_per_node), timeout_s)
    if number is None:
        number = len(made.links)
        made.links.append(_connect(ranks, shard_size, ranks_per_node, timeout_s, cpu))
    made.idle.discard(number)
    weakref.finalize(owner, made.idle.add, number).atexit = False
    return made.links[number]


def _connect(
    ranks: list[int], shard_size: int, ranks_per_node: int, timeout_s: float, cpu: bool
) -> Links:
    size, mine = shard_size or len(ranks), ranks.index(dist.get_rank())
    if size < 1 or len(ranks) % size:
        raise ValueError(f"shard_size is {shard_size}: must divide the {len(ranks)} ranks")
    shard = range(mine // size * size, mine // size * size + size)
    members = [ranks[r] for r in shard]
    per_node = min(node_size(members, ranks_per_node), size)
    gather = RowGather(per_node, timeout_s, members)
    everyone = (RowGather(node_size(ranks, ranks_per_node), timeout_s, ranks)
                if size < len(ranks) else None)
    return Links(
        rank=mine, num_ranks=len(ranks), shard=shard, gather=gather, everyone=everyone,
        cpu=bytes_group(members, timeout_s) if cpu else None)
