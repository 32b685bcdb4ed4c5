"""One thread per process, set before torch starts its pool: ranks share the machine's cores, and
results must not depend on how many it has."""

import faulthandler
import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_unconfigure() -> None:
    """A thread or a process that keeps the interpreter from exiting is told, not waited for."""
    faulthandler.dump_traceback_later(60, exit=True)
