"""One rank's failure or stall, told by all ranks with the same text.

Each rank has a `HangWatchdog`: a thread with a store connection of its own, which looks for two
things. An error that a rank has posted: this rank then ends too, even if its main thread hangs in a
collective. A stall: when nothing has moved for too long all ranks report where they are, once
(orchmllm.runtime.stall_report). The rank that the others wait for is the one that got least far and
is not itself in a collective; it is named with step, phase and examples, and every rank leaves its
stacks and the flight recorder's records.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from orchmllm.comm.errors import AgreedError
from orchmllm.launch import machine
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.runtime.checkpoint import THREAD
from orchmllm.runtime.stall_report import (
    Report,
    count_collectives,
    describe,
    post_report,
    read_reports,
    wait_until,
)

_LIBRARIES = (sysconfig.get_path("stdlib"), "<frozen")
LATE_S = 30.0  # that the other ranks may take to start before one is named
DISK_S = 10.0  # for what is left in the run folder, whose disk may hang, too
PAUSED = 10  # intervals at most that a look counts for: the whole process may have stood still
GRACE_S = 4.0  # for a rank to end by itself after another one failed
CURABLE = (OSError, ValueError)  # the message says what to do; other errors need a traceback
# Of torch.compile, in the forward pass and where the backward pass is compiled.
_COMPILERS = (os.path.join("torch", "_dynamo", "convert_frame.py"),
              os.path.join("torch", "_inductor", "compile_fx.py"))
_ERROR = "error"
_READ = "read"  # key of the number of ranks that have read it
_STALL = "no progress"
_COMPILING = "compiling"  # key of the number of ranks that do; each counts itself in and out
_ASKED = "?"  # before the rank that asks all others where they are, in place of an error
ROOT_S = 15.0  # that this rank has to answer for all, before another one asks
_CONNECTION_SIGNS = ("gloo", "connection", "socket", "peer", "nccl", "timed out", "broken pipe")


class HangWatchdog:
    """store: shared by all ranks of this attempt; its client takes one request at a time, from any
    thread, so none may wait for a key. exit_now: ends the process with an exit code and a message,
    called if the main thread does not end by itself. `folder_taken`: is set when another run
    has taken the run folder."""

    def __init__(
        self, store: dist.Store, rank: int, world_size: int, *, folder: Path,
        stall_timeout_s: float, exit_now: Callable[[int, str], None], poll_s: float = 0.5,
    ) -> None:
        self.folder_taken = threading.Event()
        self._store, self.rank, self.world_size = store, rank, world_size
        self._folder, self._stall_timeout_s, self._poll_s = folder, stall_timeout_s, poll_s
        self._exit_now = exit_now
        self._next = (rank + 1) % world_size  # the rank that this one looks after ...
        self._process = ""  # ... and its machine and process, once it has told them
        self._unread = threading.Semaphore()  # of the error, which one thread counts as read
        self._late_at = time.monotonic() + LATE_S
        store.set(f"process{rank}", f"{machine()} {os.getpid()}")
        self._main = threading.get_ident()
        self._done = threading.Event()
        self.clock: PhaseClock | None = None
        self.record: Callable[[str], None] | None = None  # how the run ends; of one rank
        self.step, self.example_ids = 0, []
        self._thread = threading.Thread(target=self._run, name="orchmllm-watch", daemon=True)
        self._thread.start()

    def enter_step(self, step: int, example_ids: list[int]) -> None:
        """What this rank works on from now (for the report)."""
        self.step, self.example_ids = step, example_ids

    def close(self) -> None:
        self._done.set()
        self._thread.join(5.0)
        with contextlib.suppress(RuntimeError):  # the rank that hosts the store may be gone
            self._store.set(f"process{self.rank}", "")

    def settle(self, error: BaseException) -> str:
        """The text under which all ranks end: the first error posted by any rank, else this one's.
        A lost connection is a consequence, so then another rank's error is waited for. What all
        ranks raise (AgreedError, a bad recipe or file before the first step) is told as it is."""
        lost = is_connection_error(error)
        early = isinstance(error, CURABLE) and self.clock is None and not lost
        if isinstance(error, AgreedError) or early:
            return self._read_by_all(self.post(str(error)))
        text = f"{type(error).__name__}: {error}"
        if lost:
            with contextlib.suppress(RuntimeError):  # the store may be what was lost
                if posted := wait_until(self._error, GRACE_S):
                    return posted
            return (f"rank {self.rank} lost its connection to another rank at step {self.step}, "
                    f"phase {self._phase()}; that rank died without a message "
                    f"({text.splitlines()[0]})")
        return self._read_by_all(self.post(
            f"rank {self.rank} failed at step {self.step}, phase {self._phase()}: {text}"))

    def _read_by_all(self, text: str) -> str:
        """`text`, once all ranks have read the error: this process may host the store, without
        which they would end with what torch says of a lost connection."""
        with contextlib.suppress(RuntimeError):
            self._count_as_read()
            wait_until(lambda: self._store.add(_READ, 0) >= self.world_size, GRACE_S)
        return text

    def _count_as_read(self) -> None:
        if self._unread.acquire(blocking=False):
            self._store.add(_READ, 1)

    def post(self, text: str) -> str:
        """Makes `text` the error of all ranks unless there is one already; returns that one, or
        `text` where the store is gone with the rank that hosted it."""
        try:
            there = self._store.compare_set(_ERROR, "", text).decode()
            if there.startswith(_ASKED):
                there = self._store.compare_set(_ERROR, there, text).decode()
        except RuntimeError:
            return text
        return there

    def _posted(self) -> str:
        """What a rank has posted: an error, or a question to all; '' before that."""
        return self._store.get(_ERROR).decode() if self._store.check([_ERROR]) else ""

    def _error(self) -> str:
        posted = self._posted()
        return "" if posted.startswith(_ASKED) else posted

    def _dead(self) -> str:
        """The error of all ranks if the process of the next rank has ended on this machine without
        telling; until that rank has started, '' and one warning."""
        key = f"process{self._next}"
        if not self._process and not self._store.check([key]):
            if time.monotonic() > self._late_at:
                self._late_at = math.inf
                print(f"warning: rank {self.rank} has waited {LATE_S:g} s for rank {self._next} to "
                      "start", file=sys.stderr, flush=True)
            return ""
        self._process = self._process or self._store.get(key).decode()
        its_machine, _, pid = self._process.rpartition(" ")
        if not its_machine or its_machine != machine() or _lives(int(pid)) or (
                self._store.get(key).decode() != self._process):  # it said that it was done
            return ""
        return self.post(f"rank {self._next} (process {pid}) died without a message")

    def _phase(self) -> str:
        return (self.clock.phase if self.clock is not None else None) or "data"

    def _run(self) -> None:
        seen, still_s, compiles = None, 0.0, False
        looked = time.monotonic()
        while not self._done.wait(self._poll_s):
            try:
                before, looked = looked, time.monotonic()
                # A pause of this whole process, in the wait or in a look, counts as a slow look.
                still_s += min(looked - before, PAUSED * self._poll_s)
                now = (self.step, self.clock.switches if self.clock is not None else -1)
                if self._compiles() != compiles:
                    compiles = not compiles
                    self._store.add(_COMPILING, 1 if compiles else -1)
                # A save has time limits of its own; training waits for it at most.
                if (now != seen or compiles
                        or THREAD in {t.name for t in threading.enumerate()}):
                    seen, still_s = now, 0.0
                error = self._posted() or self._dead()
                if still_s > self._stall_timeout_s and self.clock is not None and not error:
                    if self._store.add(_COMPILING, 0) > 0:  # the others wait for a rank that does
                        still_s = 0.0
                        continue
                    error = self._store.compare_set(_ERROR, "", f"{_ASKED}{self.rank}").decode()
                if error.startswith(_ASKED):
                    error = self._answer(error)
            except RuntimeError as e:  # the store is gone, and with it the rank that hosted it
                error = f"rank {self.rank}: the store of the run was lost: {e}"
            if error:
                with contextlib.suppress(RuntimeError):  # the store may be what was lost
                    self._count_as_read()
                stalls = error.startswith(_STALL)
                if stalls:  # at once: a lost connection may soon end this rank
                    self._leave(error, stacks=True)
                if not self._done.wait(GRACE_S):
                    self._leave(error, stacks=False)
                    self._exit_now(1, f"error: {error}")
                return

    def _answer(self, asked: str) -> str:
        """Takes part in the report that a rank asked for; returns what all ranks end with."""
        root = int(asked.removeprefix(_ASKED))
        post_report(self._store, root, self.rank, self._report())
        if self.rank == root:
            late = describe(read_reports(self._store, root, self.world_size), self.world_size)
            return self.post(f"{_STALL} for {self._stall_timeout_s} s: {late}; stacks and flight "
                             f"recorder of all ranks are in {self._folder}")
        wait_until(lambda: self._posted() != asked, ROOT_S)
        # Still asked: the root is gone, and this rank asks.
        posted = self._store.compare_set(_ERROR, asked, f"{_ASKED}{self.rank}").decode()
        return self._answer(posted) if posted.startswith(_ASKED) else posted

    def _report(self) -> Report:
        phase, thread = self._phase(), self._main
        if phase == "data":
            thread = next((t.ident for t in threading.enumerate()
                           if t.name == "orchmllm-prefetch"), self._main)
        where, waits = locate(thread)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        launched, completed = count_collectives(device)
        # The host of a GPU runs ahead, so there the collectives tell who is behind. Groups of the
        # CPU are not the same on all ranks, and what they completed is not known for certain.
        counts, told = (), f"{launched} collectives launched"
        if device == "cuda":
            counts, told = (launched, completed), f"{told} and {completed} completed"
        return Report(
            (self.step, self.clock.switches if self.clock else 0, *counts), waits,
            f"step {self.step}, phase {phase}, at {where}, {told}, "
            f"examples {self.example_ids[:32]}")

    def _compiles(self) -> bool:
        """Whether this rank is in torch.compile, which may take minutes."""
        return any(frame.f_code.co_filename.endswith(_COMPILERS)
                   for top in sys._current_frames().values() for frame in _stack(top))

    def _leave(self, error: str, stacks: bool) -> None:
        """Records how the run ends, if this rank does, and leaves stacks; waits for DISK_S at most.
        """
        def leave() -> None:
            if self.record is not None:
                self.record(error)
            if stacks:
                self._leave_stacks()

        writing = threading.Thread(target=leave, daemon=True)
        writing.start()
        writing.join(DISK_S)

    def _leave_stacks(self) -> None:
        recorder = "nccl" if dist.get_backend() == "nccl" else "fr"  # each backend has its own
        dump = getattr(torch._C._distributed_c10d, f"_dump_{recorder}_trace_json", None)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / f"stacks_rank{self.rank}.txt").open("w", encoding="utf-8") as f:
                faulthandler.dump_traceback(file=f, all_threads=True)
            if dump is not None and os.environ.get("TORCH_FR_BUFFER_SIZE"):
                (self._folder / f"flight_recorder_rank{self.rank}.json").write_bytes(dump())
        except OSError as e:  # must not keep this rank from ending
            print(f"warning: no stacks in {self._folder}: {e}", file=sys.stderr)


def _lives(pid: int) -> bool:
    """Whether a process of this container is there. It is asked for by a signal, not in /proc,
    which may be that of the host."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it is another user's
        return True
    return True


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def locate(thread: int) -> tuple[str, bool]:
    """('file:line function' of the innermost frame of a thread that is not library code, whether
    it waits in a collective, ours or torch's)."""
    waits = False
    for frame in _stack(sys._current_frames().get(thread)):
        name = frame.f_code.co_filename
        waits = waits or "torch/distributed/" in name or name.endswith("orchmllm/comm/exchange.py")
        if not name.startswith(_LIBRARIES) and "site-packages" not in name:
            return f"{Path(name).name}:{frame.f_lineno} {frame.f_code.co_name}", waits
    return "unknown", waits


def is_connection_error(error: BaseException) -> bool:
    """Whether an exception is what a rank sees when another one is gone."""
    text = str(error).lower()
    return isinstance(error, ConnectionError | dist.DistError) or (
        isinstance(error, RuntimeError) and any(s in text for s in _CONNECTION_SIGNS))
