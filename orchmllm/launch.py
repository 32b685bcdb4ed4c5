"""Ranks: found in the environment (torchrun, SLURM) or started here through torch's elastic
launcher. The one place that reads and sets environment variables."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
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
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

STOP_TIMEOUT_S = 600  # that ranks get to finish their step and save, before they are killed
# A terminal's Ctrl-C may reach a process directly and again through its launcher.
SAME_REQUEST_S = 1.0
STOPPED = {128 + s: s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGPIPE)}


def exit_with(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Ends this process with what a command returns. Ctrl-C where no rank runs (ranks stop at the
    end of their step) is one line and code 130; a reader of the output that has left (`| head`) is
    no error: code 141."""
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


@dataclass(frozen=True)
class World:
    """This process's place. attempt: restarts of the elastic launcher so far. checked: whether the
    launcher has checked what the run needs of this machine."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int
    attempt: int = 0
    checked: bool = False


def world_from(env: Mapping[str, str]) -> World | None:
    """The place that a launcher gave this process, None if there is none.

    torchrun sets RANK and friends; inside `srun` (a job step) SLURM_PROCID and friends are used.
    Raises ValueError naming a variable that is missing or no number, or if the first node of a
    SLURM job is not known."""
    def number(name: str, default: int | None = None) -> int:
        value = env[name] if default is None else env.get(name, default)
        try:
            return int(value)
        except ValueError:
            raise ValueError(f"the launcher's variable {name} is {value!r}, expected a number"
                             ) from None

    try:
        if "RANK" in env:
            world_size = number("WORLD_SIZE")
            return World(
                rank=number("RANK"), world_size=world_size, local_rank=number("LOCAL_RANK", 0),
                local_world_size=number("LOCAL_WORLD_SIZE", world_size),
                master_addr=env["MASTER_ADDR"], master_port=number("MASTER_PORT"),
                attempt=number("TORCHELASTIC_RESTART_COUNT", 0),
                checked="ORCHMLLM_CHECKED" in env,
            )
        if "SLURM_STEP_ID" in env and number("SLURM_NTASKS", 1) > 1:
            ntasks = number("SLURM_NTASKS")
            return World(
                rank=number("SLURM_PROCID"), world_size=ntasks, local_rank=number("SLURM_LOCALID"),
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


@contextmanager
def process_group(world: World, timeout_s: float) -> Iterator[dist.Store]:
    """The default process group: NCCL with GPUs, gloo without; always destroyed at the end, since
    gloo otherwise aborts at exit and hides the real exception. Yields a second connection to the
    store, for a thread of its own (orchmllm.runtime.health)."""
    import torch
    import torch.distributed as dist

    # Read when the group is made; the records are written out when a run stalls.
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    # A gloo group connects the ranks that talk to each other, not each to all others at once.
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    timeout = timedelta(seconds=timeout_s)
    device = device_of(world)
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.set_device(device)
    store = dist.TCPStore(world.master_addr, world.master_port, world.world_size,
                          is_master=hosts_store(world), timeout=timeout, wait_for_workers=False)
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
    every rank's, or on stderr where there is none."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        print(message, file=sys.stderr, flush=True)
        return
    info = {"py_callstack": message, "timestamp": str(int(time.time())), "time_s": time.time()}
    Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": info}}),
                          encoding="utf-8")


def exit_now(code: int, message: str) -> None:
    """Ends this process without waiting for threads that hang in a collective."""
    report_failure(message)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def describe_devices() -> str:
    """What the ranks of this machine compute on."""
    import torch

    if not torch.cuda.is_available():
        return "no GPU found: ranks compute on the CPU"
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return "GPUs: " + ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))


class _StopRequests:
    """The launcher's answer to SIGINT and SIGTERM. The first one makes the elastic launcher send
    SIGTERM to the ranks, which they also survive without a traceback before they train; one that
    comes later kills them."""

    def __init__(self, error: type[Exception]) -> None:
        self.signal, self._at, self._error = 0, 0.0, error
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: object) -> None:
        if self.signal and time.monotonic() - self._at < SAME_REQUEST_S:
            return
        if self.signal:
            _kill_ranks()
            os.write(2, b"all ranks were killed\n")
            os._exit(128 + number)
        self.signal, self._at = number, time.monotonic()
        os.write(2, f"{signal.Signals(number).name}: ranks that train finish their step and save; "
                    "a second one ends them at once\n".encode())
        raise self._error("stop", signal.SIGTERM)


def _kill_ranks() -> None:
    """Ends this process's children, each of which has a session of its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for child in children.read_text().split() if children.exists() else ():
        with suppress(ProcessLookupError):
            os.killpg(int(child), signal.SIGKILL)


def run_local(module: str, args: list[str], num_ranks: int, *, cpu_only: bool = False,
              num_threads: int = 0, say: Callable[[str], object] = lambda text: None) -> int:
    """Runs `python -m module args` on num_ranks local ranks (0: one per GPU, else 1); returns the
    exit code of the first rank that failed, or 0. Shows one message for a failure.

    cpu_only: hides the GPUs from the ranks. num_threads: of each rank's CPU operators (0: on GPUs
    what the environment says, else the cores divided by the ranks). say: told the devices."""
    if cpu_only:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    interrupt_quietly()
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    say(describe_devices())
    num_ranks = num_ranks or max(torch.cuda.device_count(), 1)
    if num_threads:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    elif not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # torch's own default, 30 s, is less than a step and a save of a large model take.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_TIMEOUT_S))
    os.environ["ORCHMLLM_CHECKED"] = "1"  # for its ranks
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
        # The others are for _StopRequests; an older torch takes all of them for itself.
        **({"signals_to_handle": "SIGHUP,SIGQUIT"} if hasattr(LaunchConfig, "signals_to_handle")
           else {}),
    )
    _silence_elastic()
    try:
        requests = _StopRequests(SignalException)
        elastic_launch(config, sys.executable)("-m", module, *args)
    except ChildFailedError as e:
        if text := _explain(e.failures):
            print(text, file=sys.stderr, flush=True)
        code = next(iter(e.failures.values())).exitcode
        return code if code > 0 else 128 - code
    except SignalException as e:
        _kill_ranks()  # one that was being started is not known to the elastic launcher
        number = requests.signal or e.sigval
        print(f"interrupted ({signal.Signals(number).name}): all ranks have ended", file=sys.stderr,
              flush=True)
        return 128 + number
    finally:  # the elastic launcher leaves its own behind
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _silence_elastic() -> None:
    """The launcher would log every process it stops and a traceback of its own for each failure."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _explain(failures: Mapping[int, ProcessFailure]) -> str:
    """The earliest message of a rank, and the ranks that died without one. Nothing of ranks that
    were asked to stop, which say so themselves."""
    told = {r: f.message for r, f in failures.items() if isinstance(f.message, dict)}
    lines = []
    if told:
        first = min(told, key=lambda r: told[r]["extraInfo"].get("time_s", 0.0))
        lines.append(f"{told[first]['message']}\n(rank {first}; all ranks were stopped)")
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # the launcher's own
            lines.append(f"error: rank {rank} was killed by {failure.signal_name()}")
        elif failure.exitcode > 0 and failure.exitcode not in STOPPED and not told:
            lines.append(f"error: rank {rank} ended with exit code {failure.exitcode}")
    stopped = any(f.exitcode in STOPPED for f in failures.values())
    return "\n".join(lines or ([] if stopped else ["error: the ranks were terminated"]))
