"""Launch scripts: clean shell, valid manifests, and environments that give the right ranks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from orchmllm.launch import ALLOCATOR, World, device_of, process_group, world_from
from tests.lib.commands import ROOT
from tests.lib.ranks import _context

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
    env = os.environ | {"IMAGE": "registry/image", "NODES": "320", "NAME": "mllm", "GPUS": "4",
                        "RDMA": "rdma/ib=8"}
    odd = [r"data.path=a\d'\"b: #c", "train.lr=1e-5"]
    run = subprocess.run(["bash", FOLDER / "jobset.sh", "recipes/mllm84b.yaml", *odd],
                         env=env, capture_output=True, text=True, check=True)
    jobset = yaml.safe_load(run.stdout)
    assert jobset["kind"] == "JobSet"
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == 320
    container = job["template"]["spec"]["containers"][0]
    assert container["command"] == ["scripts/launch/torchrun.sh", "recipes/mllm84b.yaml", *odd]
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule == {"action": "FailJob", "onExitCodes": {
        "containerName": container["name"], "operator": "In", "values": [2]}}
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] == 20 and policy["rules"] == [
        {"name": "refused", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 4, "rdma/ib": 8}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    variables = {v["name"]: v.get("value") for v in container["env"]}
    assert variables["MASTER_ADDR"] == "mllm-node-0-0.mllm" and variables["NNODES"] == "320"


def test_trainjob_runs_torchrun_at_the_place_that_kubeflow_tells(tmp_path, demo_corpus):
    """The command of its pods, where PET_* say which of two nodes this is."""
    args = ["recipes/demo.yaml", r"train.name=a\d'\"b: #c"]
    run = subprocess.run(["bash", FOLDER / "trainjob.sh", *args], env=os.environ | {
        "IMAGE": "registry/image", "NODES": "2", "GPUS": "4"}, capture_output=True, text=True,
        check=True)
    job = yaml.safe_load(run.stdout)
    trainer = job["spec"]["trainer"]
    assert job["kind"] == "TrainJob" and trainer["numNodes"] == 2
    assert trainer["command"] == ["scripts/launch/torchrun.sh", *args]
    path = programs(tmp_path, torchrun=SHOWN, python=SHOWN)
    run = subprocess.run(
        ["bash", trainer["command"][0], args[0], f"data.path={demo_corpus}",
         f"model.config={demo_corpus / 'model'}"], cwd=ROOT,
        capture_output=True, text=True, env=os.environ | {
            "PATH": path, "PYTHONPATH": str(ROOT), "PET_NNODES": "2", "PET_NPROC_PER_NODE": "4",
            "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": "7"})
    assert run.stdout.startswith("-m orchmllm.train recipes/demo.yaml --validate --ranks 8 data.")
    assert ("--nnodes 2 --node-rank 1 --nproc-per-node 4 --master-addr localhost --master-port 7 "
            in run.stdout), run.stderr


@pytest.mark.parametrize("nodes, rdma, code", [
    ("2", "", 2), ("1", "rdma/ib", 2), ("2", "none", 0), ("1", "", 0)])
def test_jobset_of_several_nodes_asks_for_their_network(nodes, rdma, code):
    env = os.environ | {"IMAGE": "registry/image", "NODES": nodes, "RDMA": rdma}
    run = subprocess.run(["bash", FOLDER / "jobset.sh", "recipes/demo.yaml"], env=env,
                         capture_output=True, text=True)
    assert run.returncode == code and (f"RDMA is '{rdma}'" in run.stderr) == bool(code)
    if not code:
        job = yaml.safe_load(run.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]
        (container,) = job["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert "securityContext" not in container


@pytest.mark.parametrize("env, gpu", [
    ({"LOCAL_RANK": "3"}, "3"), ({"SLURM_LOCALID": "2"}, "2"), ({}, "0"),
    ({"LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "6,GPU-7"}, "GPU-7"),
    ({"SLURM_LOCALID": "5", "CUDA_VISIBLE_DEVICES": "4"}, "4")])
def test_a_rank_runs_on_the_cores_of_its_gpu(tmp_path, env, gpu):
    """The kernel's list of cores that are next to the GPU of this rank."""
    path = programs(
        tmp_path, **{"nvidia-smi": '#!/bin/sh\necho "00000000:A$4:00.0"\n'},
        cat='#!/bin/sh\necho "$1"\n',  # in place of what the file holds
        taskset='#!/bin/sh\n[ "$3" = true ] || echo "$@"\n')
    for name in ("LOCAL_RANK", "SLURM_LOCALID", "CUDA_VISIBLE_DEVICES"):
        env.setdefault(name, "")
    run = subprocess.run(["bash", FOLDER / "on_gpu_cores.sh", "python", "-m", "x"], text=True,
                         capture_output=True, env=os.environ | env | {"PATH": path}, check=True)
    cores = f"/sys/bus/pci/devices/0000:a{gpu.lower()}:00.0/local_cpulist"
    assert run.stdout == f"-c {cores} python -m x\n"


@pytest.mark.parametrize("taskset", ["exit 1", ""])
def test_a_rank_without_known_cores_runs_all_the_same(tmp_path, taskset):
    path = programs(tmp_path, **{"nvidia-smi": "#!/bin/sh\nexit 9\n"},
                    taskset=f"#!/bin/sh\n{taskset}\n")
    run = subprocess.run(["bash", FOLDER / "on_gpu_cores.sh", "echo", "here"], text=True,
                         capture_output=True, env=os.environ | {"PATH": path}, check=True)
    assert run.stdout == "here\n"


PYTHON = f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
SHOWN = '#!/bin/sh\necho "$@"\n'  # in place of a program
SCONTROL = '''#!/bin/sh
[ "$1" = show ] || { echo "requeued $2"; exit; }
echo node-of-13-00
sleep 0.3  # a reader that has left by now would end it, and with it the script
echo node-of-13-01
echo end >&2
'''
SRUN = '''#!/bin/sh
echo "MASTER_ADDR=$MASTER_ADDR"; shift 2; echo "$@"; exit ${SRUN_EXIT:-0}
'''


def programs(folder: Path, **scripts: str) -> str:
    """A PATH on which these programs, and this Python where none is given, come first."""
    for name, text in {"python": PYTHON, **scripts}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}"


def sbatch(folder: Path, data: Path, python: str, **env: str) -> subprocess.CompletedProcess:
    """What the job's first node runs, of a recipe that says how many ranks it starts by itself.
    python: a script in its place."""
    return subprocess.run(
        ["bash", FOLDER / "slurm.sh", "recipes/demo.yaml", f"data.path={data}",
         f"model.config={data / 'model'}", f"run.dir={folder / 'run'}"],
        cwd=ROOT, capture_output=True, text=True,
        env=os.environ | {"PATH": programs(folder, scontrol=SCONTROL, srun=SRUN, python=python),
                          "PYTHONPATH": str(ROOT), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "16",
                          "SLURM_JOB_NODELIST": "node-of-13-[00-01]", **env})


@pytest.mark.parametrize("code", [0, 1, 143])
def test_slurm_takes_the_first_of_many_hosts_and_queues_what_was_stopped_again(
        tmp_path, demo_corpus, code):
    run = sbatch(tmp_path, demo_corpus, SHOWN, SRUN_EXIT=str(code))
    assert run.returncode == code and "end\n" in run.stderr, run.stderr
    assert run.stdout.startswith("-m orchmllm.train recipes/demo.yaml --validate --ranks 16 data.")
    assert ("MASTER_ADDR=node-of-13-00\nscripts/launch/on_gpu_cores.sh python -m orchmllm.train "
            in run.stdout)
    assert ("requeued 7" in run.stdout) == (code == 143)


def test_what_is_refused_is_not_started(tmp_path, demo_corpus):
    """What --validate refuses: tests/runtime/test_preflight.py."""
    run = sbatch(tmp_path, demo_corpus, "#!/bin/sh\necho no data >&2; exit 2\n")
    assert run.returncode == 2 and "no data" in run.stderr
    assert "MASTER_ADDR" not in run.stdout


@pytest.mark.parametrize("gpus, local_rank, device", [
    (0, 3, "cpu"), (8, 3, "cuda:3"), (1, 3, "cuda:0"), (2, 3, None)])
def test_the_device_of_a_rank(monkeypatch, gpus, local_rank, device):
    """One GPU is what `srun --gpus-per-task=1` shows to every task of a node."""
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    world = World(local_rank, 4, local_rank, 4, "", 0)
    if device:
        assert device_of(world) == torch.device(device)
    else:
        with pytest.raises(ValueError, match="4 ranks on this node, which shows 2 GPUs"):
            device_of(world)


@pytest.mark.parametrize("asked", [{}, *({name: "backend:native"} for name in ALLOCATOR)])
def test_every_start_sets_how_a_gpu_allocates(monkeypatch, asked):
    """Not the launch scripts alone; what the user says stays, by either name."""
    for name in ALLOCATOR:
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with process_group(World(0, 1, 0, 1, "127.0.0.1", port), 60.0):
        assert {name: os.environ[name] for name in ALLOCATOR if name in os.environ} == (
            asked or {ALLOCATOR[0]: "expandable_segments:True"})


def srun(rank: int, **changes: str) -> dict[str, str]:
    """What srun gives task `rank` of 320 nodes with 8 tasks each."""
    return {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "123456", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(rank % 8), "SLURM_NTASKS": "2560", "SLURM_NNODES": "320",
            "MASTER_ADDR": "node0", **changes}


def attempt(number: int, rank: int, port: int) -> None:
    """A rank of an attempt of torchrun, the first of which dies after a collective."""
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    with process_group(World(rank, 2, rank, 2, "localhost", port, attempt=number), 20.0) as store:
        assert not store.check(["error"])
        ranks = torch.ones(1)
        torch.distributed.all_reduce(ranks)
        if not number:
            store.set("error", "of the attempt that died")
            os._exit(9)
        assert ranks == 2


@pytest.mark.dist
def test_a_restarted_attempt_does_not_connect_to_the_one_that_died():
    """Nor does it read what that has posted."""
    store = torch.distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for number, code in enumerate((9, 0)):
        ranks = [_context.Process(target=attempt, args=(number, r, store.port)) for r in (0, 1)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        assert [rank.exitcode for rank in ranks] == [code, code]


def test_slurm_environment_gives_2560_ranks():
    worlds = [world_from(srun(rank)) for rank in range(2560)]
    assert [w.rank for w in worlds] == list(range(2560))
    assert {(w.world_size, w.local_world_size, w.master_addr, w.master_port) for w in worlds} == {
        (2560, 8, "node0", 20000 + 123456 % 20000)}
    assert {w.local_rank for w in worlds} == set(range(8))
    assert all(w.rank // 8 == i // 8 for i, w in enumerate(worlds))


def test_slurm_jobs_that_share_a_node_use_other_ports():
    ports = {world_from(srun(0, SLURM_JOB_ID=str(j))).master_port for j in range(5000, 5010)}
    assert len(ports) == 10


def test_slurm_environment_that_is_incomplete_is_named():
    env = srun(3)
    del env["SLURM_LOCALID"]
    with pytest.raises(ValueError, match="SLURM_LOCALID"):
        world_from(env)


def test_slurm_without_scontrol_names_the_cure(monkeypatch):
    """As in most containers."""
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match="nodes n\\[0-3\\] .* set MASTER_ADDR to the address"):
        world_from(srun(3, MASTER_ADDR="", SLURM_STEP_NODELIST="n[0-3]"))


def test_torchrun_environment_wins_over_slurm():
    env = srun(3, RANK="1", WORLD_SIZE="4", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2", MASTER_PORT="5")
    world = world_from(env)
    assert (world.rank, world.world_size, world.local_world_size) == (1, 4, 2)
