"""Where a run went on with other settings, by its attempts.jsonl."""

from __future__ import annotations

import math
from pathlib import Path

from orchmllm.runtime.attempts import read_attempts
from orchmllm.runtime.resumable import describe_changes


def changes(folder: Path) -> list[tuple[int, str]]:
    """(step from which on, settings that changed), by step; a change that was given up when the run
    went back behind it is left out. Raises ValueError naming a line that is damaged."""
    found, later = [], math.inf
    for attempt in reversed(read_attempts(folder)):
        start = attempt.get("resumed_from") or {"step": 0, "changed": {}}
        if start["changed"] and start["step"] < later:
            found.append((start["step"], describe_changes(start["changed"])))
        later = min(later, start["step"])
    return found[::-1]
