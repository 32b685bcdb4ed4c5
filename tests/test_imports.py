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
# there is no circle. The rows before `tools.predict` train (the base); then come the tools around
# it, then the schemes of other papers: none imports a later room.
ALLOWED = {
    "_core": (),
    "launch": (),
    "plan": ("_core",),
    "config": ("plan",),
    "batch": ("plan",),
    "counts": (),
    "comm": ("launch", "plan", "batch"),
    "encoders": ("plan", "batch", "comm"),
    "models": ("config", "plan", "batch", "counts", "comm", "encoders"),
    "orchestrator": ("plan", "batch", "comm"),
    "data": ("config", "plan", "batch", "comm", "orchestrator"),
    "runtime": ("launch", "config", "plan", "batch", "comm", "models", "orchestrator", "data"),
    "hf": ("config", "plan", "models", "data"),
    "composition": ("batch", "models", "data", "hf"),
    "sharding": ("config", "plan", "batch", "counts", "comm", "models", "data", "hf", "encoders"),
    "proof": ("config", "plan", "batch", "counts", "comm", "encoders", "models", "data",
              "sharding"),
    "loader": ("plan", "batch", "counts", "comm", "orchestrator", "data", "encoders"),
    "__init__": ("plan", "comm", "loader", "encoders", "composition"),
    "trainer": ("launch", "config", "plan", "batch", "comm", "models", "data", "runtime", "hf",
                "sharding", "proof"),
    "cli": ("launch", "data"),
    "train": ("launch", "cli", "config", "comm", "models", "data", "runtime", "hf", "sharding",
              "trainer"),
    "__main__": ("cli",),
    "tools.predict": ("cli", "config", "plan", "batch", "counts", "models", "data", "encoders",
                      "sharding"),
    "tools.data": ("cli", "config", "launch", "plan", "batch", "models", "data", "sharding",
                   "tools.predict"),
    "tools.report": ("cli", "config", "plan", "data", "runtime", "tools.predict"),
    "tools.compare": ("launch", "cli", "config", "models", "data", "runtime", "sharding", "trainer",
                      "train", "tools.report"),
    "tools.compose": ("cli", "models", "data", "hf", "composition"),
    "tools.export": ("cli", "config", "plan", "models", "data", "runtime", "hf",
                     "tools.compose"),
    "tools.init": ("cli", "config", "plan", "models", "data", "hf", "sharding", "tools.predict",
                   "tools.compose"),
    "tools.generate": ("cli", "config", "plan", "batch", "models", "data", "hf", "sharding",
                       "tools.export"),
    "tools.doctor": ("launch", "cli", "config", "plan", "batch", "comm", "models", "data",
                     "runtime", "hf", "sharding", "trainer", "train"),
    "papers": ("_core", "cli", "config", "plan", "models", "data", "sharding", "tools.predict",
               "tools.data", "tools.init"),
}
# Exceptions within a row: files that import less than their subpackage may.
NARROWER = {
    "models.flops": ("config", "plan", "models"),
    "sharding.units": ("config", "plan", "models"),
}
NO_TORCH = [
    "orchmllm", "orchmllm.launch", "orchmllm.train", "orchmllm.cli", "orchmllm.config.recipe",
    "orchmllm.plan.balance", "orchmllm.plan.step", "orchmllm.models.flops", "orchmllm.models.gpus",
    "orchmllm.models.described", "orchmllm.sharding.units", "orchmllm.sharding.memory",
    "orchmllm.data.index", "orchmllm.hf.sources", "orchmllm.runtime.display",
    "orchmllm.runtime.log_schema", "orchmllm.tools.predict.dry_run",
    "orchmllm.tools.predict.examples", "orchmllm.tools.predict.step_time",
    "orchmllm.tools.predict.workload",
    "orchmllm.tools.data.command", "orchmllm.tools.data.composition",
    "orchmllm.tools.report.page", "orchmllm.papers.schemes", "orchmllm.papers.omnibal"]


def part_of(module: str) -> str:
    """The row of a module."""
    first, _, rest = module.partition(".")
    return f"tools.{rest.partition('.')[0]}" if first == "tools" else first


def modules() -> list[tuple[str, Path]]:
    return [(".".join(p.relative_to(ROOT).with_suffix("").parts), p)
            for p in sorted(ROOT.rglob("*.py"))]


def imports(path: Path) -> set[str]:
    """orchmllm modules that a file imports, anywhere in it."""
    found, known = set(), {name for name, _ in modules()}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "orchmllm":
            base = node.module.partition(".")[2]
            inner = {f"{base}.{alias.name}" if base else alias.name for alias in node.names}
            found |= {name if name in known or not base else base for name in inner}
        elif isinstance(node, ast.Import):
            found |= {a.name.partition(".")[2] for a in node.names
                      if a.name.split(".")[0] == "orchmllm"}
    return found


@pytest.mark.parametrize("part", list(ALLOWED))
def test_a_subpackage_imports_only_what_its_row_names(part):
    rows = list(ALLOWED)
    assert set(ALLOWED[part]) <= set(rows[:rows.index(part)]), "a row names a later one: a circle"
    for name, path in modules():
        if part_of(name) != part:
            continue
        allowed = NARROWER.get(name, (*ALLOWED[part], part))
        for target in imports(path):
            assert part_of(target) in allowed, (
                f"{name} imports orchmllm.{target}; it may import only {', '.join(allowed)}")


def test_every_module_is_in_a_row_and_the_root_is_small():
    assert {part_of(name) for name, _ in modules()} - {"tools.__init__"} <= set(ALLOWED)
    root = [name for name, _ in modules() if "." not in name]
    assert len(root) <= 7, root


# Each module is the first of this package in a process of its own, a fork.
LOOK = """
import importlib, os, sys
import numpy, yaml  # most of the time that the modules take
for module in sys.argv[1:]:
    if not os.fork():
        importlib.import_module(module)
        os._exit(bool({"torch", "transformers"} & set(sys.modules)))
    if os.wait()[1]:
        print(module, flush=True)
"""


def test_no_torch():
    done = subprocess.run([sys.executable, "-c", LOOK, *NO_TORCH], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr


@pytest.mark.parametrize("part", ["papers", "plan"])
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
