"""No group of the CPU connects every rank to every other one, and none the ranks of another
attempt."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from orchmllm.comm.exchange import RowGather, gloo_group
from orchmllm.comm.exchange_bytes import exchange_bytes
from orchmllm.config.recipe import CheckpointConfig
from orchmllm.launch import World, process_group
from orchmllm.plan.rearrange import Rearrangement
from orchmllm.runtime.checkpoint import Checkpointer
from tests.lib.ranks import RankFailure, run_ranks

RANKS = 8


def connected(store_port: int) -> int:
    """Connections of this process, those of the store not counted."""
    return len([c for c in psutil.Process().net_connections("tcp") if c.status == "ESTABLISHED"
                and store_port not in (c.laddr.port, c.raddr.port)])


def meet(folder: Path, name: str, rank: int) -> None:
    """All ranks have come here; through files, as a barrier would connect them."""
    (folder / f"{name}{rank}").touch()
    while not all((folder / f"{name}{r}").exists() for r in range(RANKS)):
        time.sleep(0.01)


def counts(world: World, folder: Path) -> tuple[int, int, int]:
    """New connections after groups were made, after a save, after bytes went to the next rank."""
    dist.destroy_process_group()
    found = folder / "port"
    if world.rank == 0:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        found.with_suffix(".part").write_text(str(store.port))
        found.with_suffix(".part").rename(found)
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # the store is there
    while not found.is_file():
        time.sleep(0.01)
    port = int(found.read_text())
    place = World(world.rank, RANKS, world.rank, RANKS, "localhost", port)
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"

    def count(name: str) -> int:
        """Connections when all ranks have done a thing, before any does the next."""
        meet(folder, name, world.rank)
        found = connected(port)
        meet(folder, f"counted_{name}", world.rank)
        return found

    with process_group(place, 300.0):
        start = count("start")
        group, gather = gloo_group(range(RANKS), 300.0), RowGather(RANKS, 300.0)
        keeper = Checkpointer(folder / "saved", CheckpointConfig(asynchronous=False), gather,
                              log=lambda text: None)
        made = count("made")
        order = np.roll(np.arange(RANKS), 1)  # rank r gets what rank r - 1 has
        one = np.ones(RANKS, np.int64)
        (came,) = exchange_bytes([lambda: np.full(3, world.rank, np.uint8)],
                                 Rearrangement(order, one, one), world.rank, group)
        assert came.tolist() == [(world.rank - 1) % RANKS] * 3
        sent = count("sent")
        keeper.save(1, {"x": torch.full((4,), 1.0)}, {})
        saved = count("saved")
        dist.barrier()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return made - start, sent - made, saved - sent


def attempted(world: World, port: int, attempt: int, dies: bool) -> float:
    """A sum over the ranks of an attempt, which may end without a word."""
    dist.destroy_process_group()
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"  # which stays as long as there are attempts
    total = torch.ones(1)
    # Rank 0 comes late, so that rank 1 would read the address that the dead attempt left of it.
    time.sleep(attempt * (1 - world.rank))
    with process_group(World(world.rank, 2, world.rank, 2, "localhost", port, attempt), 60.0):
        dist.all_reduce(total)
        if dies:
            os._exit(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return float(total)


@pytest.mark.dist
def test_a_restarted_attempt_reads_nothing_of_one_that_died():
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(RankFailure, match="died"):
        run_ranks(attempted, 2, store.port, 0, True)
    assert run_ranks(attempted, 2, store.port, 1, False) == [2.0, 2.0]


@pytest.mark.slow
@pytest.mark.dist
def test_groups_connect_only_ranks_that_talk(tmp_path):
    found = run_ranks(counts, RANKS, tmp_path)
    assert all(made == 0 for made, _, _ in found), found
    assert all(sent <= 2 for _, sent, _ in found), found  # the rank before and the one after
    # Of the gathers alone: the first rank hears of all others.
    assert sum(saved for _, _, saved in found) < RANKS * (RANKS - 1) * 3 // 4, found
