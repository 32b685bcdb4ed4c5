"""Which rank is late, found through a tree in a real store."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from orchmllm.runtime.stall_report import (
    FAN_OUT,
    ReportTree,
    count_collectives,
    describe,
    report_of,
)
from tests.lib.ranks import run_ranks


def store_of_one() -> dist.Store:
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


def gathered(size: int, root: int, reports: dict[int, dict], silent: set[int]) -> tuple[str, int]:
    """(what the root says, most keys that a rank asked for or wrote): every rank answers after
    those below it."""
    store, most, said = store_of_one(), 0, ""
    trees = {r: ReportTree(store, None, r, size, root) for r in range(size)}
    for rank in sorted(trees, key=lambda r: (r - root) % size, reverse=True):
        if rank in silent:
            continue
        report = reports.get(rank, report_of(rank, (7, 30), True, "waits"))
        said = describe(trees[rank].gather(report))  # the root is the last
        most = max(most, trees[rank].num_keys)
    return said, most


@pytest.mark.parametrize("size, root", [(1, 0), (2, 1), (17, 3), (300, 299), (2560, 1234)])
def test_a_few_keys_a_rank_at_any_size(size, root):
    late = {size // 2: report_of(size // 2, (7, 29), False, "step 7, phase vision")}
    said, most = gathered(size, root, late, set())
    assert said == f"rank {size // 2} is late: step 7, phase vision"
    assert most <= 2 * FAN_OUT + 1


def test_of_those_that_got_least_far_who_does_not_wait():
    reports = {5: report_of(5, (6, 90), True, "in a collective"),
               9: report_of(9, (6, 90), False, "step 6"), 11: report_of(11, (7, 2), False, "on")}
    assert gathered(20, 0, reports, set())[0] == "rank 9 is late: step 6"
    del reports[9]
    assert gathered(20, 0, reports, set())[0] == "rank 5 is late: in a collective"


def test_ranks_that_do_not_answer_are_named_and_hide_nobody():
    """Also one with others below it, one of which is late."""
    size = FAN_OUT * FAN_OUT
    below = FAN_OUT + 3  # rank 1 is above it
    reports = {below: report_of(below, (7, 29), False, "step 7")}
    said, _ = gathered(size, 0, reports, {1, 200})
    assert said == ("ranks 1, 200 did not answer in time: stopped or gone; "
                    f"rank {below} is late: step 7")


def test_all_ranks_at_once():
    """Ranks answer in any order, the root first."""
    size, said = 40, []
    store = store_of_one()
    lock = threading.Lock()

    def answer(rank: int) -> None:
        report = report_of(rank, (3, int(rank != 8)), False, f"step {rank}")
        tree = ReportTree(store, lock, rank, size, 2)
        if rank == 2:
            said.append(describe(tree.gather(report)))
        else:
            tree.gather(report)

    threads = [threading.Thread(target=answer, args=[r]) for r in (2, *range(2), *range(3, size))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "rank 8 is late: step 8" in said[0] and "step 9" not in said[0]


def counted(world) -> tuple[tuple[int, int], tuple[int, int]]:
    """Before, and after two collectives and one more that rank 0 has begun and the other has not;
    in the end all are completed."""
    before = count_collectives("cpu")
    for _ in range(2):
        dist.all_reduce(torch.ones(1))
    if world.rank:
        after = count_collectives("cpu")
        dist.all_reduce(torch.ones(1))
    else:
        work = dist.all_reduce(torch.ones(1), async_op=True)
        after = count_collectives("cpu")
        work.wait()
    while count_collectives("cpu")[1] < before[1] + 3:  # until the test's time is up
        time.sleep(0.01)
    return before, after


@pytest.mark.dist
def test_collectives_are_counted():
    for rank, (before, after) in enumerate(run_ranks(counted, 2)):
        assert after[0] - before[0] == (2 if rank else 3), (before, after)
