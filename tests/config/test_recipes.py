"""Recipes that cannot be used: what is said about each, word for word (golden/recipes.yaml), before
torch is imported and in no time.

    python tests/config/test_recipes.py     # writes the messages anew, for review
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from orchmllm.config.recipe import RecipeError, load_recipe
from orchmllm.plan.balance import POLICIES
from tests.lib.commands import ROOT

GOLDEN = ROOT / "tests" / "golden" / "recipes.yaml"
CASES = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
POLICY_LIST = ", ".join(POLICIES)  # not repeated in the file: there will be more


def message_of(case: dict) -> str:
    """What load_recipe says about r.yaml in the current folder, for the model m unless the case is
    bare."""
    data = (bytes.fromhex(case["hex"]) if "hex" in case
            else case["text"].encode() * case.get("repeat", 1))
    Path("r.yaml").write_bytes(data)
    with pytest.raises(RecipeError) as error:
        load_recipe("r.yaml", [*["model.config=m"][: not case.get("bare")],
                               *case.get("overrides", [])])
    return str(error.value)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_golden_message(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert message_of(case) == case["message"].replace("{policies}", POLICY_LIST).rstrip("\n")
    assert [p.name for p in tmp_path.iterdir()] == ["r.yaml"]  # nothing was executed


def test_cli_reports_before_torch_is_imported(tmp_path):
    """--validate of a broken recipe: exit code 2, every problem, nothing that takes long."""
    (tmp_path / "r.yaml").write_text("trian: {}\ntrain:\n  batch_size: 0\n")
    run = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "orchmllm.train", "r.yaml",
         "--validate", "train.lr=0"], cwd=tmp_path, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)})
    said = [x for x in run.stderr.splitlines() if not x.startswith("import time:")]
    imported = {x.rpartition("|")[2].strip() for x in run.stderr.splitlines()}
    assert run.returncode == 2 and run.stdout == ""
    assert said == [
        "error: recipe r.yaml: 5 problems",
        "  line 1: trian: unknown key; did you mean 'train'?",
        "  line 3: train.batch_size = 0: must be greater than or equal to 1",
        "  command line: train.lr = 0: must be greater than 0",
        "  data.path is missing: give a JSONL file or a folder with data.jsonl, or list "
        "data.sources",
        "  model.pretrained is missing: name the folder of a model, or model.config without its "
        "weights; `orchmllm init DATA` writes a recipe and a small model, `orchmllm compose` a "
        "model of a vision tower, an audio tower and an LLM",
    ]
    assert "yaml" in imported and not {"torch", "transformers", "PIL", "datasets"} & imported


def rewrite() -> None:
    """Replaces every message in the golden file by today's."""
    os.chdir(tempfile.mkdtemp())
    for case in CASES:
        case["message"] = message_of(case).replace(POLICY_LIST, "{policies}") + "\n"
    GOLDEN.write_text(HEAD + yaml.dump(CASES, Dumper=_Blocks, sort_keys=False, width=10**9,
                                       allow_unicode=True), encoding="utf-8")


HEAD = ("# Recipes that cannot be used, and exactly what is said about each. hex: the bytes of\n"
        "# the file; repeat: how often text is repeated; {policies}: the balancing policies;\n"
        "# bare: without model.config=m on the command line.\n"
        "# `python tests/config/test_recipes.py` writes the messages anew.\n")


class _Blocks(yaml.SafeDumper):
    """Writes text of several lines as a block, where YAML allows it."""


def _text(dumper: yaml.Dumper, text: str) -> yaml.Node:
    block = "\n" in text and all(c == "\n" or c.isprintable() for c in text)
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if block else None)


_Blocks.add_representer(str, _text)

if __name__ == "__main__":
    rewrite()
