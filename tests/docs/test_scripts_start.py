"""Every script starts as its first lines say."""

from __future__ import annotations

import ast
import re
import subprocess
import sys

import pytest

from tests.lib.commands import ROOT

SCRIPTS = sorted(path for path in (ROOT / "scripts").glob("*.py")
                 if "ArgumentParser" in path.read_text(encoding="utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_starts(path):
    told = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    found = re.search(rf"python ((?:-m )?scripts[./]{path.stem}(?:\.py)?)\b", told)
    assert found, told
    done = subprocess.run([sys.executable, *found[1].split(), "--help"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
