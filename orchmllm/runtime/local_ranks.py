"""Starts the ranks of this machine through torch's elastic launcher, answers signals for them and
tells why they ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from orchmllm.launch import SAME_REQUEST_S, STOP_SIGNALS, describe_devices, interrupt_quietly

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

STOP_TIMEOUT_S = 600  # that ranks get to finish their step and save, before they are killed
STOPPED = {128 + s: s for s in (*STOP_SIGNALS, signal.SIGPIPE)}


class _StopRequests:
    """The launcher's answer to STOP_SIGNALS. The first one makes the elastic launcher send
    SIGTERM to the ranks, which they also survive without a traceback before they train; one that
    comes later kills them."""

    def __init__(self, error: type[Exception]) -> None:
        self.signal, self._at, self._error = 0, 0.0, error
        for number in STOP_SIGNALS:
            signal.signal(number, self._receive)

    def _receive(self, number: int, _frame: object) -> None:
        if self.signal and time.monotonic() - self._at < SAME_REQUEST_S:
            return
        if self.signal:
            _kill_ranks()
            with suppress(OSError):
                os.write(2, b"all ranks were killed\n")
            os._exit(128 + number)
        self.signal, self._at = number, time.monotonic()
        with suppress(OSError):  # the terminal may be gone
            os.write(2, b"\x1b[J" * os.isatty(2)  # in place of the line of progress
                     + b"Stopping after this step and saving; press Ctrl-C again to stop now\n")
        raise self._error("stop", signal.SIGTERM)


def _kill_ranks() -> None:
    """Ends this process's children, each of which has a session of its own."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    for child in children.read_text().split() if children.exists() else ():
        with suppress(ProcessLookupError):
            os.killpg(int(child), signal.SIGKILL)


def run_local(module: str, args: list[str], num_ranks: int, *, cpu_only: bool = False,
              num_threads: int = 0, log: Callable[[str], object] = lambda text: None) -> int:
    """Runs `python -m module args` on num_ranks local ranks (0: one per GPU, else 1); returns the
    exit code of the first rank that failed, or 0. Shows one message for a failure.

    cpu_only: hides the GPUs from the ranks. num_threads: of each rank's CPU operators (0: on GPUs
    what the environment says, else the cores divided by the ranks). log: reports the devices."""
    if cpu_only:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    handlers = {s: signal.getsignal(s) for s in STOP_SIGNALS}
    interrupt_quietly()
    import torch
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    log(describe_devices())
    num_ranks = num_ranks or max(torch.cuda.device_count(), 1)
    cores = os.cpu_count() or num_ranks
    if num_ranks > cores and not torch.cuda.is_available():
        log(f"{num_ranks} ranks share {cores} cores: steps are slow, and their times say little of "
            "a machine with a core for each rank")
    _set_environment(num_ranks, num_threads)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_ranks, rdzv_backend="c10d",
        rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
        signals_to_handle="SIGQUIT",  # the others are for _StopRequests
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
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        told = _told_in(Path(config.logs_specs.root_log_dir))  # also of a save
        with suppress(OSError):
            print(f"interrupted ({name}): all ranks have ended{told}", file=sys.stderr, flush=True)
        return 1 if told else 128 + number
    finally:  # the elastic launcher leaves its own behind
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return 0


def _set_environment(num_ranks: int, num_threads: int) -> None:
    """Variables that the ranks get."""
    import torch

    if num_threads:
        os.environ["OMP_NUM_THREADS"] = str(num_threads)
    elif not torch.cuda.is_available():
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_ranks)))
    # torch's own default, 30 s, is less than a step and a save of a large model take.
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(STOP_TIMEOUT_S))
    os.environ["ORCHMLLM_CHECKED"] = "1"


def _silence_elastic() -> None:
    """The launcher would log every process it stops and a traceback of its own for each failure."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(("torch.distributed.elastic", "torch.distributed.launcher")):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _told_in(folder: Path) -> str:
    """What ranks have left in the elastic launcher's folder of an error, on lines of its own; ''
    without one."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    paths = {int(path.parent.name): path for path in folder.rglob("error.json")}
    found = {rank: ProcessFailure(rank, 0, 1, str(path)) for rank, path in paths.items()}
    return f"\n{_explain(found)}" if found else ""


def _explain(failures: Mapping[int, ProcessFailure]) -> str:
    """The earliest message of a rank, and the ranks that died without one. Nothing of ranks that
    were asked to stop, which say so themselves."""
    reports = {r: f.message for r, f in failures.items() if isinstance(f.message, dict)}
    lines = []
    if reports:
        first = min(reports, key=lambda r: reports[r]["extraInfo"].get("time_s", 0.0))
        lines.append(f"{reports[first]['message']}\n(rank {first}; all ranks were stopped)")
    for rank, failure in failures.items():
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM:  # the launcher's own
            lines.append(f"error: rank {rank} was killed by {failure.signal_name()}")
        elif failure.exitcode > 0 and failure.exitcode not in STOPPED and not reports:
            lines.append(f"error: rank {rank} ended with exit code {failure.exitcode}")
    stopped = any(f.exitcode in STOPPED for f in failures.values())
    return "\n".join(lines or ([] if stopped else ["error: the ranks were terminated"]))
