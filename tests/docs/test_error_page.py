"""docs/errors.md quotes messages of the code."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.lib.commands import ROOT

GAP = "\0"  # what a message fills in


def texts(tree: ast.Module) -> Iterator[str]:
    """Every text of a module, with its own constants filled in. Parts of one expression that are
    joined by + are one text."""
    names = {node.targets[0].id: node.value.value for node in tree.body
             if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
             and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
            yield text_of(node, names)


def text_of(node: ast.AST, names: dict[str, str]) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.Name):
        return names.get(node.id, GAP)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, names)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(value, names) for value in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, names) + text_of(node.right, names)
    return GAP


def quoted() -> list[str]:
    """The messages in the first cells of the tables whose first column is `message`."""
    page = (ROOT / "docs/errors.md").read_text(encoding="utf-8")
    tables = [part.splitlines() for part in page.split("\n\n") if part.startswith("| message ")]
    rows = [line for table in tables for line in table[2:]]
    return [re.match(r"\| `([^`]*)`", row)[1] for row in rows]


def test_messages_are_those_of_the_code():
    sources = sorted((ROOT / "orchmllm").rglob("*.py"))
    known = {text for path in sources for text in texts(ast.parse(path.read_text("utf-8")))}
    messages = quoted()
    assert len(messages) > 10
    for message in messages:
        parts = [part.strip(" :;,()") for part in message.split("...")]
        wanted = re.compile(".*".join(re.escape(part) for part in parts if part), re.S)
        assert any(wanted.search(text) for text in known), message
