"""Plans with the paper's integer program (orchmllm.plan.nodewise): solved on one rank, for all.

`SharedPrograms`: a solver under a limit may answer differently on two ranks, so the first rank of a
group plans and sends its solutions; the others plan by them.

`ProgramSolver`: a solver may hold the interpreter's lock for its whole limit, take any amount of
memory and ignore its limit. So it runs in a child process, which is started at the first problem,
answers one after the other, and is killed if it is late. Messages are JSON and raw int64 arrays;
nothing is unpickled. The child does not load torch.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from orchmllm.comm.agree import describe
from orchmllm.plan.nodewise import assign_nodes

if TYPE_CHECKING:
    from orchmllm.comm.exchange import RowGather

T = TypeVar("T")
GRACE_S = 60.0  # for starting the process and for writing the program down
LATE = 1.2  # times its limit, a solver is ended
CURE = "raise balance.nodewise_limit_s or use solver 'search'"


class SharedPrograms:
    """Integer programs of plans that all ranks of `gather` make alike. solve: has assign_nodes'
    arguments and result, (n,) arrays in, (d,) out; used on the first rank only."""

    def __init__(self, gather: RowGather, solve: Callable[..., np.ndarray] | None = None) -> None:
        self._gather = gather
        self.solve = solve or ProgramSolver()

    def plan(self, make: Callable[[Callable[..., np.ndarray]], T]) -> T:
        """make(solve), where solve has assign_nodes' arguments. Collective. What it raises on the
        first rank is raised there and, as a RuntimeError with that text, on the others."""
        if self._gather.rank == 0:
            return self._plan_first(make)
        error, answers = json.loads(self._gather.from_first())
        answers = np.array(answers, np.int64)
        if error:
            raise RuntimeError(f"rank 0 could not plan: {error}")
        used = 0

        def answered(*problem: np.ndarray, num_ranks: int, **options: object) -> np.ndarray:
            nonlocal used
            used += num_ranks
            return answers[used - num_ranks: used]

        return make(answered)

    def _plan_first(self, make: Callable[[Callable[..., np.ndarray]], T]) -> T:
        error, answers = "", []

        def solve(*problem: np.ndarray, **options: object) -> np.ndarray:
            found = self.solve(*problem, **options)
            answers.extend(found.tolist())
            return found

        try:
            return make(solve)
        except Exception as e:
            error = describe(e)
            raise
        finally:
            self._gather.from_first(json.dumps([error, answers]).encode())


class ProgramSolver:
    """`assign_nodes` with an integer program's solver, in a child process. Not thread-safe.

    grace_s: seconds beyond LATE times its limit after which the child is killed."""

    def __init__(self, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._end: weakref.finalize | None = None
        self._pipe: Connection | None = None
        self.process: subprocess.Popen | None = None

    def __call__(
        self, source_rank: np.ndarray, batch: np.ndarray, volume: np.ndarray, *, num_ranks: int,
        ranks_per_node: int, solver: str, objective: str = "send", limit: float,
    ) -> np.ndarray:
        """See assign_nodes. Raises RuntimeError with the solver's error, or if its process died or
        was killed because it was late. source_rank, batch, volume: (n,)."""
        if self.process is None or self.process.poll() is not None:
            self._start()
        options = {"num_ranks": num_ranks, "ranks_per_node": ranks_per_node, "solver": solver,
                   "objective": objective, "limit": limit}
        try:
            self._pipe.send_bytes(json.dumps(options).encode())
            for array in (source_rank, batch, volume):
                self._pipe.send_bytes(np.ascontiguousarray(array, np.int64).tobytes())
            if not self._pipe.poll(LATE * limit + self._grace_s):
                self.close()
                raise RuntimeError(f"solver {solver!r} had no answer {self._grace_s:g} s after its "
                                   f"limit of {limit:g} s and was killed; {CURE}")
            error, answer = self._pipe.recv_bytes().decode(), self._pipe.recv_bytes()
        except (EOFError, OSError) as e:
            code = self._exit_code()
            self.close()
            if code == -signal.SIGALRM:
                raise RuntimeError(f"solver {solver!r} did not stop within {LATE:g} times its "
                                   f"limit of {limit:g} s and was ended; {CURE}") from e
            raise RuntimeError(f"the process of solver {solver!r} died (exit code {code}; -9: "
                               "killed, perhaps for its memory)") from e
        if error:
            raise RuntimeError(error)
        return np.frombuffer(answer, np.int64)

    def _start(self) -> None:
        self.close()
        ours, theirs = socket.socketpair()
        code = (f"import sys; sys.path[:] = {sys.path!r}; "
                f"from orchmllm.comm.ilp import serve; serve({theirs.fileno()})")
        with theirs:
            self.process = subprocess.Popen([sys.executable, "-c", code],
                                            pass_fds=[theirs.fileno()],
                                            start_new_session=True)  # Ctrl-C is not for it
        self._pipe = Connection(ours.detach())
        self._end = weakref.finalize(self, _end, self.process, self._pipe)

    def _exit_code(self) -> int | None:
        try:
            return self.process.wait(timeout=5.0)
        except subprocess.TimeoutExpired:  # it closed its end and lives on
            return None

    def close(self) -> None:
        """Ends the child process, if there is one."""
        if self._end is not None:
            self._end()


def _end(process: subprocess.Popen, pipe: Connection) -> None:
    pipe.close()
    process.kill()
    process.wait()


def serve(fd: int) -> None:
    """The child: answers until its parent is gone."""
    pipe = Connection(fd)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process, whoever holds the lock
    while True:
        try:
            options = json.loads(pipe.recv_bytes())
            arrays = [np.frombuffer(pipe.recv_bytes(), np.int64) for _ in range(3)]
        except (EOFError, KeyboardInterrupt):
            return
        error, answer, late = "", b"", LATE * options["limit"]
        try:
            answer = assign_nodes(*arrays, **options, begin=lambda late=late: signal.setitimer(
                signal.ITIMER_REAL, late)).tobytes()
        except Exception as e:  # raised by the parent
            error = describe(e)
        signal.setitimer(signal.ITIMER_REAL, 0)
        pipe.send_bytes(error.encode())
        pipe.send_bytes(answer)
