"""The repository's examples as modules."""

from __future__ import annotations

import importlib
import sys

from tests.lib.commands import ROOT

EXAMPLES = ROOT / "examples"


def load(name: str):
    """The example `name`; examples import each other by file name."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)
