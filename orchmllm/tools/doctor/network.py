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

from orchmllm.launch import World, hosts_store
from orchmllm.tools.doctor.machine import BOUNDED_THREAD, Check, bounded

FIRST_BYTES, MOST_BYTES = 1 << 20, 16 << 20  # that a pair sends each way
FAST_S = 0.05  # for the first bytes: then the most are sent, too
NCCL_CURE = ("set NCCL_DEBUG=INFO and, between nodes, NCCL_SOCKET_IFNAME to the interface "
             "towards the others")


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


def nccl(meeting: Meeting, device: torch.device) -> Check:
    """An all-gather of all ranks' GPUs."""
    def work() -> Check:
        world = meeting.world
        torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl", store=dist.PrefixStore("nccl", meeting.store), rank=world.rank,
            world_size=world.world_size, timeout=timedelta(seconds=meeting.timeout_s),
            device_id=device)
        part = torch.ones(16 << 20, dtype=torch.bfloat16, device=device)
        out = part.new_empty(len(part) * world.world_size)
        for _ in range(2):  # the first one connects
            torch.cuda.synchronize(device)
            started = time.perf_counter()
            dist.all_gather_into_tensor(out, part)
            torch.cuda.synchronize(device)
        received = 2 * len(part) * (world.world_size - 1) / (time.perf_counter() - started)
        right = bool((out == 1).all())
        dist.destroy_process_group()
        return Check("NCCL", right, f"all-gather at {received / 1e9:.1f} GB/s", NCCL_CURE,
                     value=received)

    try:
        return bounded(work, 2 * meeting.timeout_s)
    except Exception as e:
        return Check("NCCL", False, _first_line(e), NCCL_CURE)


def _first_line(error: Exception) -> str:
    return (str(error) or f"no answer ({type(error).__name__})").splitlines()[0][:200]
