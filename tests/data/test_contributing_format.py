"""What CONTRIBUTING.md shows of a row format is all that a new one needs."""

from __future__ import annotations

import re

import pytest

from tests.lib.commands import ROOT, python
from tests.lib.mutations import copied, outcome

TABLE = "orchmllm/data/formats/row_formats.py"


@pytest.mark.slow  # it runs pytest twice in a copy of the tree
def test_the_shown_format_is_read(tmp_path):
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = re.search(r"^## A row format\n.*?(?=^## |\Z)", text, re.M | re.S)[0]
    assert section.count("\n") <= 60
    function, row, test = re.findall(r"```python\n(.*?)```", section, re.S)
    file, table, test_file = re.findall(r"`((?:orchmllm|tests)/\S+\.py)`", section)
    assert table == TABLE
    tree = copied(tmp_path / "tree")
    (tree / file).write_text(function, encoding="utf-8")
    (tree / test_file).write_text(test, encoding="utf-8")
    known = (tree / TABLE).read_text(encoding="utf-8")
    [name] = re.findall(r"^def (\w+)", function, re.M)
    module = file.removesuffix(".py").replace("/", ".")
    known = known.replace("\nfrom orchmllm", f"\nfrom {module} import {name}\nfrom orchmllm", 1)
    assert known.endswith("\n}\n"), "FORMATS is no longer the end of its file"
    how, said = outcome(test_file, tree)
    assert how == "failed" and "rename the columns" in said, said  # the row is needed, too
    (tree / TABLE).write_text(known.removesuffix("}\n") + row + "}\n", encoding="utf-8")
    how, said = outcome(test_file, tree)
    assert how == "passed", said
    python("scripts/make_recipe_reference.py", cwd=tree, env={"PYTHONPATH": str(tree)})
    page = (tree / "docs" / "formats.md").read_text(encoding="utf-8")
    assert "| `vqa` | `picture` with `question` and `answers` |" in page
