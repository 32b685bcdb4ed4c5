"""Ranks of a command without torch's elastic launcher: they come from the tests' fork server, which
has torch imported, and find the variables, the store and the file for their error that the
launcher's agent would give them."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path

import torch
import torch.distributed as dist

from tests.lib.commands import ROOT
from tests.lib.ranks import _context


def _rank_main(module: str, args: list[str], env: dict[str, str], folder: str,
               before: Callable[[], object] | None) -> None:
    rank = env.get("RANK", "")
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, fd)
        os.close(file)
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    os.environ.update(env)
    os.chdir(ROOT)
    sys.argv = [module, *args]
    if before is not None:
        before()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def run_local(module: str, args: list[str], num_ranks: int, *,
              before: Callable[[], object] | None = None, **_) -> int:
    """As orchmllm.runtime.local_ranks.run_local, on the CPU: the exit code of the first rank that
    failed, or 0. What the ranks wrote, and the earliest of their errors, is written once more by
    this process. before: is called in each rank first."""
    store = dist.TCPStore("localhost", 0, num_ranks, is_master=True, wait_for_workers=False)
    common = {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks, "MASTER_ADDR": "localhost",
              "MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True,
              "TORCHELASTIC_RESTART_COUNT": 0, "ORCHMLLM_CHECKED": 1, "OMP_NUM_THREADS": 1,
              "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(num_ranks):
            own = {"RANK": rank, "LOCAL_RANK": rank,
                   "TORCHELASTIC_ERROR_FILE": f"{folder}/error{rank}"}
            env = {k: str(v) for k, v in {**common, **own}.items()}
            ranks.append(_context.Process(target=_rank_main,
                                          args=(module, list(args), env, folder, before)))
            ranks[-1].start()
        try:
            return _first_failure(ranks)
        finally:
            for process in ranks:
                process.kill()
                process.join()
            _tell(Path(folder))


def run_command(module: str, args: list[str]) -> int:
    """`python -m MODULE ARGS` as a fork, which may be a launcher: its exit code. What it wrote is
    written once more by this process."""
    with tempfile.TemporaryDirectory() as folder:
        process = _context.Process(target=_rank_main, args=(module, args, {}, folder, None))
        process.start()
        process.join()
        _tell(Path(folder))
        return process.exitcode


def _first_failure(ranks: list) -> int:
    """The exit code of the first rank that fails; 0 once all have ended well."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)
            process.join()
            if process.exitcode:
                return process.exitcode if process.exitcode > 0 else 128 - process.exitcode
    return 0


def _tell(folder: Path) -> None:
    for name, stream in (("stdout", sys.stdout), ("stderr", sys.stderr)):
        for path in sorted(folder.glob(f"{name}*")):
            stream.write(path.read_text(encoding="utf-8", errors="replace"))
    errors = [json.loads(p.read_text(encoding="utf-8"))["message"] for p in folder.glob("error*")]
    if errors:
        first = min(errors, key=lambda error: error["extraInfo"]["time_s"])
        print(first["message"], file=sys.stderr)
