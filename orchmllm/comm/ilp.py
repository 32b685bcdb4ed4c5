"""Plans with the paper's integer program (orchmllm.plan.nodewise): solved on one rank, for all.

`SharedPrograms`: a solver under a limit may answer differently on two ranks, so the first rank of a
group plans and sends its solutions; the others plan by them.

`solve_program`: a solver may hold the interpreter's lock for its whole limit, take any amount of
memory and ignore its limit. So each program is solved in a child process of its own, which does not
load torch and is ended if it is late.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from orchmllm.comm.agree import describe
from orchmllm.plan.nodewise import assign_nodes

if TYPE_CHECKING:
    from orchmllm.comm.exchange import RowGather

T = TypeVar("T")
GRACE_S = 60.0  # for starting the process and for writing the program down
LATE = 1.2  # times its limit, a solver is ended
CURE = "raise balance.nodewise_limit_s or use solver 'search'"
PROBLEM, ANSWER = "problem.npy", "answer.json"


def solve_program(
    source_rank: np.ndarray, batch: np.ndarray, volume: np.ndarray, *, num_ranks: int,
    ranks_per_node: int, solver: str, limit: float,
) -> np.ndarray:
    """`assign_nodes` with an integer program's solver, in a child process: (m,) arrays in, the rank
    of each batch (num_ranks,) out. Raises RuntimeError with
    the solver's error, or if its process died or was ended because it was late."""
    options = {"num_ranks": num_ranks, "ranks_per_node": ranks_per_node, "solver": solver,
               "limit": limit}
    with tempfile.TemporaryDirectory() as folder:
        np.save(Path(folder) / PROBLEM, np.stack([source_rank, batch, volume]))
        code = (f"import sys; sys.path[:] = {sys.path!r}; "
                f"from orchmllm.comm.ilp import answer; answer({folder!r}, {options!r}, {GRACE_S})")
        child = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL,
                               start_new_session=True)  # Ctrl-C is not for it
        if child.returncode == -signal.SIGALRM:
            raise RuntimeError(f"solver {solver!r} did not stop within {LATE:g} times its limit "
                               f"of {limit:g} s and was ended; {CURE}")
        if child.returncode:
            raise RuntimeError(f"the process of solver {solver!r} died (exit code "
                               f"{child.returncode}; -9: killed, perhaps for its memory)")
        found = json.loads((Path(folder) / ANSWER).read_text(encoding="utf-8"))
    if found["error"]:
        raise RuntimeError(found["error"])
    return np.array(found["rank_of_batch"], np.int64)


def answer(folder: str, options: dict[str, Any], grace_s: float) -> None:
    """The child process: reads the problem of `folder` and writes the answer there. An alarm, whose
    default is to end a process whatever holds the interpreter's lock, ends it in time. grace_s: for
    writing the program down."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, grace_s)
    error, rank_of_batch = "", []
    try:
        rank_of_batch = assign_nodes(
            *np.load(Path(folder) / PROBLEM), **options, begin=lambda: signal.setitimer(
                signal.ITIMER_REAL, LATE * options["limit"])).tolist()
    except Exception as e:  # raised by the parent
        error = describe(e)
    (Path(folder) / ANSWER).write_text(
        json.dumps({"error": error, "rank_of_batch": rank_of_batch}), encoding="utf-8")


class SharedPrograms:
    """Integer programs of plans that all ranks of `gather` make alike. solve: has assign_nodes'
    arguments and result, (n,) arrays in, (d,) out; used on the first rank only."""

    solve = staticmethod(solve_program)

    def __init__(self, gather: RowGather) -> None:
        self._gather = gather

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
