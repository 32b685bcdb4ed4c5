"""What the kernel says of this process."""

from __future__ import annotations

from pathlib import Path


def memory_kb(field: str) -> int:
    """A field of /proc/self/status, e.g. VmRSS (resident memory) or VmHWM (its peak)."""
    status = Path("/proc/self/status").read_text()
    return int(next(x for x in status.splitlines() if x.startswith(field + ":")).split()[1])
