"""Every script starts as its first lines say, and the groups of `make test-slow` hold every slow
test once."""

from __future__ import annotations

import ast
import re
import shutil
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


@pytest.mark.skipif(not shutil.which("make"), reason="make is not installed")
def test_every_slow_test_is_in_one_group():
    done = subprocess.run(["make", "-s", "test-slow"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    groups = [line.split(": ")[1].split() for line in done.stdout.splitlines()[1:]]
    assert len(groups) >= 7
    for path in (ROOT / "tests").rglob("test_*.py"):
        if re.search(r"mark\.slow", path.read_text(encoding="utf-8")):
            name = path.relative_to(ROOT).as_posix()
            holding = [g for g in groups if any(name == p or name.startswith(f"{p}/") for p in g)]
            assert len(holding) == 1, (name, holding)
