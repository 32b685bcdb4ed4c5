"""YAML without surprises. Reads what YAML 1.2 calls the core schema, so 1e-4 is a number and 010,
1:30 and 2024-01-01 are text; no tags, so no objects. Aliases and merge keys work. Sections know
the lines of their keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import yaml

TAG = "tag:yaml.org,2002:"
_INT = re.compile(r"(?:[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+)$")  # 010 is text: eight or ten?
_FLOAT = re.compile(r"(?:[-+]?(?=[0-9_]*[.eE])([0-9][0-9_]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"
                    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$")


class YamlProblem(ValueError):
    """Text that is not YAML. line: from 1, 0 if unknown."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(reason)
        self.line = line


class Section(dict):
    """A mapping. lines: key -> where that is written."""

    def __init__(self, values: Mapping[str, Any], lines: Mapping[str, int]) -> None:
        super().__init__(values)
        self.lines = dict(lines)


class Loader(yaml.SafeLoader):
    """SafeLoader with the core schema's plain scalars. at_line: of every key; 0: as written."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in pairs
                if tag.removeprefix(TAG) in ("null", "bool", "merge")]
        for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()}
    at_line = 0

    def section(self, node):
        """A mapping. Raises ConstructorError for a key that is no word, or that is there twice."""
        section = Section({}, {})
        yield section  # before what is below, where an alias may stand for it
        lines: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a list or a section as a key: keys are words", key.start_mark)
            if key.value in lines and key.value != "<<":
                raise yaml.constructor.ConstructorError(
                    None, None, f"duplicate key {key.value!r}, also on line {lines[key.value]}: "
                    "keep one of them", key.start_mark)
            lines[key.value] = key.start_mark.line + 1
        self.flatten_mapping(node)
        for key, value in node.value:
            section[key.value] = self.construct_object(value)
            section.lines[key.value] = self.at_line or key.start_mark.line + 1

    def scalar(self, node):
        try:
            return yaml.SafeLoader.yaml_constructors[node.tag](self, node)
        except (ValueError, KeyError):  # `!!int x`, or more digits than Python reads
            self.tagged(node)

    def tagged(self, node):
        """Raises ConstructorError naming the tag."""
        raise yaml.constructor.ConstructorError(
            None, None, f"the tag {node.tag.replace(TAG, '!!')} is not allowed here: write a plain "
            "value", node.start_mark)


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which `Loader` would read as a number."""


Loader.add_implicit_resolver(TAG + "int", _INT, list("-+0123456789"))
for _each in (Loader, Dumper):
    _each.add_implicit_resolver(TAG + "float", _FLOAT, list("-+0123456789."))
Loader.yaml_constructors = {
    **{TAG + kind: Loader.scalar for kind in ("null", "bool", "int", "float", "str")},
    TAG + "seq": Loader.construct_yaml_seq, TAG + "map": Loader.section, None: Loader.tagged}


def dump(tree: Any) -> str:
    """Block style, keys in order, one line per scalar."""
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, width=10**9, allow_unicode=True)


def quoted(text: str) -> str:
    """Text as a value on one line, whatever characters it has."""
    return yaml.dump(text, Dumper=Dumper, default_style='"', width=10**9, allow_unicode=True)[:-1]


def parse(data: bytes | str, at_line: int = 0) -> Any:
    """The document's value, with Section for its mappings; None if it is empty. at_line: of every
    key, 0: as it is written. Raises YamlProblem."""
    if isinstance(data, bytes):
        try:
            data = data.decode("utf-8-sig")
        except UnicodeDecodeError as e:
            raise YamlProblem(data[:e.start].count(b"\n") + 1,
                              f"byte 0x{data[e.start]:02x} is not UTF-8: save the file as UTF-8"
                              ) from None
    try:
        loader = Loader(data)
        loader.at_line = at_line
        return loader.get_single_data()
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
        "found another document": "keep one document: remove '---'",
        "expected <block end>": "indent keys of one section alike",
        "cannot start any token": "quote the value",
    }
    cure = next((c for k, c in cures.items() if k in cause), "")
    return f"{cause}: {cure}" if cure else cause
