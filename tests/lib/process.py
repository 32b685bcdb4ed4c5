"""What the kernel says of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def memory_kb(field: str) -> int:
    """A field of /proc/self/status, e.g. VmRSS (resident memory) or VmHWM (its peak)."""
    status = Path("/proc/self/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith(field + ":")).split()[1])


def grown_kb(call: Callable[[], object]) -> int:
    """Most memory in KiB that a call takes beside what this process held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = memory_kb("VmRSS")
    call()
    return memory_kb("VmHWM") - before
