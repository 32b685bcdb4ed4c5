"""The one-way import graph of docs/design.md: plan/ without torch, data and models apart."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "orchmllm"

# module prefix -> what it may import from orchmllm (prefixes); more specific prefixes first.
ALLOWED = {
    "schema": (),
    "strict_yaml": (),
    "log_schema": (),
    "values": ("schema", "strict_yaml"),
    "recipe": ("schema", "strict_yaml", "values"),
    "plan": ("plan", "_core", "schema"),
    "models.config": ("plan.layout", "schema"),
    "errors": (),
    "batch": ("plan",),
    "hops": ("plan",),
    "programs": ("plan", "comm"),
    "comm": ("plan", "hops", "batch"),
    "metrics": ("log_schema",),
    "agreement": ("errors",),
    "orchestrator": ("plan", "agreement", "batch", "comm", "hops", "programs"),
    "data.spec": ("schema",),
    "data.__main__": ("config", "data", "launch", "plan"),
    "data": ("plan", "batch", "comm", "orchestrator", "errors", "launch", "data"),
    "adapt": ("comm",),
    "models": ("plan", "batch", "comm", "metrics", "models"),
    "config": ("plan", "models.config", "data.spec", "schema", "strict_yaml", "recipe"),
    "progress": ("config",),
    "hf.describe": ("hf", "models.config", "models.llm"),
    "hf": ("hf", "models.config"),
    "export": ("hf", "config", "models.config", "models.audio", "data.opening", "checkpoint",
               "launch"),
    "pretrained": ("errors", "hf", "models", "seeded"),
    "fsdp": ("models", "config", "hf", "pretrained", "seeded", "topology"),
    "seeded": ("models",),
    "topology": ("config",),
    "shapes": ("models.config",),
    "activations": ("models.config",),
    "flops": ("plan", "models.config"),
    "memory": ("plan", "models.config", "config", "flops", "shapes", "activations"),
    "predict": ("plan", "models.config", "flops", "memory", "shapes"),
    "fit": ("plan", "config", "flops", "memory"),
    "measure": ("plan", "batch", "flops", "models"),
    "measure_parts": ("plan", "batch", "config", "flops", "fsdp", "measure", "memory", "models",
                      "orchestrator"),
    "simulate": ("plan", "simulate", "models.config", "flops"),
    "planner": ("plan", "simulate", "planner", "models.config", "flops", "activations", "predict",
                "shapes", "workload"),
    "launch": (),
    "stop": (),
    "health": ("metrics", "errors"),
    "checkpoint": ("comm", "config", "errors"),
    "calibrate": ("plan",),
    "progress_state": ("calibrate", "config", "data", "errors", "models.config"),
    "canary": ("plan", "data"),
    "build": ("plan", "config", "data", "flops", "orchestrator", "comm"),
}


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


@pytest.mark.parametrize("name, path", modules(), ids=lambda x: x if isinstance(x, str) else "")
def test_edges(name, path):
    prefix = next((p for p in ALLOWED if name == p or name.startswith(p + ".")), None)
    if prefix is None:
        return  # trainer, train and scripts sit on top
    for target in imports(path):
        assert any(target == a or target.startswith(a + ".") for a in ALLOWED[prefix]), (
            f"{name} imports orchmllm.{target}; it may import only {ALLOWED[prefix]}")


@pytest.mark.parametrize("module", ["orchmllm", "orchmllm.plan.step", "orchmllm.plan.balance",
                                    "orchmllm.config", "orchmllm.launch", "orchmllm.train",
                                    "orchmllm.cli.data", "orchmllm.data.index",
                                    "orchmllm.runtime.log_schema", "orchmllm.runtime.display",
                                    "orchmllm.hf.sources",
                                    "orchmllm.simulate.compare, orchmllm.simulate.pipeline",
                                    "orchmllm.planner.omnibal, orchmllm.planner.baselines, "
                                    "orchmllm.planner.recompute"])
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
