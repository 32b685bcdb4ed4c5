"""Both multi-node launchers on two nodes: network namespaces of this machine, joined by a bridge.
Needs root, as scripts/bench_nodes.py does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lib.commands import ROOT, train_args
from tests.lib.nodes import SUBNET, namespaces, needs_namespaces

pytestmark = [pytest.mark.slow, pytest.mark.dist, needs_namespaces]


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    with namespaces(2) as names:
        yield names


def environment(**more: str) -> dict[str, str]:
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                         "PYTHONPATH": str(ROOT), **more}


def arguments(data: Path, folder: Path) -> list[str]:
    """Of a launch script. The recipe also says how many ranks it starts by itself, which does not
    count here."""
    return train_args(data, folder, "launch.nproc_per_node=4")[2:]


def finished(folder: Path, logs: list[str]) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in rows] == [0, 1, 2, 3], logs
    assert all(len(r["cpu_s"]["llm"]) == 2 for r in rows)
    assert (folder / "checkpoints" / "latest").read_text() == "step_00000004"


def test_torchrun(nodes, tmp_path, demo_corpus):
    launchers = [subprocess.Popen(
        ["ip", "netns", "exec", name, "bash", "scripts/launch/torchrun.sh",
         *arguments(demo_corpus, tmp_path / "run")], cwd=ROOT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment(MASTER_ADDR=f"{SUBNET}.1", NNODES="2", NODE_RANK=str(k), NPROC="1"))
        for k, name in enumerate(nodes)]
    logs = [launcher.communicate()[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], logs
    finished(tmp_path / "run", logs)


SRUN = """#!/bin/bash
# srun of one task on each node, which sees its place in SLURM's variables.
shift 2
export SLURM_STEP_ID=0 SLURM_NNODES=2 SLURM_LOCALID=0
SLURM_PROCID=1 ip netns exec $NODE1 "$@" & other=$!
SLURM_PROCID=0 ip netns exec $NODE0 "$@"; code=$?
wait $other && exit $code
"""


def test_slurm(nodes, tmp_path, demo_corpus):
    for name, text in (("srun", SRUN),
                       ("scontrol", f"#!/bin/sh\necho {SUBNET}.1\necho {SUBNET}.2\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    env = environment(SLURM_JOB_ID="7", SLURM_NTASKS="2", SLURM_JOB_NODELIST="n[0-1]",
                      NODE0=nodes[0], NODE1=nodes[1], MASTER_PORT="29512")
    env["PATH"] = f"{tmp_path}:{env['PATH']}"
    job = subprocess.run(  # the job's first node runs the script
        ["ip", "netns", "exec", nodes[0], "bash", "scripts/launch/slurm.sh",
         *arguments(demo_corpus, tmp_path / "run")], cwd=ROOT, env=env, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert job.returncode == 0, job.stdout
    finished(tmp_path / "run", [job.stdout])
