"""Launch scripts: clean shell, valid manifests, and environments that give the right ranks."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import yaml

from orchmllm.launch import world_from
from tests.lib.commands import ROOT

FOLDER = ROOT / "scripts" / "launch"
SCRIPTS = sorted(FOLDER.glob("*.sh"))


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_is_silent():
    run = subprocess.run(["shellcheck", "-x", *SCRIPTS], cwd=FOLDER.parent.parent,
                         capture_output=True, text=True)
    assert run.returncode == 0, run.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_scripts_parse_and_say_how_they_are_used(script):
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    if script.name != "common.sh":
        run = subprocess.run(["bash", script], capture_output=True, text=True)
        assert run.returncode == 2 and "recipes/" in run.stderr


def test_jobset_is_yaml_with_a_pod_per_node():
    env = os.environ | {"IMAGE": "registry/image", "NODES": "320", "NAME": "mllm", "GPUS": "4"}
    run = subprocess.run(["bash", FOLDER / "jobset.sh", "recipes/mllm84b.yaml", "train.lr=1e-5"],
                         env=env, capture_output=True, text=True, check=True)
    jobset = yaml.safe_load(run.stdout)
    assert jobset["kind"] == "JobSet"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 320
    container = job["template"]["spec"]["containers"][0]
    assert container["command"] == ["scripts/launch/torchrun.sh", "recipes/mllm84b.yaml",
                                    "train.lr=1e-5"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 4
    variables = {v["name"]: v.get("value") for v in container["env"]}
    assert variables["MASTER_ADDR"] == "mllm-node-0-0.mllm" and variables["NNODES"] == "320"


def srun(rank: int, **changes: str) -> dict[str, str]:
    """What srun gives task `rank` of 320 nodes with 8 tasks each."""
    return {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "123456", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % 8), "SLURM_NTASKS": "2560", "SLURM_NNODES": "320",
            "MASTER_ADDR": "node0", **changes}


def test_slurm_environment_gives_2560_ranks():
    worlds = [world_from(srun(rank)) for rank in range(2560)]
    assert [w.rank for w in worlds] == list(range(2560))
    assert {(w.world_size, w.local_world_size, w.master_addr) for w in worlds} == {
        (2560, 8, "node0")}
    assert {w.local_rank for w in worlds} == set(range(8))
    assert len({w.master_port for w in worlds}) == 1
    assert all(w.rank // 8 == i // 8 for i, w in enumerate(worlds))


def test_slurm_jobs_that_share_a_node_use_other_ports():
    ports = {world_from(srun(0, SLURM_JOB_ID=str(j))).master_port for j in range(5000, 5010)}
    assert len(ports) == 10


def test_slurm_environment_that_is_incomplete_is_named():
    env = srun(3)
    del env["SLURM_LOCALID"]
    with pytest.raises(ValueError, match="SLURM_LOCALID"):
        world_from(env)


def test_torchrun_environment_wins_over_slurm():
    env = srun(3, RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_PORT="5")
    world = world_from(env)
    assert (world.rank, world.world_size, world.local_world_size) == (1, 4, 2)
