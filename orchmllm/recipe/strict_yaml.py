"""YAML without surprises. Reads what YAML 1.2 calls the core schema, so 1e-4 is a number and 010,
1:30 and 2024-01-01 are text; no tags, so no objects. Aliases and merge keys work.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
_PLAIN = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "bool": (r"true|True|TRUE|false|False|FALSE|yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF",
             list("tTfFyYnNoO")),
    "int": (r"[-+]?(0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", list("-+0123456789")),
    "float": (r"[-+]?([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
              r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", list("-+0123456789.")),
    "merge": (r"<<", ["<"]),
}
_LEADING_ZERO = re.compile(r"[-+]?0[0-9_]+$")
SCALARS = tuple(TAG + kind for kind in ("null", "bool", "int", "float", "str"))


class YamlProblem(ValueError):
    """Text that is not YAML. line: from 1, 0 if unknown."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class Loader(yaml.SafeLoader):
    """SafeLoader with the core schema's plain scalars."""

    yaml_implicit_resolvers: dict = {}

    def resolve(self, kind, value, implicit):
        tag = super().resolve(kind, value, implicit)
        # 010 is eight to YAML 1.1 and ten to most readers: neither, it stays text.
        plain = kind is yaml.ScalarNode and implicit[0]
        return TAG + "str" if plain and _LEADING_ZERO.match(value or "") else tag


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which `Loader` would read as a number."""


for _kind, (_pattern, _first) in _PLAIN.items():
    Loader.add_implicit_resolver(TAG + _kind, re.compile(f"(?:{_pattern})$"), _first)
Dumper.add_implicit_resolver(TAG + "float", re.compile(f"(?:{_PLAIN['float'][0]})$"),
                             _PLAIN["float"][1])


def dump(tree: Any) -> str:
    """Block style, keys in order, one line per scalar."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=10**9, allow_unicode=True)


def scalar(node: yaml.Node) -> Any:
    """Value of a scalar node. Raises ValueError for a tag other than the plain ones."""
    if node.tag not in SCALARS:
        raise ValueError(f"the YAML tag {node.tag.replace(TAG, '!!')} is not allowed here: "
                         "write a plain value")
    try:
        return Loader("").construct_object(node)
    except (yaml.YAMLError, ValueError) as e:
        raise ValueError(f"not a value of the tag {node.tag.replace(TAG, '!!')}") from e


def parse(data: bytes | str) -> yaml.Node | None:
    """The document's root node, None if it is empty. Raises YamlProblem."""
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise YamlProblem(data[:e.start].count(b"\n") + 1,
                              f"byte 0x{data[e.start]:02x} is not UTF-8: save the file as UTF-8"
                              ) from None
    try:
        return Loader(data).get_single_node()
    except yaml.reader.ReaderError as e:
        code = e.character if isinstance(e.character, int) else ord(e.character)
        raise YamlProblem(data[:e.position].count("\n") + 1,
                          f"character U+{code:04X} is not allowed in YAML: remove it") from None
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        line = mark.line + 1 if mark else 0
        raise YamlProblem(line, _explain(e, data, line)) from None
    except RecursionError:
        raise YamlProblem(0, "nested too deeply: a recipe has at most four levels") from None


def _explain(error: yaml.MarkedYAMLError, text: str, line: int) -> str:
    """What the parser says, and the usual cause."""
    lines = text.splitlines()
    source = lines[line - 1] if 0 < line <= len(lines) else ""
    if "\t" in source[: len(source) - len(source.lstrip())] or r"'\t'" in (error.problem or ""):
        return "a tab: YAML indents with spaces"
    cause = (error.problem or "cannot be parsed").removeprefix("but ")
    if (error.context or "").startswith("while"):
        cause += f" {error.context}"
        if error.context_mark and error.context_mark.line + 1 != line:
            cause += f" that begins on line {error.context_mark.line + 1}"
    cures = {
        "mapping values are not allowed here": "quote a value that has ': ' in it, and indent keys "
                                               "of one section alike",
        "expected ',' or ']'": "close the bracket",
        "expected ',' or '}'": "close the brace",
        "expected the node content": "close the bracket or brace, or give a value",
        "could not find expected ':'": "a key is followed by ': '",
        "found another document": "keep one document: remove '---'",
        "undefined alias": "define it before with &name",
        "duplicate anchor": "rename one of them",
        "found unexpected end of stream": "close the quote",
        "expected <block end>": "indent keys of one section alike",
        "cannot start any token": "quote the value",
    }
    cure = next((c for k, c in cures.items() if k in cause), "")
    return f"{cause}: {cure}" if cure else cause
