"""Worker processes that are forked beside other threads.

A child takes locks as they were when it was forked. In Python 3.11 one that some thread held to
make or end a thread state, which C++ threads do without the interpreter's lock, leaves the child
stuck for ever before its first line of Python. Such a child is killed and another one is forked.
"""

from __future__ import annotations

import multiprocessing
import socket
from multiprocessing.connection import wait
from multiprocessing.context import BaseContext, ForkContext, ForkProcess

START_TIMEOUT_S, START_ATTEMPTS = 5.0, 5


class SureFork(ForkProcess):
    """A process that runs when start() returns. start() raises RuntimeError if none does."""

    def start(self) -> None:
        kept = self._target, self._args, self._kwargs  # start() drops them
        for _ in range(START_ATTEMPTS):
            self._target, self._args, self._kwargs = kept
            if self._starts():
                return
        raise RuntimeError(f"a data worker did not start in {START_ATTEMPTS} attempts of "
                           f"{START_TIMEOUT_S:g} s; num_workers=0 loads in the rank itself")

    def _starts(self) -> bool:
        """Forks, and kills what it forked unless that says in time that it runs. It waits for an
        answer before it takes any lock, with which it must not be killed."""
        self._ends = ours, theirs = socket.socketpair()
        runs = False
        try:
            try:
                super().start()
            finally:
                theirs.close()  # a child that dies is then read as an end of file
            if wait([ours], START_TIMEOUT_S) and ours.recv(1) == b"1":
                ours.send(b"1")
                runs = True
        except ConnectionError:
            pass  # it died; another one is forked
        finally:
            ours.close()
            if not runs and self._popen is not None:
                self.kill()
                self.join()
                self._popen = None
        return runs

    def run(self) -> None:
        ours, theirs = self._ends
        ours.close()
        with theirs:
            theirs.send(b"1")
            answer = theirs.recv(1)
        if answer:
            super().run()


class SureForkContext(ForkContext):
    """`fork` for torch's DataLoader."""

    Process = SureFork


def loader_context(given: object, num_workers: int) -> BaseContext | object:
    """The multiprocessing_context of a DataLoader: as given, but a sure one for `fork`."""
    # Asked like this, the start method stays open for the user to set.
    default = (multiprocessing.get_start_method(allow_none=True)
               or multiprocessing.get_all_start_methods()[0])
    forks = (default if given is None else given) == "fork"
    return SureForkContext() if num_workers and forks else given
