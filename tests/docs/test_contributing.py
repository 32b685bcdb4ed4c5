"""What CONTRIBUTING.md shows of a policy and of a row format is all that a new one needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lib.commands import ROOT, python
from tests.lib.mutations import copied, outcome

ALL_POLICIES = "tests/plan/test_balance_properties.py::test_every_option_is_honoured_or_raises"
TABLE = "orchmllm/data/formats/presets.yaml"


def section_of(title: str) -> str:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return re.search(rf"^## {title}\n.*?(?=^## |\Z)", text, re.M | re.S)[0]


def replace_once(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count(old) == 1, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.slow  # it compiles the core
def test_the_shown_policy_balances(tmp_path):
    section = section_of("A policy")
    core, binding, row, test = re.findall(r"```\w+\n(.*?)```", section, re.S)
    header, bindings, table, test_file = re.findall(r"`((?:cpp|orchmllm|tests)/\S+\.\w+)`", section)
    tree = copied(tmp_path / "tree")
    (tree / header).write_text(core, encoding="utf-8")
    include = '#include "padded.hpp"\n'
    replace_once(tree / bindings, include, f'{include}#include "{Path(header).name}"\n')
    place = '  m.def("padded", '
    replace_once(tree / bindings, place, binding + place)
    place = '    "least_move": Policy('
    replace_once(tree / table, place, row + place)
    (tree / test_file).write_text(test, encoding="utf-8")
    subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree,
                   check=True, capture_output=True, env={**os.environ, "CFLAGS": "-O0"})
    how, said = outcome(f"{test_file} {ALL_POLICIES}", tree)
    assert how == "passed", said
    python("scripts/make_recipe_reference.py", cwd=tree, env={"PYTHONPATH": str(tree)})
    assert "| `snake` | sum(l), by dealing" in (tree / "docs/balancing.md").read_text()
    assert "`snake`" in (tree / "docs/recipe.md").read_text()


@pytest.mark.slow  # it runs pytest twice in a copy of the tree
def test_the_shown_format_is_read(tmp_path):
    section = section_of("A row format")
    assert section.count("\n") <= 60
    [preset] = re.findall(r"```yaml\n(.*?)```", section, re.S)
    [test] = re.findall(r"```python\n(.*?)```", section, re.S)
    table, test_file = re.findall(r"`((?:orchmllm|tests)/\S+\.(?:yaml|py))`", section)[:2]
    assert table == TABLE
    tree = copied(tmp_path / "tree")
    (tree / test_file).write_text(test, encoding="utf-8")
    how, said = outcome(test_file, tree)
    assert how == "failed" and "name the columns" in said, said  # the preset is needed, too
    known = (tree / TABLE).read_text(encoding="utf-8")
    (tree / TABLE).write_text(known + preset, encoding="utf-8")
    how, said = outcome(test_file, tree)
    assert how == "passed", said
    python("scripts/make_recipe_reference.py", cwd=tree, env={"PYTHONPATH": str(tree)})
    page = (tree / "docs" / "formats.md").read_text(encoding="utf-8")
    assert "| `picture_book` | picture books | images: `picture`<br>" in page
