"""What the ranks of a job find out together: who is there, whether every node is reached and how
fast. All waiting is bounded, and what is known of a rank that is late or dead is told by rank 0.

Nodes (ranks, on a single node) meet in pairs: in round k those whose numbers differ in bit k, so
that log2(n) rounds connect all of them. Each pair has a connection of its own, as a broken one must
not spoil another.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from orchmllm.comm.exchange import all_gather_single
from orchmllm.launch import World, hosts_store
from orchmllm.models.gpus import GPUS, kind_of
from orchmllm.tools.doctor.machine import BOUNDED_THREAD, Check, bounded

FIRST_BYTES, MOST_BYTES = 1 << 20, 16 << 20  # that a pair sends each way
FAST_S = 0.05  # for the first bytes: then the most are sent, too
MOST_GATHERED = 1 << 28  # bytes of all ranks together
FAST_NODE = 100e9  # bytes/s that NVLink passes in an all-gather
NCCL_CURE = ("set NCCL_DEBUG=INFO and, between nodes, NCCL_SOCKET_IFNAME to the interface "
             "towards the others")
NCCL_SLOW = {
    "NCCL in a node": "NCCL_DEBUG=INFO names the path of each pair: with P2P over NVLink it is "
                      "several times faster; nvidia-smi topo -m and nvlink -s show the links, and "
                      "a container needs --ipc=host or a larger /dev/shm",
    "NCCL between nodes": "NCCL sends by TCP, which is no faster than gloo: NCCL_DEBUG=INFO names "
                          "the network (NET/IB or a plugin); give the container its RDMA devices, "
                          "and set NCCL_IB_HCA"}


@dataclass
class Meeting:
    """The ranks that came in time: rank -> (host, rank on its node)."""

    store: dist.Store
    world: World
    present: dict[int, tuple[str, int]]
    timeout_s: float

    def report(self, checks: list[Check], pairs: list[dict], at: str) -> None:
        """To rank 0. at: what this rank does next, empty when it is done."""
        self.store.set(f"found/{self.world.rank}", json.dumps([checks, pairs, at]))

    def gather(self) -> tuple[dict[int, list[Check]], list[dict], dict[int, str]]:
        """Of all ranks: checks, pairs, and what those did last that were not done in time."""
        deadline, found = time.monotonic() + self.timeout_s, {}
        while time.monotonic() < deadline:
            for rank in self.present.keys() - {r for r, (*_, at) in found.items() if not at}:
                if self.store.check([f"found/{rank}"]):
                    found[rank] = json.loads(self.store.get(f"found/{rank}"))
            if len(found) == len(self.present) and not any(at for *_, at in found.values()):
                break
            time.sleep(0.05)
        late = {r: found[r][2] if r in found else "its own checks" for r in self.present
                if r not in found or found[r][2]}
        return ({r: [Check(*c) for c in found[r][0]] for r in sorted(found)},
                [p for r in sorted(found) for p in found[r][1]], late)


def meet(world: World, timeout_s: float) -> Meeting:
    """Waits for all ranks, at most timeout_s. Raises RuntimeError if the store of rank 0 cannot be
    reached."""
    store = dist.PrefixStore(f"doctor{world.attempt}", dist.TCPStore(
        world.master_addr, world.master_port, world.world_size, is_master=hosts_store(world),
        timeout=timedelta(seconds=timeout_s), wait_for_workers=False))
    store.set(f"here/{world.rank}", json.dumps([socket.gethostname(), world.local_rank]))
    if world.rank == 0:
        keys = [f"here/{r}" for r in range(world.world_size)]
        deadline = time.monotonic() + timeout_s
        while not store.check(keys) and time.monotonic() < deadline:
            time.sleep(0.05)
        store.set("present", json.dumps({r: json.loads(store.get(key))
                                         for r, key in enumerate(keys) if store.check([key])}))
    store.wait(["present"], timedelta(seconds=2 * timeout_s))
    present = {int(r): tuple(who) for r, who in json.loads(store.get("present")).items()}
    return Meeting(store, world, present, timeout_s)


def pairs_of(members: list[int], rank: int) -> list[tuple[int, int]]:
    """(round, partner) of a rank among those that take part."""
    if rank not in members:
        return []
    mine = members.index(rank)
    rounds = range((len(members) - 1).bit_length())
    return [(k, members[mine ^ 1 << k]) for k in rounds if mine ^ 1 << k < len(members)]


def meet_in_pairs(meeting: Meeting) -> list[dict]:
    """This rank's pairs, both ranks of which describe it: ranks, and bytes_per_s each way or error.
    """
    rank, found = meeting.world.rank, []
    nodes = {r for r, (_, place) in meeting.present.items() if place == 0}
    members = sorted(nodes if len(nodes) > 1 else meeting.present)
    for k, partner in pairs_of(members, rank):
        one = {"ranks": [rank, partner]}
        try:  # a partner is late by what its rounds before have waited
            limit = meeting.timeout_s / 4 * (k + 1)
            name = f"pair{k}/{min(rank, partner)}"
            one["bytes_per_s"] = bounded(partial(
                _bytes_per_s, dist.PrefixStore(name, meeting.store), int(rank > partner), limit),
                limit)
        except Exception as e:
            one["error"] = _first_line(e)
        found.append(one)
    return found


def _bytes_per_s(store: dist.Store, me: int, timeout_s: float) -> float:
    """What a pair's link carries each way at the same time."""
    group = dist.ProcessGroupGloo(store, me, 2, timedelta(seconds=timeout_s))

    def swap(sent: torch.Tensor) -> tuple[torch.Tensor, float]:
        """(what the other one sent, seconds)."""
        got, started = torch.empty_like(sent), time.perf_counter()
        works = [group.recv([got], 1 - me, 0), group.send([sent], 1 - me, 0)]
        for work in works:
            work.wait()
        return got, time.perf_counter() - started

    swap(torch.zeros(1))  # connects

    def slower(seconds: float) -> float:
        """Of both ranks: what is sent may still be in a buffer."""
        return max(seconds, float(swap(torch.tensor([seconds], dtype=torch.float64))[0]))

    size, seconds = FIRST_BYTES, slower(swap(torch.zeros(FIRST_BYTES, dtype=torch.uint8))[1])
    if seconds < FAST_S:
        much = torch.zeros(MOST_BYTES, dtype=torch.uint8)
        size, seconds = MOST_BYTES, slower(min(swap(much)[1] for _ in range(3)))
    return size / seconds


def is_left_behind() -> bool:
    """Whether a bounded thread still runs, for which the interpreter would wait."""
    return any(t.name == BOUNDED_THREAD for t in threading.enumerate())


def nccl(meeting: Meeting, device: torch.device, pairs: list[dict]) -> list[Check]:
    """All-gathers of the GPUs of this node, and of those of all nodes. pairs: of this rank, with
    which the latter is compared."""
    world, size = meeting.world, meeting.world.local_world_size
    node = world.rank // size
    groups = [("NCCL in a node", f"node{node}", world.local_rank, size, least_in_a_node(device))]
    if world.world_size > size:
        gloo = max((p["bytes_per_s"] for p in pairs if "error" not in p), default=0.0)
        groups.append(("NCCL between nodes", "all", world.rank, world.world_size, gloo))
    checks = []
    for name, part, rank, count, least in groups:
        if count == 1:
            continue
        try:
            got = bounded(partial(
                _gathered_per_s, dist.PrefixStore(f"nccl/{part}", meeting.store), rank, count,
                device, meeting.timeout_s), 2 * meeting.timeout_s)
        except Exception as e:
            return [*checks, Check(name, False, _first_line(e), NCCL_CURE)]
        slow = f", expected are more than {least / 1e9:.1f} GB/s" * (got <= least)
        checks.append(Check(name, got > least, f"all-gather at {got / 1e9:.1f} GB/s{slow}",
                            NCCL_SLOW[name], value=got))
    return checks


def least_in_a_node(device: torch.device) -> float:
    """Bytes/s of an all-gather below which a link is not used as it could be; 0 of a GPU that is
    not in the table."""
    kind = kind_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return min(FAST_NODE, GPUS[kind].node / 4) if kind else 0.0


def _gathered_per_s(store: dist.Store, rank: int, count: int, device: torch.device,
                    timeout_s: float) -> float:
    """Bytes that each of `count` ranks receives in a second of an all-gather. Raises RuntimeError
    for wrong ones."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=count,
        timeout=timedelta(seconds=timeout_s), device_id=device if device.type == "cuda" else None)
    try:
        part = torch.ones(max(MOST_GATHERED // count, 1), dtype=torch.uint8, device=device)
        out = part.new_zeros(len(part) * count)
        seconds = []
        for _ in range(4):  # the first one connects
            started = time.perf_counter()
            all_gather_single(out, part)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - started)
        if not bool((out == 1).all()):
            raise RuntimeError("an all-gather gave wrong numbers")
    finally:
        dist.destroy_process_group()
    return len(part) * (count - 1) / min(seconds[1:])


def _first_line(error: Exception) -> str:
    return (str(error) or f"no answer ({type(error).__name__})").splitlines()[0][:200]
