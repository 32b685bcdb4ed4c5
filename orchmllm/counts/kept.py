"""What was counted, kept on the disk, so that a known model is not counted again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from uuid import uuid4

FOLDER = f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/orchmllm/counts"
# Of this package, by which counts and proofs differ.
_CODE = ("comm", "composition", "counts", "data", "encoders", "models", "plan", "proof", "sharding",
         "tools/predict")
log = logging.getLogger("orchmllm.counts")


def kept(key: Any, count: Callable[[], Any]) -> Any:
    """count(), a value of JSON, or what it was for the same key, versions and code. key: a value of
    JSON. A file that is damaged, or was written for something else, is counted anew."""
    about = _about(key)
    found = _read(about)
    if not found:
        found = [count()]
        _write(about, found[0])
    return found[0]


def kept_each(key: Any, items: Sequence[str], count: Callable[[Sequence[str]], Sequence]) -> list:
    """count(items), a value of JSON for each of them, asked only for those that were not among the
    items before, for the same key, versions and code."""
    about = _about(key)
    known = _known(FOLDER, about)
    if missing := list(dict.fromkeys(item for item in items if item not in known)):
        known |= zip(missing, count(missing), strict=True)
        known |= dict(*_read(about))  # what other processes have added meanwhile
        _write(about, known)
    return [known[item] for item in items]


@lru_cache(maxsize=16)
def _known(folder: str, about: str) -> dict[str, Any]:
    """Read once; grows."""
    return dict(*_read(about))


def _about(key: Any) -> str:
    return json.dumps([key, *_code()])


def _path(about: str) -> Path:
    return Path(FOLDER).expanduser() / f"{_digest(about)}.json"


def _read(about: str) -> list:
    """What was counted, of a list; nothing where it is not known."""
    try:
        path = _path(about)
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["about"] == about and found["digest"] == _digest(json.dumps(found["value"])):
            return [found["value"]]
        log.warning("%s is damaged: its model is counted again", path)
    except (FileNotFoundError, RuntimeError):  # a user without a home: see _write
        pass
    except (OSError, ValueError, KeyError, TypeError) as error:
        log.warning("%s cannot be read (%r): its model is counted again", path, error)
    return []


def _write(about: str, value: Any) -> None:
    try:
        path = _path(about)
        part = path.with_suffix(f".{uuid4()}.part")  # machines that share a home may share numbers
        path.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"about": about, "digest": _digest(json.dumps(value)),
                                    "value": value}), encoding="utf-8")
        part.replace(path)
    except (OSError, RuntimeError) as error:  # a home that cannot be written, or none
        log.warning("%s cannot be written (%s): the model is counted at each start", FOLDER, error)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _code() -> tuple[list[str], str]:
    """The versions of other packages by which counts differ, and a digest of this one's code."""
    versions = [found.version for name in ("torch", "transformers", "diffusers")
                for found in distributions(name=name)]  # none where it is not installed
    root = Path(__file__).parents[1]
    files = [root / "batch.py",
             *(path for room in _CODE for path in sorted((root / room).rglob("*.py")))]
    return versions, _digest("".join(f.read_text(encoding="utf-8") for f in files))
