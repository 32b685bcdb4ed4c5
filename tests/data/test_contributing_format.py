"""What CONTRIBUTING.md shows of a row format is all that a new one needs."""

from __future__ import annotations

import re

import pytest

from tests.lib.commands import ROOT, python
from tests.lib.mutations import copied, outcome

TABLE = "orchmllm/data/formats/presets.yaml"


@pytest.mark.slow  # it runs pytest twice in a copy of the tree
def test_the_shown_format_is_read(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(r"^## A row format\n.*?(?=^## |\Z)", text, re.M | re.S)[0]
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
