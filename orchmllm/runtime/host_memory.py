"""The host's memory of a rank: what its process holds, and what it gives back to the system."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path

import torch

STATM = Path("/proc/self/statm")
TRIM_EVERY = 10  # steps; a trim takes 6% of a step of the demo


def resident_gb() -> float:
    """Memory of this process in GB, its data workers not counted; nan where nobody counts it."""
    try:
        return int(STATM.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9
    except (OSError, LookupError):
        return math.nan


def trim(step: int, device: torch.device) -> None:
    """Gives freed memory back to the system after every tenth step on a CPU. There tensors of ever
    other sizes come and go, and glibc keeps what they leave: a rank of the demo grew by 7 MB a
    step, of which nothing was in use. Does nothing where the C library has no malloc_trim."""
    if device.type == "cpu" and step % TRIM_EVERY == 0:
        if release := getattr(ctypes.CDLL(None), "malloc_trim", None):
            release(0)
