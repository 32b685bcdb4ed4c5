"""This process's place among the ranks, as the environment tells it (torchrun, SLURM, or
orchmllm.runtime.local_ranks), its process group, and how it ends."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

# What asks a run to stop: Ctrl-C, schedulers, and a terminal that is closed, unless that is ignored
# (nohup).
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *(
    [] if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN else [signal.SIGHUP]))
# A terminal's Ctrl-C may reach a process directly and again through its launcher.
SAME_REQUEST_S = 1.0
ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")  # names of what torch reads


_had_group = False  # whether this process was a rank of a process group
_exit_code: int | None = None  # of a command that has ended


def _end_rank() -> None:
    """Ends a rank before its interpreter is taken apart. A thread of gloo gives the tensors of the
    last collective back when that is done, for which it needs the interpreter, and without one it
    aborts the process: a finished run would end with SIGABRT."""
    if _had_group and _exit_code is not None:
        _exit(_exit_code)


atexit.register(_end_rank)  # before those of other modules are, so it is called after them


def exit_with(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Ends this process with what a command returns. Ctrl-C where no rank runs (ranks stop at the
    end of their step) is one line and code 130; a reader of the output that has left (`| head`) is
    no error: code 141."""
    global _exit_code
    if sys.stdout is None:  # closed before the start: the next file would be what is printed to
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        code = 130
    except BrokenPipeError:
        drop_output()
        code = 141
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # while the interpreter ends
    _exit_code = code
    sys.exit(code)


def interrupt_quietly() -> None:
    """Makes Ctrl-C end this process at once with one line, or without one in a rank, whose launcher
    tells it: in the middle of an import a KeyboardInterrupt would become a traceback."""
    def end(number: int, _frame: object) -> None:
        if "RANK" not in os.environ:
            os.write(2, b"interrupted\n")
        os._exit(128 + number)

    signal.signal(signal.SIGINT, end)


def drop_output() -> None:
    """Sends what is still written to stdout nowhere, since nobody reads it any more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def say(text: str) -> None:
    """Prints a line, at once. A disk that is full ends nothing: it is told once on stderr, and
    further lines are dropped. Raises BrokenPipeError where the reader has left."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as e:
        drop_output()
        with suppress(OSError):  # it may lie on the same disk
            print(f"warning: stdout cannot be written ({e.strerror}): nothing more is shown, and "
                  "the command goes on", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class World:
    """This process's place. attempt: restarts of the elastic launcher so far. checked: whether the
    launcher has checked what the run needs of this machine. ledgers: where it saw rows of each
    source go, as JSON; [] where rank 0 does, and empty where nobody has."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    attempt: int = 0
    checked: bool = False
    ledgers: str = ""


def _on_this_node(env: Mapping[str, str], world_size: int) -> int:
    """Ranks of a node where a program set RANK by itself: as srun says where it started these
    ranks, as many on each node; else all of them. Of what ranks are told, only that is equal on all
    of them, as it has to be."""
    even = re.fullmatch(r"(\d+)(\(x\d+\))?", env.get("SLURM_STEP_TASKS_PER_NODE", ""))
    return int(even[1]) if even and env.get("SLURM_NTASKS") == str(world_size) else world_size


def world_from(env: Mapping[str, str]) -> World | None:
    """The place that a launcher gave this process, None if there is none.

    torchrun sets RANK and friends; inside `srun` (a job step) SLURM_PROCID and friends are used.
    Raises ValueError naming a variable that is missing, no number or does not fit the others, or
    if the first node of a SLURM job is not known."""
    def number(name: str, default: int | None = None) -> int:
        value = env[name] if default is None else env.get(name, default)
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"the launcher's variable {name} is {value!r}, expected a number"
                             ) from None

    try:
        if "RANK" in env:
            rank, world_size = number("RANK"), number("WORLD_SIZE")
            local_rank = number("LOCAL_RANK", 0)
            local_size = number("LOCAL_WORLD_SIZE", _on_this_node(env, world_size))
            if not (0 <= rank < world_size and 0 <= local_rank < local_size <= world_size):
                raise ValueError(
                    f"the launcher says RANK={rank} of WORLD_SIZE={world_size} and LOCAL_RANK="
                    f"{local_rank} of LOCAL_WORLD_SIZE={local_size}: ranks are 0 and more, below "
                    "these sizes, and a node has no more than the job")
            return World(
                rank=rank, world_size=world_size, local_rank=local_rank,
                local_world_size=local_size,
                master_addr=env["MASTER_ADDR"], master_port=number("MASTER_PORT"),
                attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
                checked="ORCHMLLM_CHECKED" in env, ledgers=env.get("ORCHMLLM_LEDGERS", ""),
            )
        if "SLURM_STEP_ID" in env and number("SLURM_NTASKS", 1) > 1:
            rank, ntasks = number("SLURM_PROCID"), number("SLURM_NTASKS")
            local_rank = number("SLURM_LOCALID")
            if not 0 <= local_rank <= rank < ntasks:
                raise ValueError(f"srun says SLURM_PROCID={rank} of SLURM_NTASKS={ntasks} and "
                                 f"SLURM_LOCALID={local_rank}: tasks are 0 and more, below their "
                                 "number. srun sets these variables: do not set them yourself")
            return World(
                rank=rank, world_size=ntasks, local_rank=local_rank,
                local_world_size=-(-ntasks // number("SLURM_NNODES", 1)),
                master_addr=env.get("MASTER_ADDR") or _first_host(env["SLURM_STEP_NODELIST"]),
                # Any port all tasks agree on; jobs sharing a node get different ones.
                master_port=number("MASTER_PORT", 20000 + number("SLURM_JOB_ID") % 20000),
            )
    except KeyError as e:
        raise ValueError(f"the launcher set some of its variables but not {e.args[0]}") from e
    return None


def _first_host(nodelist: str) -> str:
    """First host of a SLURM node list such as `gpu[003-010],login`."""
    try:
        return subprocess.run(["scontrol", "show", "hostnames", nodelist], check=True,
                              capture_output=True, text=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError) as e:
        raise ValueError(f"scontrol does not tell the first of the nodes {nodelist} ({e}): set "
                         "MASTER_ADDR to the address of the node of rank 0") from e


def machine() -> str:
    """A name that no other running machine or container has, also if this one is the clone of
    another; '' where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8")
        return os.uname().nodename + boot.strip() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def current_world() -> World | None:
    return world_from(os.environ)


def device_of(world: World) -> torch.device:
    """Where this rank computes: the GPU of its place on the node, or the only one that it sees
    (`srun --gpus-per-task=1`); the CPU where there is none. Raises ValueError if there are fewer
    GPUs than ranks on the node."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if 1 < count <= world.local_rank:
        raise ValueError(f"{world.local_world_size} ranks on this node, which shows {count} GPUs: "
                         "start one rank per GPU")
    return torch.device("cuda", world.local_rank if count > 1 else 0)


def gpu_of(device: torch.device) -> tuple[str, int]:
    """Name and bytes of memory of a GPU; "" and 0 for a CPU."""
    import torch

    if device.type != "cuda":
        return "", 0
    found = torch.cuda.get_device_properties(device)
    return found.name, found.total_memory


@contextmanager
def process_group(world: World, timeout_s: float) -> Iterator[dist.Store]:
    """The default process group: NCCL with GPUs, gloo without; always destroyed at the end, since
    gloo otherwise aborts at exit and hides the real exception. Yields a second connection to the
    store, for a thread of its own (orchmllm.runtime.health). Raises ValueError where another
    program has the port."""
    import torch
    import torch.distributed as dist

    global _had_group
    _had_group = True
    # Read when the group is made; the records are written out when a run stalls.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # A gloo group connects the ranks that talk to each other, not each to all others at once.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    # Lengths differ from step to step, which leaves fewer fragments of the GPU's memory so.
    if not any(name in os.environ for name in ALLOCATOR):
        os.environ[ALLOCATOR[0]] = "expandable_segments:True"
    timeout = timedelta(seconds=timeout_s)
    device = device_of(world)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    try:
        store = dist.TCPStore(world.master_addr, world.master_port, world.world_size,
                              is_master=hosts_store(world), timeout=timeout, wait_for_workers=False)
    except dist.DistNetworkError as e:
        if "EADDRINUSE" in str(e):
            raise ValueError(f"MASTER_PORT={world.master_port} is in use on this node: set it to a "
                             "free port, for all ranks") from None
        raise
    # A restarted attempt must not read what the dead one left in the store.
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=dist.PrefixStore(f"attempt{world.attempt}", store),
        rank=world.rank, world_size=world.world_size, timeout=timeout,
        device_id=device if cuda else None,
    )
    beside = dist.TCPStore(world.master_addr, world.master_port, world.world_size,
                           is_master=False, timeout=timeout, wait_for_workers=False)
    try:
        yield dist.PrefixStore(f"watch{world.attempt}", beside)
    finally:
        dist.destroy_process_group()


def hosts_store(world: World) -> bool:
    """Rank 0 hosts the store unless torchrun's agent already does."""
    return world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def report_failure(message: str) -> None:
    """Tells why this rank fails: to the elastic launcher, which shows one rank's message instead of
    every rank's, or on stderr where there is none, or its file cannot be written."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"py_callstack": message, "timestamp": str(int(time.time())), "time_s": time.time()}
        aside = f"{path}.{threading.get_ident()}"  # the launcher may kill this rank as it writes
        with suppress(OSError):
            Path(aside).write_text(json.dumps({"message": {"message": message, "extraInfo": info}}))
            os.replace(aside, path)
            return
    print(message, file=sys.stderr, flush=True)


def exit_now(code: int, message: str) -> None:
    """Ends this process without waiting for threads that hang in a collective."""
    report_failure(message)
    _exit(code)


def _exit(code: int) -> NoReturn:
    for stream in filter(None, (sys.stdout, sys.stderr)):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def describe_devices() -> str:
    """What the ranks of this machine compute on."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU found: ranks compute on the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "GPUs: " + ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
