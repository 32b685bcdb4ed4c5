"""The oldest versions of other libraries with which the drop-in was tested; older ones are refused
where they get hold of a loader."""

from __future__ import annotations

import re
from importlib import metadata

FLOORS = {"transformers": "5.17", "trl": "1.16", "accelerate": "1.15", "lightning": "2.6",
          "pytorch_lightning": "2.6", "torchdata": "0.11"}


def is_older(version: str, floor: str) -> bool:
    """By the first two numbers of each."""
    return [*map(int, re.findall(r"\d+", version)[:2])] < [*map(int, floor.split("."))]


def require(*modules: str) -> None:
    """Raises RuntimeError if one of the modules belongs to an older version of its package than was
    tested."""
    for name in sorted({m.split(".")[0] for m in modules} & FLOORS.keys()):
        found, floor = metadata.version(name), FLOORS[name]
        if is_older(found, floor):
            raise RuntimeError(f"BalancedDataLoader was tested with {name} {floor} and newer, this "
                               f"is {found}: pip install '{name}>={floor}'")
