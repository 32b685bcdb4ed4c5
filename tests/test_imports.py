"""The one-way import graph of docs/design.md: one row a subpackage, no circle, planning without
torch, data and models apart."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "orchmllm"

# Subpackage or module of the root -> those that it may import. A row names only rows above it, so
# there is no circle.
ALLOWED = {
    "_core": (),
    "recipe": (),
    "launch": (),
    "plan": ("_core", "recipe"),
    "batch": ("plan",),
    "comm": ("plan", "batch"),
    "models": ("recipe", "plan", "batch", "comm"),
    "config": ("recipe", "plan", "models"),
    "orchestrator": ("plan", "batch", "comm"),
    "data": ("recipe", "plan", "batch", "comm", "config", "orchestrator"),
    "dropin": ("launch", "plan", "batch", "comm", "orchestrator", "data"),
    "runtime": ("launch", "plan", "batch", "comm", "models", "config", "orchestrator", "data"),
    "hf": ("plan", "models", "config", "data", "runtime"),
    "sharding": ("plan", "comm", "models", "config", "hf"),
    "estimate": ("recipe", "plan", "batch", "models", "config", "data", "sharding"),
    "simulate": ("_core", "plan", "models", "config"),
    "planner": ("_core", "config", "plan", "models", "sharding", "estimate", "simulate"),
    "report": ("plan", "config", "runtime"),
    "trainer": ("launch", "plan", "comm", "models", "config", "data", "runtime", "hf", "sharding",
                "estimate"),
    "train": ("launch", "comm", "config", "runtime", "hf", "sharding", "estimate", "trainer"),
    "doctor": ("launch", "plan", "batch", "comm", "models", "config", "data", "runtime", "hf",
               "sharding", "trainer", "train"),
    "cli": ("launch", "plan", "batch", "models", "config", "data", "runtime", "hf", "estimate",
            "simulate", "planner", "report", "sharding", "trainer", "train", "doctor"),
    "__main__": ("cli",),
    "__init__": ("plan", "comm", "dropin"),
}
# Exceptions within a row: files that import less than their subpackage may.
NARROWER = {
    "models.config": ("recipe", "plan"),
    "models.flops": ("plan", "models"),
    "models.checkpoint_config": (),
    "sharding.units": ("hf", "models"),
}
NO_TORCH = [
    "orchmllm", "orchmllm.config.recipe", "orchmllm.launch", "orchmllm.train", "orchmllm.config.parse",
    "orchmllm.plan.balance", "orchmllm.plan.step", "orchmllm.config.model",
    "orchmllm.models.flops", "orchmllm.sharding.units", "orchmllm.data.index",
    "orchmllm.tools.data.composition",
    "orchmllm.tools.predict.dry_run", "orchmllm.tools.predict.examples", "orchmllm.models.gpus",
    "orchmllm.sharding.memory", "orchmllm.tools.predict.step_time", "orchmllm.tools.predict.workload",
    "orchmllm.hf.sources", "orchmllm.runtime.display", "orchmllm.runtime.log_schema",
    "orchmllm.tools.report.page",
    "orchmllm.tools.data.command", "orchmllm.papers.schemes", "orchmllm.papers.omnibal"]


def modules() -> list[tuple[str, Path]]:
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts), p)
            for p in sorted(ROOT.rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """orchmllm modules that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "orchmllm":
            base = node.module.partition(".")[2]
            found |= {base or alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names
                      if a.name.split(".")[0] == "orchmllm"}
    return found


@pytest.mark.parametrize("part", list(ALLOWED))
def test_a_subpackage_imports_only_what_its_row_names(part):
    rows = list(ALLOWED)
    assert set(ALLOWED[part]) <= set(rows[:rows.index(part)]), "a row names a later one: a circle"
    for name, path in modules():
        if name.split(".")[0] != part:
            continue
        allowed = NARROWER.get(name, (*ALLOWED[part], part))
        for target in imports(path):
            assert target.split(".")[0] in allowed, (
                f"{name} imports orchmllm.{target}; it may import only {', '.join(allowed)}")


def test_every_module_is_in_a_row_and_the_root_is_small():
    assert {name.split(".")[0] for name, _ in modules()} <= set(ALLOWED)
    root = [name for name, _ in modules() if "." not in name]
    assert len(root) <= 8, root


@pytest.mark.parametrize("module", NO_TORCH)
def test_no_torch(module):
    code = f"import sys, {module}; sys.exit(bool({{'torch', 'transformers'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize("part", ["simulate", "planner"])
def test_no_torch_even_later(part):
    """Not inside a function either: what decides runs where torch is not installed."""
    files = [path for name, path in modules() if name.startswith(part + ".")]
    assert len(files) > 3
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else (
                [node.module or ""] if isinstance(node, ast.ImportFrom) else [])
            assert not any(n.split(".")[0] == "torch" for n in names), path


def test_the_makefile_names_tests_that_exist():
    root = ROOT.parent
    named = re.findall(r"tests/\S+\.py", (root / "Makefile").read_text(encoding="utf-8"))
    assert named and all(list(root.glob(name)) for name in named), named
