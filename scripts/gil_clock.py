"""How much CPU time this thread spends without the GIL: C code of numpy, torch and our core gives
the GIL back by PyEval_SaveThread and takes it by PyEval_RestoreThread. A library that is loaded in
front of Python's own has both names: it reads the thread's CPU clock, then calls Python's.

CPU time less this is what holds the GIL, while no other Python thread can run. What Python's own
library does without the GIL (reading files, sleeping) is not seen, and counts as holding it.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

LIBRARY = "ORCHMLLM_GIL_CLOCK"  # environment: where the library is
SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <time.h>
static __thread double released, since;
static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}
void *PyEval_SaveThread(void) {
  void *state = ((void *(*)(void))dlsym(RTLD_NEXT, "PyEval_SaveThread"))();
  since = now();
  return state;
}
void PyEval_RestoreThread(void *state) {
  released += now() - since;
  ((void (*)(void *))dlsym(RTLD_NEXT, "PyEval_RestoreThread"))(state);
}
double released_s(void) { return released; }
"""


def preload() -> None:
    """Starts this program again behind the library; does nothing where it is there. Ends the
    program where that cannot work."""
    if LIBRARY in os.environ:
        return
    if sys.platform != "linux" or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        sys.exit("--gil needs Linux and a Python that was built with --enable-shared")
    library = str(Path(tempfile.mkdtemp()) / "gil_clock.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-x", "c", "-", "-o", library, "-ldl"],
                   input=SOURCE, text=True, check=True)
    os.environ.update({LIBRARY: library, "LD_PRELOAD": library})
    os.execv(sys.executable, sys.orig_argv)


def clock() -> Callable[[], float]:
    """A function that returns the CPU seconds that this thread has spent without the GIL."""
    library = Path(os.environ[LIBRARY])
    released_s = ctypes.PyDLL(str(library)).released_s  # a PyDLL's calls keep the GIL
    released_s.restype = ctypes.c_double
    library.unlink()  # it stays mapped
    library.parent.rmdir()
    return released_s
