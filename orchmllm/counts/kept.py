"""What was counted, kept on the disk, so that a known model is not counted again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

FOLDER = "~/.cache/orchmllm/counts"  # beside the default folder of length indexes
_CODE = ("counts/*.py", "models/*.py", "encoders/blank.py")  # of this package: counts differ by it
log = logging.getLogger("orchmllm.counts")


def kept(key: Any, count: Callable[[], Any]) -> Any:
    """count(), a value of JSON, or what it was for the same key, versions and code. key: a value of
    JSON. A file that is damaged, or was written for something else, is counted anew."""
    about = json.dumps([key, [version(name) for name in ("torch", "transformers")], _code()])
    path = Path(FOLDER).expanduser() / f"{_digest(about)}.json"
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text)
        if found["about"] == about and found["digest"] == _digest(json.dumps(found["value"])):
            return found["value"]
        log.warning("%s is damaged: its model is counted again", path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%r): its model is counted again", path, error)
    value = count()
    part = path.with_suffix(f".{os.getpid()}.part")
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


def _code() -> str:
    root = Path(__file__).parents[1]
    files = [file for pattern in _CODE for file in sorted(root.glob(pattern))]
    return _digest("".join(file.read_text(encoding="utf-8") for file in files))
