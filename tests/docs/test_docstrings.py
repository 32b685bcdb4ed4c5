"""Docstrings of public functions say what they raise, and the shapes of the arrays they take."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

import pytest

from tests.lib.commands import ROOT

ARRAYS = re.compile(r"\b(np\.ndarray|Tensor)\b")
SHAPE = re.compile(r"\((\w+|\d|[^()]{1,60}), ?[^()]*\)|\(\)|shape|scalar")
CODE = sorted((ROOT / "orchmllm").rglob("*.py"))


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef, str]]:
    """(name, function, docstring) of every public function and method. What the docstring of a
    class says holds for its methods, and that of a method for those of other classes that have its
    name and no docstring of their own."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node.name, node, ast.get_docstring(node) or ""
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and (
                        item.name in ("__init__", "__call__") or not item.name.startswith("_")):
                    own = ast.get_docstring(item) or METHODS.get(item.name, "")
                    yield f"{node.name}.{item.name}", item, own + (ast.get_docstring(node) or "")


def methods() -> dict[str, str]:
    """Docstrings of all methods of classes of a module, by their names."""
    found: dict[str, str] = {}
    for path in CODE:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                for item in node.body:
                    if isinstance(item, ast.FunctionDef) and not item.name.startswith("__"):
                        said = ast.get_docstring(item) or ""
                        found[item.name] = found.get(item.name, "") + said
    return found


METHODS = methods()


def own_raises(body: Sequence[ast.stmt]) -> Iterator[str]:
    """Names of the exceptions that a body raises and does not catch (not those of functions within
    it)."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield ast.unparse(node.exc.func)
        if isinstance(node, ast.Try):
            caught = " ".join(ast.unparse(h.type) if h.type else "" for h in node.handlers)
            yield from (r for r in own_raises(node.body) if r not in caught)
            for rest in (*(h.body for h in node.handlers), node.orelse, node.finalbody):
                yield from own_raises(rest)
        else:
            for name in ("body", "orelse"):
                yield from own_raises(getattr(node, name, []))
            for case in getattr(node, "cases", []):
                yield from own_raises(case.body)


def takes_arrays(function: ast.FunctionDef) -> bool:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return any(a.annotation is not None and ARRAYS.search(ast.unparse(a.annotation))
               for a in every)


@pytest.mark.parametrize("path", CODE, ids=lambda p: p.relative_to(ROOT / "orchmllm").as_posix())
def test_public_functions_say_what_they_raise_and_take(path):
    missing = []
    for name, function, doc in functions(ast.parse(path.read_text(encoding="utf-8"))):
        raised = sorted({r for r in own_raises(function.body)
                         if r not in ("AssertionError", "NotImplementedError", "StopIteration")})
        if raised and "rais" not in doc.lower() and not any(r in doc for r in raised):
            missing.append(f"{name} raises {', '.join(raised)} without saying so")
        if takes_arrays(function) and not SHAPE.search(doc):
            missing.append(f"{name} takes arrays without saying their shapes")
    assert not missing, "\n".join(missing)
