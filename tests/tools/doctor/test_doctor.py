"""`orchmllm doctor`: each failure is provoked, and gives its line and its cure."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from orchmllm.cli import dispatch
from orchmllm.config.job import resolve
from orchmllm.config.recipe import load_recipe
from orchmllm.launch import World
from orchmllm.sharding.memory import MemoryModel
from orchmllm.tools.doctor import command as doctor
from orchmllm.tools.doctor import host_memory, machine, network
from orchmllm.tools.doctor.machine import Check
from orchmllm.tools.doctor.table import merged, text
from orchmllm.tools.doctor.table import network as judged
from tests.lib.commands import ROOT, demo_of
from tests.lib.drawn import with_processor
from tests.lib.nodes import SUBNET, ip, namespaces, needs_namespaces, works
from tests.lib.ranks import run_ranks

DEMO = str(ROOT / "recipes" / "demo.yaml")


def examined(capsys, *argv: str) -> tuple[int, dict[str, dict]]:
    code = dispatch(["doctor", *argv, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0) == all(c["ok"] for c in found["checks"])
    assert all(c["cure"] for c in found["checks"] if not c["ok"])
    return code, {c["name"]: c for c in found["checks"]}


def test_a_healthy_machine(capsys, demo_corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "MIN_DISK_BYTES_PER_S", 0.0)  # others may be writing to it
    code, found = examined(capsys, DEMO, *demo_of(demo_corpus), f"run.dir={tmp_path / 'run'}")
    wrong = {c["name"]: c for c in found.values() if not c["ok"]}
    assert wrong.keys() <= {"shared memory", "disk"}, wrong  # what a small container lacks
    assert {"Python", "packages", "compiler", "core", "torch", "GPU", "attention", "recipe",
            "tokenizer", "ranks", "file descriptors", "disk", "disk speed"} <= found.keys()
    assert found["ranks"]["what"] == "4 ranks"
    own = examined(capsys, DEMO, *demo_of(demo_corpus), f"run.dir={tmp_path / 'run'}",
                   "launch.nproc_per_node=0")[1]
    assert int(own["ranks"]["what"].split(" rank")[0]) == max(torch.cuda.device_count(), 1)
    assert "MB/s written; a checkpoint of" in found["disk speed"]["what"]
    assert not list(tmp_path.iterdir())  # nothing stays


def test_what_is_wrong_with_a_machine(capsys, monkeypatch, tmp_path):
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "nvidia-smi").write_text("#!/bin/sh\necho NVIDIA H100 80GB HBM3\n")
    (bin_dir / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(bin_dir))
    monkeypatch.setenv("CXX", "")
    monkeypatch.setattr(machine.metadata, "requires", lambda name: [
        "numpy>=99", "no-such-package>=1", "pyyaml>=6", "cvxpy; extra == 'ilp'"])
    monkeypatch.setattr(machine, "MIN_DISK_BYTES_PER_S", 1e15)
    monkeypatch.setattr(machine, "MIN_FREE_BYTES", 1 << 70)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "orchmllm._core", None)  # as if it was not built
    monkeypatch.delattr("orchmllm._core", raising=False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (500, hard))
    try:
        code, found = examined(capsys)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert code == 1
    for name, what, cure in (
        ("compiler", "no C++ compiler", "apt install g++"),
        ("packages", "numpy>=99 is needed, ", "pip install 'numpy>=99' 'no-such-package>=1'"),
        ("packages", "no-such-package>=1 is missing", "pip install "),
        ("core", "orchmllm._core is not built", "setup.py build_ext --inplace"),
        ("GPU", "cannot use NVIDIA H100", "install a torch for the driver's CUDA"),
        ("file descriptors", "500 allowed, 514 may be needed", "ulimit -n 1028"),
        ("disk", "GB free", "choose another run.dir"),
        ("disk speed", "MB/s written", "on a faster disk"),
    ):
        assert not found[name]["ok"] and what in found[name]["what"], (name, found[name])
        assert cure in found[name]["cure"]
    assert "cvxpy" not in found["packages"]["what"]


def test_no_limit_of_files_is_enough(monkeypatch):
    for soft, fine in ((resource.RLIM_INFINITY, True), (514, True), (513, False)):
        monkeypatch.setattr(resource, "getrlimit", lambda kind, soft=soft: (soft, 4096))
        assert next(machine.limits(1)).ok == fine


@pytest.mark.parametrize("change, name, what", [
    ("fsdp.shard_size=3", "ranks", "fsdp.shard_size is 3, which does not divide the 4 ranks"),
    ("train.lr=-1", "recipe", "train.lr = -1: must be greater than 0"),
])
def test_what_is_wrong_with_a_recipe(capsys, demo_corpus, tmp_path, change, name, what):
    """What preflight checks is told under the name of its check."""
    code, found = examined(capsys, DEMO, *demo_of(demo_corpus), f"run.dir={tmp_path / 'run'}",
                           change)
    assert code == 1 and not found[name]["ok"] and what in found[name]["what"], found[name]


@pytest.mark.parametrize("argv, said", [
    (["--self-test", "--json"], "--self-test takes neither a recipe nor another option"),
    (["nowhere.yaml", "--self-test"], "--self-test takes neither a recipe nor another option"),
    (["--timeout", "-1"], "--timeout -1 must be above 0"),
    (["--network", "nan"], "--network nan at least 0"),
])
def test_options_that_mean_nothing_are_refused(capsys, argv, said):
    with pytest.raises(SystemExit) as end:
        dispatch(["doctor", *argv])
    assert end.value.code == 2 and said in capsys.readouterr().err


def test_a_disk_that_fills_up(tmp_path):
    """A file that cannot grow: the same error as that of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        *_, speed = machine.disk(tmp_path, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not speed.ok and "cannot be written: File too large" in speed.what
    assert not list(tmp_path.iterdir())


def test_a_check_that_breaks_has_failed():
    def check():
        yield Check("disk", True, "fine")
        raise OSError("no /proc")

    fine, broken = machine.guarded("speed", check)
    assert fine.ok and not broken.ok and broken.what == "OSError: no /proc"


def test_the_odd_rank_is_named():
    def rank(torch="2.11", speed=600.0, disk=True) -> list[Check]:
        return [Check("torch", True, torch, alike=True),
                Check("GPU speed", True, f"{speed:.0f} TFLOP/s", value=speed),
                Check("disk", disk, "fine" if disk else "full", "make room")]

    rows = merged({0: rank(), 1: rank(speed=590), 2: rank("2.13"), 3: rank(speed=300, disk=False)})
    assert [(c.name, c.ok) for c in rows] == [("torch", False), ("GPU speed", False),
                                              ("disk", False)]
    assert [c.what for c in rows] == [
        "rank 2: 2.13; the others: 2.11", "rank 3: 300 TFLOP/s, less than 70% of the median rank's",
        "rank 3: full"]
    assert "cure: make room" in text(rows, 1.0) and "3 of 3 checks failed" in text(rows, 1.0)
    assert [c.what for c in merged({0: rank(speed=600), 1: rank(speed=590)})] == [
        "2.11", "600 TFLOP/s (1 other values)", "fine"]
    (odd,) = merged({r: rank(v)[:1] for r, v in enumerate(("2.11", "2.13", "2.11", "2.12"))})
    assert odd.what == "rank 1: 2.13; rank 3: 2.12; the others: 2.11"


def test_the_time_of_a_name_look_up_counts_for_all_connections():
    few, many = (World(0, n, 0, 1, "127.0.0.1", 29512) for n in (2, 10**9))
    (fine,), (slow,) = machine.names(few), machine.names(many)
    assert fine.ok and "ms for the name of an address" in fine.what
    assert not slow.ok and "the 2000000000 connections to rank 0 wait" in slow.cure


def test_pairs_connect_all_in_few_rounds():
    for n in (1, 2, 3, 5, 8, 320):
        members = list(range(0, 8 * n, 8))
        pairs = {r: network.pairs_of(members, r) for r in members}
        assert max((k for p in pairs.values() for k, _ in p), default=-1) < (n - 1).bit_length() + 0
        reached, before = {0}, 0
        while len(reached) > before:
            before = len(reached)
            reached |= {p for r in reached for _, p in pairs[r]}
        assert reached == set(members)
        assert all((k, r) in pairs[p] for r in members for k, p in pairs[r])
        assert network.pairs_of(members, 3) == []


NCCL_CASES = [  # least in a node, bytes/s of gloo's pairs, what fails
    (0.0, 0.0, []), (1e15, 0.0, [(rank, "NCCL in a node") for rank in range(4)]),
    (0.0, 1e15, [(rank, "NCCL between nodes") for rank in (0, 2)])]


def nccl_of(world) -> list[list[Check]]:
    """By case, what a rank of two nodes of two finds; gloo takes the place of NCCL."""
    whole, found = dist.distributed_c10d._get_default_store(), []
    place = replace(world, local_rank=world.rank % 2, local_world_size=2)
    dist.destroy_process_group()
    network.MOST_GATHERED = 1 << 12
    for case, (least, gloo, _) in enumerate(NCCL_CASES):
        network.least_in_a_node = lambda device, least=least: least
        meeting = network.Meeting(dist.PrefixStore(f"case{case}", whole), place, {}, 60.0)
        pairs = [{"ranks": [world.rank, 9], "bytes_per_s": gloo}] * (world.rank % 2 == 0)
        found.append(network.nccl(meeting, torch.device("cpu"), pairs))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return found


@pytest.mark.dist
def test_slow_nccl_fails():
    ranks = run_ranks(nccl_of, 4)
    for case, (*_, wrong) in enumerate(NCCL_CASES):
        found = [checks[case] for checks in ranks]
        assert [c.name for c in found[0]] == ["NCCL in a node", "NCCL between nodes"]
        failed = [(rank, c) for rank, checks in enumerate(found) for c in checks if not c.ok]
        assert [(rank, c.name) for rank, c in failed] == wrong, failed
        for _, check in failed:
            assert "expected are more than 1000000.0 GB/s" in check.what
            assert "NCCL_DEBUG" in check.cure


def test_a_network_that_delivers_nothing_is_found(monkeypatch):
    monkeypatch.setattr(network, "MOST_GATHERED", 1 << 12)
    monkeypatch.setattr(network, "all_gather_single", lambda out, part: None)
    with pytest.raises(RuntimeError, match="an all-gather gave wrong numbers"):
        network._gathered_per_s(dist.HashStore(), 0, 1, torch.device("cpu"), 60.0)


@pytest.mark.parametrize("name, gigabytes", [
    ("NVIDIA H100 80GB HBM3", 100), ("NVIDIA A100-SXM4-80GB", 75), ("NVIDIA L40S", 8),
    ("Radeon", 0)])
def test_what_nccl_has_to_reach_in_a_node(monkeypatch, name, gigabytes):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert network.least_in_a_node(torch.device("cuda", 0)) == 1e9 * gigabytes


def test_the_memory_of_a_save_is_compared_with_the_hosts(capsys, monkeypatch, tmp_path):
    """By the limit of a container."""
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "LIMIT", limit)
    changes = [DEMO, "data.path=nowhere", f"run.dir={tmp_path}", f"model.config={with_processor()}"]
    found = {}
    for most in ("max", "1000"):
        limit.write_text(f"{most}\n")
        found[most] = examined(capsys, *changes)[1]["host memory"]
    assert found["max"]["ok"] and not found["1000"]["ok"]
    assert "0.0 GB that are free" in found["1000"]["what"]
    assert "checkpoint.asynchronous=false" in found["1000"]["cure"]
    never = examined(capsys, *changes, "checkpoint.every_steps=-1")[1]["host memory"]
    assert never["ok"] and never["what"].startswith("a save takes 0.0 GB")


def test_the_ranks_of_a_node_save_at_the_same_time(monkeypatch, tmp_path):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(host_memory, "LIMIT", limit)
    recipe = load_recipe(DEMO, [f"model.config={with_processor()}", "balance.ranks_per_node=4"])
    each = MemoryModel.of(resolve(recipe, 8, 4)).save_bytes(recipe.checkpoint)
    for ranks in (3, 5):
        limit.write_text(str(int(ranks * each)))
        [check] = host_memory.host_memory(recipe, World(0, 8, 0, 4, "", 0))
        assert check.ok == (ranks > 4)


def pair(a: int, b: int, gbit: float) -> list[dict]:
    return [{"ranks": r, "bytes_per_s": gbit / 8e-9} for r in ([a, b], [b, a])]


def test_slow_and_broken_links():
    good = [p for a, b in ((0, 8), (16, 24), (0, 16), (8, 24)) for p in pair(a, b, 90)]
    assert [c.ok for c in judged(good, 4, 1)] == [True] * 2
    slow = [*pair(0, 8, 90), *pair(16, 24, 9), *pair(0, 16, 90), *pair(8, 24, 9)]
    rows = judged(slow, 4, 1)
    assert [c.ok for c in rows] == [True, False] and "rank 24: 9 .. 90" in rows[1].what
    rows = judged(good, 4, 100)  # nobody is odd, all are below what is asked
    assert rows[1].what.startswith("ranks 0, 8, 16, 24: ") and "(--network)" in rows[1].cure
    broken = [{"ranks": [8, 24], "error": "x"}, {"ranks": [16, 24], "error": "x"}, *pair(0, 8, 90)]
    first = judged(broken, 4, 1)[0]
    assert not first.ok and first.what.startswith("rank 24: no connection between ranks 16-24, 8-2")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def of_a_job(world: World, port: int, world_size: int, late: int, done: Path) -> tuple[int, str]:
    """(exit code, output) of a rank of a job of world_size. late: this rank hangs in its own
    checks until rank 0 has ended; -1: none does, and few checks are made. done: a file that rank 0
    makes at its end."""
    world = replace(world, master_addr="127.0.0.1", master_port=port, world_size=world_size)
    args = doctor.parse(["--timeout", "20" if late >= 0 else "200", "--network", "0"])
    machine.WRITTEN_BYTES = 1 << 20
    network.is_left_behind = lambda: False  # it would end the process before its result is told
    if late < 0:
        machine.examine = lambda *a: list(machine.limits(world_size))
    if world.rank == late:
        machine.examine = partial(wait_for, done)
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = doctor.together(world, args, time.perf_counter())
    if world.rank == 0:
        done.write_text("")
    return code, out.getvalue()


def wait_for(done: Path, *_: object) -> list[Check]:
    while not done.exists():
        time.sleep(0.1)
    time.sleep(1.0)  # rank 0 holds the store until it has returned
    return []


@pytest.mark.dist
def test_ranks_of_a_job(tmp_path):
    (code, out), *others = run_ranks(of_a_job, 3, free_port(), 3, -1, tmp_path / "done")
    lines = {line[6:22].strip(): line for line in out.splitlines()}
    assert others == [(0, "")] * 2, out
    assert "met in 2 rounds" in lines["network"] and lines["network"].startswith("ok")
    failed = {name for name, line in lines.items() if line.startswith("FAIL")}
    assert failed <= {"bandwidth"} and code == len(failed), out  # the machine may be busy
    assert "3 of 3" in lines["ranks there"]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("late", [2, 0])
def test_ranks_that_do_not_come_or_hang_are_named(tmp_path, late):
    (code, out), *_ = run_ranks(of_a_job, 3, free_port(), 4, late, tmp_path / "done")
    assert code == 1 and "FAIL  ranks there" in out, out
    assert "3 of 4: rank 3 did not come in 20 s" in out
    assert f"FAIL  answers           rank {late}: late at its own checks" in out
    assert "ok    torch" in out  # of the others all is told


def doctors(names: list[str], *argv: str, **env: dict[int, dict]) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of the doctor on nodes of one rank each."""
    ranks = [subprocess.Popen(
        ["ip", "netns", "exec", name, sys.executable, "-m", "orchmllm", "doctor", "--timeout", "60",
         *argv], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "eth0"} | (
            env.get(f"rank{k}") or {
                "RANK": str(k), "WORLD_SIZE": str(len(names)), "LOCAL_RANK": "0",
                "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29512"}))
        for k, name in enumerate(names)]
    logs = [rank.communicate()[0] for rank in ranks]
    return [rank.returncode for rank in ranks], logs


@pytest.mark.slow
@pytest.mark.dist
@needs_namespaces
class TestNodes:
    def test_healthy_under_slurm(self):
        with namespaces(2) as names:
            codes, logs = doctors(names, "--network", "0", **{f"rank{k}": {
                "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2",
                "SLURM_NNODES": "2", "SLURM_PROCID": str(k), "SLURM_LOCALID": "0",
                "MASTER_ADDR": f"{SUBNET}.1", "MASTER_PORT": "29512"} for k in range(2)})
        assert codes == [0, 0] and "2 met in 1 rounds" in logs[0], logs
        assert "ok  " not in logs[1]

    @pytest.mark.skipif(not works("tc", "-V"), reason="tc is not installed")
    def test_a_slow_link_is_named(self):
        with namespaces(3) as names:
            subprocess.run(["tc", "-n", names[2], "qdisc", "add", "dev", "eth0", "root", "tbf",
                            "rate", "20mbit", "burst", "64k", "latency", "100ms"], check=True)
            codes, logs = doctors(names, "--network", "0.1")
        assert codes == [1, 0, 0], logs
        line = next(x for x in logs[0].splitlines() if "bandwidth" in x)
        assert line.startswith("FAIL") and "rank 2: 0.0" in line, logs[0]
        assert "cure: at least 0.1 Gbit/s (--network)" in logs[0]

    def test_a_closed_port_is_named(self):
        """Only the port of the store is open on the third node."""
        with namespaces(3) as names:
            for k, rule in enumerate((
                    "ipproto tcp dport 29512 lookup main", "ipproto tcp sport 29512 lookup main",
                    f"to {SUBNET}.0/24 ipproto tcp prohibit"), 1):
                ip("-n", names[2], "rule", "add", *rule.split(), "prio", str(k))
            codes, logs = doctors(names)
        assert codes[0] == 1, logs
        line = next(x for x in logs[0].splitlines() if "network " in x)
        print(logs[0])
        assert line.startswith("FAIL") and "no connection between ranks 0-2" in line, logs[0]
        assert "cure: open all TCP ports between the nodes" in logs[0]
        assert "ok    ranks there" in logs[0]

    def test_a_name_server_that_does_not_answer_is_named(self):
        with namespaces(2) as names:
            files = [Path("/etc/netns", name, "resolv.conf") for name in names]
            for file in files:
                file.parent.mkdir(parents=True)
                file.write_text("nameserver 127.0.0.1\noptions timeout:5 attempts:2\n")
            silent = [subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, "-c", "import socket; s = socket."
                 "socket(type=socket.SOCK_DGRAM); s.bind(('127.0.0.1', 53)); input()"],
                stdin=subprocess.PIPE) for name in names]
            try:
                codes, logs = doctors(names, "--network", "0")
            finally:
                for process in silent:
                    process.communicate()
                for file in files:
                    shutil.rmtree(file.parent)
        line = next(x for x in logs[0].splitlines() if "name server" in x)
        assert codes[0] == 1 and line.startswith("FAIL"), logs
        assert "cure: list all nodes in /etc/hosts" in logs[0]

    def test_a_store_that_cannot_be_reached(self):
        with namespaces(2) as names:
            ip("-n", names[1], "rule", "add", "to", f"{SUBNET}.0/24", "ipproto", "tcp", "prohibit",
               "prio", "1")
            codes, logs = doctors(names, "--timeout", "30")
        assert codes == [1, 1], logs
        assert "1 of 2: rank 1 did not come in 30 s" in logs[0]
        assert f"rank 1 does not reach the others at {SUBNET}.1:29512" in logs[1]


@pytest.mark.slow
@pytest.mark.skipif(not works("unshare", "-m", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs",
                              "/mnt"), reason="mounting needs root")
def test_a_full_disk_and_little_shared_memory(tmp_path):
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs -o size=20m tmpfs "$0" && '
         'mount -t tmpfs -o size=64m tmpfs /dev/shm && cd "$0" && exec "$@"', tmp_path,
         sys.executable, "-m", "orchmllm", "doctor"], cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)})
    lines = {x[6:22].strip(): x for x in done.stdout.splitlines()}
    assert done.returncode == 1, done.stderr
    assert "cannot be written: No space left on device" in lines["disk speed"]
    assert lines["disk"].startswith("FAIL") and lines["shared memory"].startswith("FAIL")
    assert "--shm-size=16g" in done.stdout
