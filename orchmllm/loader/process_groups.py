"""The process groups of a loader."""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import numpy as np
import torch.distributed as dist

from orchmllm.comm.agree import PlanMismatchError
from orchmllm.comm.exchange import RowGather, gloo_group, meeting, node_size


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
        """The first that is idle on all ranks, which may drop a loader at different times, and its
        thread may end later still."""
        if not self.links:
            return None
        self.control = self.control or RowGather(per_node, timeout_s, ranks)
        threads = [links.gather.closed_thread for links in self.links]
        mine = np.array([k in self.idle and not (thread and thread.is_alive())
                         for k, thread in enumerate(threads)], np.int64)
        free = np.flatnonzero(self.control(mine).all(axis=0))
        return int(free[0]) if len(free) else None


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple, _Made]] = (
    weakref.WeakKeyDictionary())  # by the default group, which a program may make anew


def agree(ranks: Sequence[int], arguments: Mapping[str, Any], timeout_s: float) -> None:
    """Raises PlanMismatchError on all ranks, naming the argument, where one of them has others than
    the first. Before a group is made: the arguments decide which."""
    store, limit = meeting(ranks), timedelta(seconds=timeout_s)
    mine = {name: repr(value) for name, value in arguments.items()}
    if dist.get_rank() == ranks[0]:
        store.set("first", json.dumps(mine))
    try:
        store.wait(["first"], limit)
        first = json.loads(store.get("first"))
        for name, value in mine.items():
            if value != first.get(name):
                store.set("differs", f"{name} is {first.get(name)} on rank {ranks[0]} and {value} "
                                     f"on rank {dist.get_rank()}")
                break
        if store.add("joined", 1) == len(ranks):
            store.set("found", store.get("differs") if store.check(["differs"]) else "nothing")
        store.wait(["found"], limit)
    except RuntimeError as error:
        raise RuntimeError(
            f"not all of the ranks {_shown(ranks)} made a BalancedDataLoader within timeout_s = "
            f"{timeout_s:g}; all ranks of its group make it together ({error})") from error
    found = store.get("found").decode()
    if found != "nothing":
        raise PlanMismatchError(f"BalancedDataLoader: {found}: give all ranks the same")


def _shown(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks)) if len(ranks) < 9 else f"{ranks[0]} ... {ranks[-1]}"


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
        cpu=gloo_group(members, timeout_s) if cpu else None)
