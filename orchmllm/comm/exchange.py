"""Everything that calls collectives for data.

`RowGather` gathers small integer rows over CPU groups of its own, in two levels (inside the node,
between node leaders, and back), so that no gloo group spans the world: such a group is a full mesh
of TCP connections. `exchange_rows` is the batch communicator of OrchMLLM section 5.2.1: an
all-to-all of rows that is differentiable.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from orchmllm.batch import on_device
from orchmllm.launch import current_world
from orchmllm.plan.assign import digest64
from orchmllm.plan.rearrange import Exchange

# torch 2.13 renamed it, and warns of the name before.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
# Their numbers by members, of each default group, which a program may make anew.
_meetings: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter] = weakref.WeakKeyDictionary()
_groups: list[dist.ProcessGroupGloo] = []
atexit.register(_groups.clear)


class RowGather:
    """Gathers one int64 row per rank to all ranks, on CPU groups that one thread must own.

    Every rank has to construct it at the same place of its program. ranks_per_node: consecutive
    ranks that share a node; the last node may hold fewer. ranks: global ranks that take part, in
    the order that counts as their rank here (default: all); every rank of the job constructs it,
    with the `ranks` that it is part of. Raises ValueError for ranks_per_node < 1."""

    closed_thread: threading.Thread | None = None  # of the last loader over it that was closed

    def __init__(
        self, ranks_per_node: int, timeout_s: float = 600.0, ranks: Sequence[int] | None = None
    ) -> None:
        ranks = list(range(dist.get_world_size()) if ranks is None else ranks)
        self.rank, self.world_size = ranks.index(dist.get_rank()), len(ranks)
        if ranks_per_node < 1:
            raise ValueError(f"ranks_per_node is {ranks_per_node}: must be >= 1")
        self.per_node = min(ranks_per_node, self.world_size)
        first = self.rank // self.per_node * self.per_node
        self.node = range(first, min(first + self.per_node, self.world_size))
        leaders = range(0, self.world_size, self.per_node)
        self.num_nodes = len(leaders)
        self._is_leader = self.rank == first
        self._node_group = gloo_group([ranks[r] for r in self.node], timeout_s)
        if self._is_leader and self.num_nodes > 1:
            self._leader_group = gloo_group([ranks[r] for r in leaders], timeout_s)

    def __call__(self, row: np.ndarray) -> np.ndarray:
        """row (L,) int64, the same L on all ranks -> (world_size, L)."""
        mine = torch.from_numpy(np.ascontiguousarray(row, np.int64))
        rows = [torch.empty_like(mine) for _ in self.node]
        self._node_group.allgather([rows], [mine]).wait()
        if self.num_nodes == 1:
            return torch.stack(rows).numpy()
        world = torch.zeros(self.num_nodes * self.per_node, len(row), dtype=torch.int64)
        if self._is_leader:
            block = torch.zeros(self.per_node, len(row), dtype=torch.int64)
            block[: len(rows)] = torch.stack(rows)
            self._leader_group.allgather([list(world.chunk(self.num_nodes))], [block]).wait()
        self._node_group.broadcast(world, 0).wait()
        return world[: self.world_size].numpy()

    def from_first(self, data: bytes = b"") -> bytes:
        """The first rank's `data`, on all ranks; what the others pass does not matter."""
        size = torch.tensor([len(data)])
        self._broadcast(size)
        out = torch.zeros(int(size), dtype=torch.uint8)
        if self.rank == 0:
            out = torch.from_numpy(np.frombuffer(data, np.uint8).copy())
        if len(out):
            self._broadcast(out)
        return out.numpy().tobytes()

    def _broadcast(self, row: Tensor) -> None:
        if self._is_leader and self.num_nodes > 1:
            self._leader_group.broadcast(row, 0).wait()
        self._node_group.broadcast(row, 0).wait()


class RaggedGather:
    """Gathers one int64 row of any length per rank over `gather`. Rows travel padded to a capacity;
    where one does not fit, all ranks raise it alike and gather again. capacity: to begin with."""

    def __init__(self, gather: RowGather, capacity: int) -> None:
        self._gather, self._capacity = gather, capacity

    def __call__(self, row: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """row (L,) -> (rows (d, capacity) of all ranks, filled with zeros; their lengths (d,))."""
        while True:
            sent = np.zeros(1 + self._capacity, np.int64)
            sent[0] = len(row)
            sent[1: 1 + len(row)] = row[: self._capacity]
            rows = self._gather(sent)
            longest = int(rows[:, 0].max())
            if longest <= self._capacity:
                return rows[:, 1:], rows[:, 0]
            self._capacity = 1 << (longest - 1).bit_length()


class Sent(NamedTuple):
    """Numbers of all ranks on their way to the host. rows (d, numbers): on the device. at: when
    they were sent, by the host's clock."""

    rows: Tensor
    host: Tensor
    arrived: torch.cuda.Event | None
    at: float

    def read(self) -> np.ndarray:
        """(d, numbers) float64; waits for them."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.host.numpy()

    def seconds_until(self, later: Sent) -> float:
        """Between their arrivals, by the device's clock where it has one. Both have been read."""
        if self.arrived is None:
            return later.at - self.at
        return 1e-3 * self.arrived.elapsed_time(later.arrived)


def send_scalars(values: Sequence[float | Tensor], device: torch.device) -> Sent:
    """Gathers numbers of all ranks on the default group, in float64. Tensors (0-d, on `device`)
    stay there until everything is copied to the host at once; nothing waits."""
    host = [0.0 if isinstance(v, Tensor) else v for v in values]
    mine = on_device(torch.tensor(host, dtype=torch.float64), device)
    for i, value in enumerate(values):
        if isinstance(value, Tensor):
            mine[i].copy_(value)
    rows = mine.new_empty(dist.get_world_size() * len(mine))
    all_gather_single(rows, mine)
    rows = rows.reshape(-1, len(mine))
    host, arrived = rows.to("cpu", non_blocking=True), None  # in pinned memory
    if rows.device.type == "cuda":
        # blocking: a core that waits is free for data workers.
        arrived = torch.cuda.Event(enable_timing=True, blocking=True)
        arrived.record()
    return Sent(rows, host, arrived, time.perf_counter())


def gather_scalars(values: Sequence[float | Tensor], device: torch.device) -> np.ndarray:
    """(d, len(values)) float64 of all ranks, as send_scalars."""
    return send_scalars(values, device).read()


def gather_texts(
    gather: RowGather, text: str, num_bytes: np.ndarray | None = None
) -> list[str]:
    """A text of every rank, on every rank. num_bytes (d,): their sizes in UTF-8, if those were
    gathered before; where all are 0 nothing is sent."""
    data = text.encode()
    if num_bytes is None:
        num_bytes = gather(np.array([len(data)], np.int64))[:, 0]
    longest = int(num_bytes.max())
    if longest == 0:
        return [""] * gather.world_size
    row = np.zeros(-(-longest // 8) * 8, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    rows = gather(row.view(np.int64)).view(np.uint8)
    return [rows[r, : num_bytes[r]].tobytes().decode() for r in range(gather.world_size)]


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


def meeting(ranks: Sequence[int]) -> dist.Store:
    """A new store of `ranks` (global), named after them and how many they had before: any two ranks
    have to ask for those that they share in one order, whatever each shares with others."""
    made = _meetings.setdefault(dist.group.WORLD, Counter())
    members = tuple(ranks)
    name = f"orchmllm/{digest64(repr(members).encode()):x}/{made[members]}"
    made[members] += 1
    return dist.PrefixStore(name, dist.distributed_c10d._get_default_store())


def gloo_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroupGloo:
    """A CPU group of `ranks` (global), made by them alone, see `meeting`.

    Not dist.new_group: called by all ranks for all groups it takes long in a large world, and with
    local synchronisation torch names a group after the number of groups that the process has, so
    ranks on which the program made unequally many wait for each other for ever."""
    group = dist.ProcessGroupGloo(meeting(ranks), list(ranks).index(dist.get_rank()), len(ranks),
                                  timedelta(seconds=timeout_s))
    # Kept to the end of the process: a forked worker that collected its copy would crash on the
    # group's threads, which a fork does not copy.
    _groups.append(group)
    return group


def node_group(nodes: Sequence[range], device: torch.device, timeout_s: float
               ) -> dist.ProcessGroup:
    """The group of the ranks of this rank's node, for exchanges in the training thread; every rank
    of the job calls it at the same place. nodes: that of each rank."""
    if device.type == "cpu":
        return gloo_group(nodes[dist.get_rank()], timeout_s)
    # With NCCL each dist.new_group would be a collective of all ranks, also of those outside it.
    return dist.split_group(split_ranks=[list(node) for node in dict.fromkeys(nodes)],
                            timeout=timedelta(seconds=timeout_s))


def exchange_group(device: torch.device, timeout_s: float) -> dist.ProcessGroup | None:
    """The group of all ranks for exchanges in the training thread; every rank of the job calls it
    at the same place. On a GPU it has a communicator of its own: on that of FSDP2 an exchange would
    wait for the parameters that are gathered ahead. On a CPU it is the default group (None), as a
    further one would be a mesh of connections between all ranks and would gain nothing."""
    if device.type == "cpu":
        return None
    return dist.new_group(timeout=timedelta(seconds=timeout_s))


class _AllToAllRows(torch.autograd.Function):
    """Rows to their ranks; the backward pass sends gradients the same way back. once: whether each
    row goes to one rank."""

    @staticmethod
    def forward(ctx, x, send_index, recv_index, exchange, group, once):
        ctx.save_for_backward(send_index, recv_index)
        ctx.exchange, ctx.group = exchange, group
        ctx.num_rows = None if once else len(x)
        received = all_to_all(x.index_select(0, send_index), exchange.output_splits.tolist(),
                              exchange.input_splits.tolist(), group)
        return received.index_select(0, recv_index)

    @staticmethod
    @once_differentiable  # what is exchanged here has no graph: a second derivative would lack it
    def backward(ctx, grad):
        send_index, recv_index = ctx.saved_tensors
        splits = ctx.exchange.input_splits.tolist()
        returned = all_to_all(_placed(grad, recv_index), splits,
                              ctx.exchange.output_splits.tolist(), ctx.group)
        found = (_placed(returned, send_index) if ctx.num_rows is None
                 else _summed(returned, send_index, splits, ctx.num_rows))
        return found, *(None,) * 5


def _placed(rows: Tensor, index: Tensor) -> Tensor:
    """Inverse of index_select by a permutation."""
    return torch.empty_like(rows).index_copy_(0, index, rows)


def _summed(rows: Tensor, index: Tensor, splits: list[int], num_rows: int) -> Tensor:
    """What comes back of `num_rows` rows, which may have gone to several ranks, or to none: their
    sums, in float32 at least, rank by rank, so that their order is fixed. splits: rows of each
    rank."""
    out = rows.new_zeros((num_rows, *rows.shape[1:]),
                         dtype=torch.promote_types(rows.dtype, torch.float32))
    for some, at in zip(rows.split(splits), index.split(splits), strict=True):
        out.index_add_(0, at, some.to(out.dtype))
    return out.to(rows.dtype)


def all_to_all(
    rows: Tensor, output_splits: list[int], input_splits: list[int], group: dist.ProcessGroup | None
) -> Tensor:
    """rows (sum of input_splits, ...) -> (sum of output_splits, ...), in order of the rank."""
    out = rows.new_empty((sum(output_splits), *rows.shape[1:]))
    if isinstance(group, dist.ProcessGroupGloo):  # made by gloo_group
        _all_to_some(out, rows.contiguous(), output_splits, input_splits, group)
    else:
        dist.all_to_all_single(out, rows.contiguous(), output_splits, input_splits, group=group)
    return out


def _all_to_some(
    out: Tensor, rows: Tensor, output_splits: list[int], input_splits: list[int],
    group: dist.ProcessGroupGloo,
) -> None:
    """Sends and receives what is not empty, so that a lazily connected group stays no mesh."""
    works, me = [], group.rank()
    sizes = np.array([output_splits, input_splits])
    ends = sizes.cumsum(axis=1)
    for rank in np.flatnonzero(sizes.any(axis=0)).tolist():
        there, here = (x[end - size: end] for x, end, size in zip(
            (out, rows), ends[:, rank], sizes[:, rank], strict=True))
        if rank == me:
            there.copy_(here)
            continue
        works += [group.recv([there], rank, 0)] if len(there) else []
        works += [group.send([here], rank, 0)] if len(here) else []
    for work in works:
        work.wait()


def exchange_rows(
    x: Tensor, exchange: Exchange, group: dist.ProcessGroup | None = None
) -> Tensor:
    """Moves rows to the ranks and slots of `exchange` (differentiable in x).

    x (R_in, ...) any dtype -> (R_out, ...), on x's device; group: the process group whose ranks the
    exchange was planned for (default: all). An exchange that moves
    nothing on any rank issues no collective on any rank. Raises ValueError if x does not have the
    planned number of rows. OrchMLLM sections 5.2.1 and 6.
    """
    if len(x) != len(exchange.send_index):
        raise ValueError(f"exchange_rows got {len(x)} rows, the plan says "
                         f"{len(exchange.send_index)}: rows and lengths of a segment disagree")
    if not exchange.moves:
        order = exchange.send_index[exchange.recv_index]
        stays = np.array_equal(order, np.arange(len(x)))
        return x if stays else x.index_select(0, on_device(order, x.device))
    send, recv = (on_device(i, x.device) for i in (exchange.send_index, exchange.recv_index))
    return _AllToAllRows.apply(x, send, recv, exchange, group, True)


def send_rows(x: Tensor, send: Tensor, recv: Tensor, exchange: Exchange,
              group: dist.ProcessGroup | None) -> Tensor:
    """exchange_rows where rows may go to several ranks, or to none. x: (R, ...); send, recv: the
    indices of the exchange, on x's device. Collective, whatever moves."""
    return _AllToAllRows.apply(x, send, recv, exchange, group, False)
