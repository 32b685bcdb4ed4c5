"""From the text of a recipe and the overrides of a command line to checked dataclasses.

Flow: YAML nodes (with their lines) -> one node per dotted path, overrides last -> values of the
right type within their bounds -> instances -> rules between keys. Every step adds to one list of
problems, so that a recipe is corrected in one go.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import yaml

from orchmllm.recipe import strict_yaml
from orchmllm.recipe.schema import Leaf, leaves, members, sections
from orchmllm.recipe.values import convert, describe, show

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists every problem."""


class Place(NamedTuple):
    """Where a value comes from; sorts as problems are listed."""

    order: int
    text: str


COMMAND_LINE = Place(2**31, "command line")
DEFAULT = Place(2**31 + 1, "default")
MISSING = Place(2**31 + 2, "")


def line(number: int) -> Place:
    return Place(number, f"line {number}" if number else "")


class Problem(NamedTuple):
    place: Place
    text: str


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A checked recipe. places: dotted path -> where its value was written, for what is not a
    default."""

    recipe: T
    places: dict[str, Place]


def read(cls: type[T], name: str, data: bytes | str, overrides: Sequence[str] = ()) -> Loaded[T]:
    """`data`, a YAML document, merged with `section.key=value` overrides into an instance of the
    dataclass `cls`. Raises RecipeError listing every problem with `name`."""
    reader = _Reader(cls)
    try:
        root = strict_yaml.parse(data)
    except strict_yaml.YamlProblem as e:
        reader.problems.append(Problem(line(e.line), f"not valid YAML: {e}"))
        raise _error(name, reader.problems) from None
    if root is not None:
        reader.section(root, cls, "", None)
    for item in overrides:
        reader.override(item)
    recipe = reader.build()
    if reader.problems:
        raise _error(name, reader.problems)
    return Loaded(recipe, {path: place for path, (_, place) in reader.nodes.items()})


def _error(name: str, problems: list[Problem]) -> RecipeError:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    listed = sorted(problems, key=lambda p: p.place.order)  # stable
    return RecipeError(f"recipe {name}: {count}\n" + "\n".join(
        f"  {p.place.text}: {p.text}" if p.place.text else f"  {p.text}" for p in listed))


@dataclass
class _Reader:
    """nodes: dotted path -> (YAML node, place); bad: paths that already have a problem."""

    cls: type
    nodes: dict[str, tuple[yaml.Node, Place]] = field(default_factory=dict)
    bad: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)
    _merged: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.leaves = {leaf.path: leaf for leaf in leaves(self.cls)}
        self.sections = dict(sections(self.cls))

    def report(self, place: Place, path: str, text: str) -> None:
        self.problems.append(Problem(place, text))
        self.bad.add(path)

    def section(self, node: yaml.Node, cls: type, where: str, place: Place | None) -> None:
        """Files the keys of a section under their dotted paths. place: of all keys, None for the
        line of each."""
        if isinstance(node, yaml.ScalarNode) and node.tag == strict_yaml.TAG + "null":
            return
        at = place or line(node.start_mark.line + 1)
        if not isinstance(node, yaml.MappingNode):
            what = "the top level" if not where else where
            self.report(at, where, f"{what} is {describe(node)}, expected a section with keys: "
                                   f"{', '.join(members(cls))}")
            return
        for key_node, value in self._pairs(node, where, place):
            at = place or line(key_node.start_mark.line + 1)
            name = key_node.value
            path = f"{where}.{name}" if where else name
            if name not in members(cls):  # a dotted path as one key is not one
                self.report(at, path, f"{path}: {self.unknown(name, cls, where)}")
            elif path in self.leaves:
                self.nodes[path] = (value, at)
            else:
                self.section(value, self.sections[path], path, place)

    def _pairs(self, node: yaml.MappingNode, where: str,
               place: Place | None) -> Iterator[tuple[yaml.ScalarNode, yaml.Node]]:
        """Keys and values, merge keys (<<) resolved; reports duplicates."""
        seen: dict[str, int] = {}
        if id(node) not in self._merged:
            self._merged.add(id(node))
            for key_node, _ in node.value:
                if not isinstance(key_node, yaml.ScalarNode):
                    continue
                at, name = key_node.start_mark.line + 1, key_node.value
                if name in seen and name != "<<":
                    path = f"{where}.{name}" if where else name
                    self.report(place or line(at), path,
                                f"{path}: duplicate key, also on line {seen[name]}: keep one of "
                                "them")
                seen.setdefault(name, at)
            try:
                strict_yaml.Loader("").flatten_mapping(node)
            except yaml.constructor.ConstructorError as e:
                mark = e.problem_mark or node.start_mark
                self.report(place or line(mark.line + 1), where,
                            f"{where or 'the top level'}: <<: {e.problem}")
        for key_node, value in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if key_node.tag != strict_yaml.TAG + "merge":
                    yield key_node, value
            else:
                self.report(place or line(key_node.start_mark.line + 1), where,
                            f"{where or 'the top level'}: {describe(key_node)} as a key: "
                            "keys are words")

    def unknown(self, name: str, cls: type, where: str) -> str:
        """What is wrong with a key that does not exist, and where it might belong."""
        if name in self.leaves or name in self.sections:  # a dotted path as one key
            *path, last = name.split(".")
            return f"write it nested: {': {'.join((*path, last))}: ...{'}' * len(path)}"
        everywhere = [*self.leaves, *(s for s in self.sections if s)]
        elsewhere = [p for p in everywhere if p.rpartition(".")[2] == name]
        alias = [leaf.path for leaf in self.leaves.values() if name in leaf.key.aliases]
        here = [p for p in alias if p.rpartition(".")[0] == where]
        if here or elsewhere or alias:
            return f"unknown key; did you mean {_either(here or elsewhere or alias)}?"
        close = difflib.get_close_matches(name, members(cls), n=1)
        if close:
            return f"unknown key; did you mean {f'{where}.{close[0]}'.lstrip('.')!r}?"
        return f"unknown key; {where or 'a recipe'} has {', '.join(members(cls))}"

    def override(self, item: str) -> None:
        """One `section.key=value`; the value is read as YAML."""
        path, sep, text = item.partition("=")
        if not sep or not path:
            self.problems.append(Problem(
                COMMAND_LINE, f"{item!r}: an override has the form section.key=value"))
            return
        try:
            node = strict_yaml.parse(text)
        except strict_yaml.YamlProblem as e:
            self.report(COMMAND_LINE, path, f"{path}: {show(text)} is not a YAML value: {e}")
            return
        if node is None and text.strip():
            self.report(COMMAND_LINE, path, f"{path}: {show(text)} is a comment in YAML: quote it")
            return
        if node is None:
            node = yaml.ScalarNode(strict_yaml.TAG + "str", "")
        if path in self.leaves:
            self.nodes[path] = (node, COMMAND_LINE)
            self.bad.discard(path)
        elif path in self.sections and path:
            self.section(node, self.sections[path], path, COMMAND_LINE)
        else:
            self.report(COMMAND_LINE, path, f"{path}: {self._unknown_path(path)}")

    def _unknown_path(self, path: str) -> str:
        where = ""
        for name in path.split("."):
            if where in self.leaves:
                return f"{where} is a value and has no keys"
            below = f"{where}.{name}" if where else name
            if below not in self.leaves and below not in self.sections:
                return self.unknown(name, self.sections[where], where)
            where = below
        return "unknown key"

    def build(self) -> Any:
        """The instance; values that have a problem are their defaults in it."""
        values = {path: leaf.default for path, leaf in self.leaves.items()}
        for path, leaf in self.leaves.items():
            if path not in self.nodes:
                instead = f"{path.rpartition('.')[0]}.{leaf.key.unless}"
                if leaf.key.required and not self._is_bad(path) and instead not in self.nodes:
                    self.report(MISSING, path, f"{path} is missing: {leaf.key.required}")
                continue
            node, place = self.nodes[path]
            try:
                values[path] = self._items(leaf, node, place) if leaf.item else convert(leaf, node)
            except ValueError as e:
                self.report(place, path, f"{path}{e}")
        recipe = self._instance(self.cls, "", values)
        self._conflicts(recipe, "")
        return recipe

    def _items(self, leaf: Leaf, node: yaml.Node, place: Place) -> tuple:
        """A list of sections, each read like a recipe of its own."""
        keys = f"sections with keys: {', '.join(members(leaf.item))}"
        if not isinstance(node, yaml.SequenceNode):
            raise ValueError(f" is {describe(node)}, expected a list of {keys}")
        items = []
        for k, part in enumerate(node.value):
            at = place if place == COMMAND_LINE else line(part.start_mark.line + 1)
            if not isinstance(part, yaml.MappingNode):
                self.report(at, leaf.path, f"{leaf.path}[{k}] is {describe(part)}, expected "
                                           f"{keys}")
                continue
            reader = _Reader(leaf.item)
            reader.section(part, leaf.item, "", place if place == COMMAND_LINE else None)
            items.append(reader.build())
            for problem in reader.problems:
                self.report(at if problem.place == MISSING else problem.place, leaf.path,
                            f"{leaf.path}[{k}].{problem.text}")
        return tuple(items)

    def _is_bad(self, path: str) -> bool:
        """Whether the key or a section it is in already has a problem."""
        return any(not b or path == b or path.startswith(f"{b}.") for b in self.bad)

    def _instance(self, cls: type, where: str, values: dict[str, Any]) -> Any:
        parts = {}
        for name, (kind, _) in members(cls).items():
            path = f"{where}.{name}" if where else name
            parts[name] = (self._instance(kind, path, values) if dataclasses.is_dataclass(kind)
                           else values[path])
        return cls(**parts)

    def _conflicts(self, section: Any, where: str) -> None:
        """Asks every section for rules between keys that are broken; not where a key involved is
        wrong by itself."""
        for name, (kind, _) in members(type(section)).items():
            if dataclasses.is_dataclass(kind):
                self._conflicts(getattr(section, name), f"{where}.{name}" if where else name)
        if not hasattr(section, "conflicts"):
            return
        for conflict in section.conflicts():
            paths = [f"{where}.{k}" if where else k for k in conflict.keys]
            given = [p for p in paths if p in self.nodes]
            if any(map(self._is_bad, paths)):
                continue
            value = section
            for name in conflict.keys[0].split("."):
                value = getattr(value, name)
            # The line to go to: of the key blamed, or of the one that made its default wrong.
            place = self.nodes[given[0]][1] if given else DEFAULT
            default = "" if paths[0] in self.nodes else " (default)"
            self.problems.append(Problem(
                place, f"{paths[0]} = {show(value)}{default}: {conflict.cure}"))


def _either(paths: list[str]) -> str:
    return " or ".join(repr(p) for p in paths[:4])
