"""The oldest versions of other libraries with which the drop-in was tested; older ones are refused
where they get hold of a loader."""

from __future__ import annotations

from importlib import metadata

from packaging.version import Version

FLOORS = {"transformers": "5.17", "trl": "1.16", "accelerate": "1.15", "lightning": "2.6",
          "pytorch_lightning": "2.6", "torchdata": "0.11"}


def require(*modules: str) -> None:
    """Raises RuntimeError if one of the modules belongs to an older version of its package than was
    tested."""
    for name in sorted({m.split(".")[0] for m in modules} & FLOORS.keys()):
        found, floor = metadata.version(name), FLOORS[name]
        if Version(found).release[:2] < Version(floor).release:
            raise RuntimeError(f"BalancedDataLoader was tested with {name} {floor} and newer, this "
                               f"is {found}: pip install '{name}>={floor}'")
