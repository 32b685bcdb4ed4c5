"""A run on a Ray cluster, by Ray Train's TorchTrainer: one worker a rank.

    python scripts/launch/ray_train.py RANKS recipes/mllm84b.yaml [section.key=value ...]

A worker starts its rank with the place that Ray has given it. A rank that is lost ends all of them;
Ray starts them again, up to 20 times, and they resume from the newest sound checkpoint. Workers get
a GPU each where the cluster has any. Exit codes are those of `orchmllm train`.
"""

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ray
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer

from orchmllm.config.recipe import RecipeError, read_recipe

PR_SET_PDEATHSIG = 1  # of prctl(2)


def end_with_worker() -> None:
    """Ends this process when the worker is killed that has started it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def worker(config: dict) -> None:
    """config: folder where the command was given; args of `orchmllm train`; code: where its
    exit code goes. Raises RuntimeError for
    a rank that another start may cure."""
    port = [0]
    if dist.get_rank() == 0:
        with socket.socket() as free:
            free.bind(("", 0))
            port = [free.getsockname()[1]]
    dist.broadcast_object_list(port)  # that of MASTER_PORT has the group of Ray
    code = subprocess.run(
        [sys.executable, "-m", "orchmllm.train", *config["args"]], cwd=config["folder"],
        env=os.environ | {"MASTER_PORT": str(port[0])}, preexec_fn=end_with_worker).returncode
    if code < 0 or code == 1:
        raise RuntimeError(f"rank {dist.get_rank()} ended with {code}")
    if dist.get_rank() == 0:  # of metrics Ray keeps only those of a checkpoint
        Path(config["code"]).write_text(str(code))


def main(argv: list[str]) -> int:
    if len(argv) < 2 or not argv[0].isdigit():
        print(__doc__, file=sys.stderr)
        return 2
    ranks, args = argv[0], [*argv[1:], "--ranks", argv[0]]
    try:
        folder = read_recipe(argv[1], argv[2:]).recipe.run.folder
    except RecipeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    ray.init()
    storage, name = folder.absolute() / "ray_train", f"{time.time():.0f}"
    code = storage / f"{name}.code"
    storage.mkdir(parents=True, exist_ok=True)
    TorchTrainer(
        worker, train_loop_config={"args": args, "folder": os.getcwd(), "code": str(code)},
        scaling_config=ScalingConfig(num_workers=int(ranks),
                                     use_gpu="GPU" in ray.cluster_resources()),
        run_config=RunConfig(storage_path=str(storage), name=name,
                             failure_config=FailureConfig(max_failures=20))).fit()
    return int(code.read_text())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
