"""One value of a recipe: from what YAML says to the type and bounds of its key, or the cure."""

from __future__ import annotations

from typing import Any

import yaml

from orchmllm.recipe import strict_yaml
from orchmllm.recipe.schema import Leaf

_NAMES = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
_READ_AS = {bool: "true or false", int: "a number", float: "a number", str: "text"}


def show(value: object) -> str:
    """A value as it is written in a recipe, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def convert(leaf: Leaf, node: yaml.Node) -> Any:
    """The node's value in the leaf's type. Raises ValueError with ` = value: cure`."""
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f" is {describe(node)}, expected {_NAMES[leaf.kind]}")
    try:
        value = strict_yaml.scalar(node)
    except ValueError as e:
        raise ValueError(f": {e}") from None
    wanted = leaf.kind
    shown = show(value) if value is None or isinstance(value, str) else node.value
    if wanted is float and type(value) is int:
        try:
            value = float(value)
        except OverflowError:
            raise ValueError(f" = {shown}: must be a finite number") from None
    if type(value) is not wanted:
        raise ValueError(f" = {shown}: {_type_cure(wanted, value, node)}")
    cure = leaf.key.problem(value)
    if cure:
        raise ValueError(f" = {shown}: {cure}")
    return value


def _type_cure(wanted: type, value: Any, node: yaml.ScalarNode) -> str:
    expected = f"expected {_NAMES[wanted]}"
    if value is None:
        return f"no value, {expected}: give one or remove the key"
    if wanted is str:
        return f"YAML reads this as {_READ_AS[type(value)]}, {expected}: quote it, '{node.value}'"
    if isinstance(value, str) and wanted in (int, float):
        try:
            wanted(value)
        except ValueError:
            return f"text, {expected}"
        if node.style:
            return f"text, {expected}: remove the quotes"
        return f"text, {expected}: write {float(value) if wanted is float else int(value)}"
    if wanted is bool and value in ("true", "false"):
        return f"text, {expected}: remove the quotes"
    if wanted is int and isinstance(value, float) and value.is_integer():
        return f"{expected}: write {int(value)}"
    return expected


def describe(node: yaml.Node) -> str:
    """What kind of node it is, for a message that expected another."""
    if isinstance(node, yaml.ScalarNode):
        return f"the value {show(node.value) if node.style else node.value}"
    return "a list" if isinstance(node, yaml.SequenceNode) else "a section"
