"""Commands as forks of the tests' fork server, which has torch imported: whole ones, and ranks
without torch's elastic launcher, which find the variables, the store and the file for their error
that the launcher's agent would give them."""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection, wait
from pathlib import Path

import torch
import torch.distributed as dist

from tests.lib.commands import ROOT
from tests.lib.ranks import _context


def _run_module(module: str, args: list[str]) -> None:
    multiprocessing.set_start_method("fork", force=True)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    sys.argv = [module, *args]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _rank_main(module: str, args: list[str], env: dict[str, str], folder: str,
               before: Callable[[], object] | None) -> None:
    rank = env["RANK"]
    for fd, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(f"{folder}/{name}{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(file, fd)
        os.close(file)
    os.environ.update(env, TORCHELASTIC_ERROR_FILE=f"{folder}/error{rank}")
    if before is not None:
        before()
    _run_module(module, args)


def _command_main(module: str, args: list[str], *outputs: Connection) -> None:
    for fd, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), fd)
        output.close()
    _run_module(module, args)


class Command:
    """`python -m MODULE ARGS` from the repository's folder, with what tests use of
    subprocess.Popen."""

    def __init__(self, module: str, *args: str) -> None:
        (out, stdout), (err, stderr) = _context.Pipe(duplex=False), _context.Pipe(duplex=False)
        self._process = _context.Process(target=_command_main,
                                         args=(module, list(args), stdout, stderr))
        self._process.start()
        self.pid = self._process.pid
        stdout.close()
        stderr.close()
        self.stdout, self.stderr = (open(os.dup(end.fileno()), encoding="utf-8")
                                    for end in (out, err))

    def poll(self) -> int | None:
        return self._process.exitcode

    returncode = property(poll)

    def wait(self) -> int:
        self._process.join()
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Kills it if it does not end in time."""
        with ThreadPoolExecutor(2) as pool:
            out, err = (pool.submit(stream.read) for stream in (self.stdout, self.stderr))
            self._process.join(timeout)
            self.kill()
            return out.result(), err.result()


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
            env = {k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
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
    errors = [json.loads(p.read_text(encoding="utf-8"))["message"] for p in folder.glob("error?")]
    if errors:
        first = min(errors, key=lambda error: error["extraInfo"]["time_s"])
        print(first["message"], file=sys.stderr)
