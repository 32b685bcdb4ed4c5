"""Which rank is late, found out through a real store."""

from __future__ import annotations

import io
import multiprocessing
import os
import subprocess
import threading
import time
import types
from collections import Counter
from contextlib import redirect_stderr
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from orchmllm.comm.errors import AgreedError
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.runtime import checkpoint, health, stall_report
from orchmllm.runtime.health import HangWatchdog
from orchmllm.runtime.stall_report import (
    Report,
    count_collectives,
    describe,
    post_report,
    read_reports,
)
from tests.lib.ranks import run_ranks


class Counted:
    """A store that counts what is asked of it."""

    def __init__(self) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.requests: Counter[str] = Counter()

    def __getattr__(self, name: str):
        self.requests[name] += 1
        return getattr(self.store, name)


def gathered(size: int, root: int, reports: dict[int, Report], silent: set[int]
             ) -> tuple[str, Counter]:
    """(what the root says, what it asked the store for): all ranks have answered before."""
    store = Counted()
    for rank in set(range(size)) - silent:
        post_report(store, root, rank, reports.get(rank, Report((7, 30), True, "waits")))
    store.requests.clear()
    return describe(read_reports(store, root, size), size), store.requests


@pytest.mark.parametrize("size, root", [(1, 0), (2, 1), (17, 3), (300, 299), (2560, 1234)])
def test_two_requests_of_the_root_at_any_size(size, root):
    late = {size // 2: Report((7, 29), False, "step 7, phase vision")}
    said, requests = gathered(size, root, late, set())
    assert said == f"rank {size // 2} is late: step 7, phase vision"
    assert requests == {"check": 1, "multi_get": 1}


def test_of_those_that_got_least_far_who_does_not_wait():
    reports = {5: Report((6, 90), True, "in a collective"),
               9: Report((6, 90), False, "step 6"), 11: Report((7, 2), False, "on")}
    assert gathered(20, 0, reports, set())[0] == "rank 9 is late: step 6"
    del reports[9]
    assert gathered(20, 0, reports, set())[0] == "rank 5 is late: in a collective"


def test_ranks_that_do_not_answer_are_named_and_hide_nobody(monkeypatch):
    monkeypatch.setattr(stall_report, "ANSWER_S", 0.3)
    reports = {19: Report((7, 29), False, "step 7")}
    said, requests = gathered(256, 0, reports, {1, 200})
    assert said == ("ranks 1, 200 did not answer in time: stopped or gone; "
                    "rank 19 is late: step 7")
    assert requests["check"] < 256 + 10
    assert gathered(2, 0, {}, {1})[0] == "rank 1 did not answer in time: stopped or gone"


def test_the_root_reads_before_the_others_have_answered():
    size, store, said = 40, Counted().store, []

    def read() -> None:
        said.append(describe(read_reports(store, 2, size), size))

    root = threading.Thread(target=read)
    root.start()
    for rank in range(size):
        post_report(store, 2, rank, Report((3, int(rank != 8)), False, f"step {rank}"))
    root.join()
    assert said == ["rank 8 is late: step 8"]


def counted(world) -> tuple[tuple[int, int], tuple[int, int]]:
    """Before, and after two collectives and one more that rank 0 has begun and the other has not.
    """
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
    return before, after


@pytest.mark.dist
def test_collectives_are_counted():
    for rank, (before, after) in enumerate(run_ranks(counted, 2)):
        assert after[0] - before[0] == (2 if rank else 3), (before, after)
        assert 0 <= after[1] <= after[0]


def test_a_rank_that_was_killed_while_it_started_ends_the_others(tmp_path, monkeypatch):
    """No collective has connected the ranks yet."""
    monkeypatch.setattr(health, "GRACE_S", 0.0)
    monkeypatch.setattr(health, "LATE_S", 0.0)
    monkeypatch.setattr(os.path, "exists", lambda path: False)  # as where /proc is the host's
    store, told, told_at = dist.HashStore(), [], threading.Event()

    def exit_now(code: int, text: str) -> None:
        told.append((code, text))
        told_at.set()

    with redirect_stderr(io.StringIO()) as said:  # readouterr() can lose what a thread writes
        watch = HangWatchdog(store, 1, 2, folder=tmp_path, stall_timeout_s=600, poll_s=0.01,
                             exit_now=exit_now)
        while "has waited 0 s for rank 0 to start" not in said.getvalue():
            time.sleep(0.01)
    rank = subprocess.Popen(["sleep", "600"])
    mine = store.get("process1").decode()
    store.set("process0", f"{mine.rpartition(' ')[0]} {rank.pid}")
    assert not told_at.wait(0.1)
    rank.kill()
    rank.wait()
    assert told_at.wait() and told == [
        (1, f"error: rank 0 (process {rank.pid}) died without a message")]
    watch.close()
    assert store.get("process1") == b""  # a rank that ends says so
    other = HangWatchdog(dist.PrefixStore("other", store), 1, 2, folder=tmp_path, poll_s=0.01,
                         stall_timeout_s=600, exit_now=exit_now)
    store.set("other/process0", f"another machine {rank.pid}")
    time.sleep(0.1)
    store.set("other/process0", "")
    time.sleep(0.1)
    other.close()
    assert len(told) == 1
    host = os.uname().nodename
    monkeypatch.setattr(os, "uname", lambda: types.SimpleNamespace(nodename="clone"))
    clone = HangWatchdog(store, 1, 2, folder=tmp_path, stall_timeout_s=600, exit_now=exit_now)
    assert store.get("process1").decode() == mine.replace(host, "clone", 1)
    clone.close()


def host_store(ports, over) -> None:
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    ports.put(store.port)
    over.wait()


def test_where_the_store_is_gone_the_cause_is_told(tmp_path):
    """Under srun rank 0 hosts it, and may be the first to end."""
    context = multiprocessing.get_context("forkserver")
    ports, over = context.Queue(), context.Event()
    host = context.Process(target=host_store, args=(ports, over))
    host.start()
    store = dist.TCPStore("localhost", ports.get(), is_master=False)
    watch = HangWatchdog(store, 1, 2, folder=tmp_path, stall_timeout_s=600, poll_s=600,
                         exit_now=lambda code, text: None)
    host.kill()
    host.join()
    assert watch.settle(AgreedError("the disk is full")) == "the disk is full"
    watch.close()


def test_a_rank_that_hangs_after_it_has_compiled_is_reported(tmp_path, monkeypatch):
    """While it compiles, saves or goes back to a checkpoint it is waited for."""
    monkeypatch.setattr(health, "GRACE_S", 0.0)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    store, ended = dist.HashStore(), threading.Event()
    compiles = threading.Event()
    compiles.set()
    monkeypatch.setattr(HangWatchdog, "_compiles", lambda watch: compiles.is_set())
    watch = HangWatchdog(store, 0, 1, folder=tmp_path, stall_timeout_s=0.05, poll_s=0.01,
                         exit_now=lambda code, text: ended.set())
    watch.clock = PhaseClock()
    assert not ended.wait(0.3)
    saved = threading.Event()  # a save that training waits for
    save = threading.Thread(target=saved.wait, name=checkpoint.THREAD, daemon=True)
    save.start()
    compiles.clear()
    assert not ended.wait(0.3)
    with checkpoint.waited_for():
        saved.set()
        save.join()
        assert not ended.wait(0.3)
    assert ended.wait(60)
    watch.close()


def test_a_job_that_was_paused_as_a_whole_goes_on(tmp_path, monkeypatch):
    """By a scheduler: the clock went on meanwhile, in a wait of the watchdog or in a look."""
    clock, in_looks, ended = {"waits": 0.0, "looks": 0.0}, [1e4, 0.0, 1e4], []
    monkeypatch.setattr(health, "time", SimpleNamespace(
        monotonic=lambda: time.monotonic() + sum(clock.values())))
    look = HangWatchdog._dead

    def paused_look(watch):
        clock["looks"] += in_looks.pop() if in_looks else 0.0
        return look(watch)
    monkeypatch.setattr(HangWatchdog, "_dead", paused_look)
    store = Counted()
    watch = HangWatchdog(store, 0, 1, folder=tmp_path, stall_timeout_s=600, poll_s=0.01,
                         exit_now=lambda code, text: ended.append(text))
    watch.clock = PhaseClock()
    for clock["waits"] in (0.0, 1e4, 2e4):
        seen = store.requests["check"]
        while store.requests["check"] < seen + 10 and not ended:  # until the test's time is up
            time.sleep(0.01)
    watch.close()
    assert not ended
    assert clock["looks"] == 2e4


def test_one_request_of_a_rank_at_each_look(tmp_path):
    store = Counted()
    watch = HangWatchdog(store, 0, 1, folder=tmp_path, stall_timeout_s=600, poll_s=0.01,
                         exit_now=lambda code, text: None)
    while store.requests["check"] < 20:  # until the test's time is up
        time.sleep(0.01)
    watch.close()
    assert store.requests["get"] == 1  # where the next rank is
    assert store.requests.keys() == {"set", "check", "get"}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_records_are_those_of_the_backend(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "2000")
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    for recorder, of in (("nccl", b"nccl"), ("fr", b"gloo")):
        monkeypatch.setattr(torch._C._distributed_c10d, f"_dump_{recorder}_trace_json",
                            lambda of=of: of, raising=False)
    store = dist.HashStore()
    watch = HangWatchdog(store, 0, 1, folder=tmp_path, stall_timeout_s=600, poll_s=0.01,
                         exit_now=lambda code, text: None)
    watch.post("no progress for 600 s")
    while not store.add("read", 0):  # until the test's time is up
        time.sleep(0.01)
    watch.close()  # the thread writes the files before it ends
    assert watch.settle(AgreedError("it failed, too")) == "no progress for 600 s"
    assert store.add("read", 0) == 1  # by this rank, in two threads
    assert (tmp_path / "flight_recorder_rank0.json").read_bytes() == backend.encode()


@pytest.mark.parametrize("hangs", [False, True], ids=["", "the disk hangs"])
@pytest.mark.parametrize("error", ["no progress for 600 s", "rank 1 failed"])
def test_the_rank_that_records_how_a_run_ends_writes_it_before_it_ends(error, hangs, tmp_path,
                                                                       monkeypatch):
    monkeypatch.setattr(health, "GRACE_S", 0.0)
    monkeypatch.setattr(health, "DISK_S", 0.01 if hangs else 60.0)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    said, ended = [], threading.Event()
    watch = HangWatchdog(dist.HashStore(), 0, 1, folder=tmp_path, stall_timeout_s=600, poll_s=0.01,
                         exit_now=lambda code, text: (said.append(text), ended.set()))
    watch.record = lambda text: ended.wait() if hangs else said.append(text)
    watch.post(error)
    assert ended.wait(60)
    watch.close()
    assert dict.fromkeys(said) == dict.fromkeys([error] * (not hangs) + [f"error: {error}"])
