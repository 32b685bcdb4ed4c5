"""What was counted, kept on the disk, so that a known model is not counted again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any
from uuid import uuid4

FOLDER = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/orchmllm/counts"
# Of this package, by which counts and proofs differ.
_CODE = ("comm", "composition", "counts", "data", "encoders", "models", "plan", "proof")
log = logging.getLogger("orchmllm.counts")


def kept(key: Any, count: Callable[[], Any]) -> Any:
    """count(), a value of JSON, or what it was for the same key, versions and code. key: a value of
    JSON. A file that is damaged, or was written for something else, is counted anew."""
    about = json.dumps([key, [version(name) for name in ("torch", "transformers")], _code()])
    try:
        path = Path(FOLDER).expanduser() / f"{_digest(about)}.json"
    except RuntimeError as error:  # a user without a home
        log.warning("%s: the model is counted at each start", error)
        return count()
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] == about and found["digest"] == _digest(json.dumps(found["value"])):
            return found["value"]
        log.warning("%s is damaged: its model is counted again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%r): its model is counted again", path, error)
    value = count()
    part = path.with_suffix(f".{uuid4()}.part")  # machines that share a home may share numbers
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"about": about, "digest": _digest(json.dumps(value)),
                                    "value": value}), encoding="utf-8")
        part.replace(path)
    except OSError as error:  # a home that cannot be written
        log.warning("%s cannot be written (%s): the model is counted at each start", path, error)
    return value


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code() -> str:
    root = Path(__file__).parents[1]
    files = [path for room in _CODE for path in sorted((root / room).rglob("*.py"))]
    return _digest("".join(f.read_text(encoding="utf-8") for f in [root / "batch.py", *files]))
