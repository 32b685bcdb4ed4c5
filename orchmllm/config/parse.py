"""From the text of a recipe and the overrides of a command line to checked dataclasses.

Flow: YAML -> a tree of sections that know their lines, overrides last -> types, bounds and choices
by pydantic -> rules between keys. Every step adds to one list of problems, so that a recipe is
corrected in one go.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import takewhile
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from orchmllm.config.schema import Leaf, did_you_mean, leaves, members, sections
from orchmllm.config.strict_yaml import Section, YamlProblem, dump, parse

T = TypeVar("T")
Path = tuple  # of a key: names, and numbers for the items of a list
# As line numbers, so that problems are sorted by them.
COMMAND_LINE, NOWHERE = 2**31, 2**31 + 1


class RecipeError(ValueError):
    """A recipe that cannot be used; the message lists every problem."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """A checked recipe. places: dotted path -> where its value was written (`line 3`, `command
    line`), for what is not a default."""

    recipe: T
    places: dict[str, str]


def read(
    cls: type[T], name: str, data: bytes | str, overrides: Sequence[str] = (),
) -> Loaded[T]:
    """`data`, a YAML document, merged with `section.key=value` overrides into an instance of the
    dataclass `cls`. Raises RecipeError listing every problem with `name`."""
    try:
        tree = parse(data)
    except YamlProblem as e:
        raise _error(name, [(e.line, f"not valid YAML: {e}")]) from None
    schema = _schema(cls)
    problems, bad = [], set()  # (line, text); paths
    for item in overrides:
        try:
            tree = _merged(tree, _override(item, schema.leaves))
        except ValueError as e:
            problems.append((COMMAND_LINE, str(e)))
            bad.add(tuple(item.partition("=")[0].split(".")))
    tree = _without_words(tree, schema.leaves)
    try:
        recipe = schema.adapter.validate_python(tree)
    except ValidationError as e:
        sound = tree
        for error in e.errors(include_url=False):
            path = error["loc"]
            sound = _without(sound, path)
            if error["input"] is not None or _dotted(path) not in schema.sections:
                problems.append((_find(tree, path)[0], schema.message(error, tree)))
                bad.add(tuple(takewhile(lambda part: isinstance(part, str), path)))
        recipe = schema.adapter.validate_python(sound)
    problems += _broken_rules(recipe, (), tree, bad)
    if problems:
        raise _error(name, problems)
    lines = {path: _find(tree, path.split(".")) for path in schema.leaves}
    return Loaded(recipe, {path: place(line) for path, (line, given) in lines.items() if given})


def place(line: int) -> str:
    """`line 3`, `command line` or nothing."""
    named = {COMMAND_LINE: "command line", NOWHERE: "", 0: ""}
    return named.get(line, f"line {line}")


def to_yaml(recipe: object) -> str:
    """The merged recipe, in the form that `read` takes."""
    return dump(dataclasses.asdict(recipe))


def explain(loaded: Loaded) -> str:
    """The merged recipe, with where each value comes from as a comment: still a recipe."""
    text = to_yaml(loaded.recipe)
    lines, written = text.splitlines(), read(type(loaded.recipe), "", text).places
    for path, at in written.items():
        k = int(at.removeprefix("line ")) - 1
        origin = loaded.places.get(path, "default")
        lines[k] = f"{lines[k]:<44}  # {'recipe ' * origin.startswith('line')}{origin}"
    return "\n".join(lines) + "\n"


def _error(name: str, problems: list[tuple[int, str]]) -> RecipeError:
    count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
    listed = sorted(problems, key=lambda p: p[0])  # stable
    return RecipeError(f"recipe {name}: {count}\n" + "\n".join(
        f"  {place(line)}: {text}" if place(line) else f"  {text}" for line, text in listed))


def _dotted(path: Path) -> str:
    """`data.sources[0].path`."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).lstrip(".")


def show(value: object) -> str:
    """A value as it is written in a recipe, shortened."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:60]}... ({len(text)} characters)"


def _override(item: str, leaves: Mapping[str, Leaf]) -> Section:
    """The sections around the value of one `section.key=value`; it is read as YAML, but a number
    is text where the key takes text: a shell removes the quotes that YAML would need."""
    path, sep, text = item.partition("=")
    if not sep or not all(path.split(".")):
        raise ValueError(f"{item!r}: an override has the form section.key=value")
    try:
        value = parse(text, COMMAND_LINE)
    except YamlProblem as e:
        raise ValueError(f"{path}: {show(text)} is not a YAML value: {e}") from None
    value = value if text else ""
    if type(value) in (int, float) and path in leaves and leaves[path].kind is str:
        value = text
    for name in reversed(path.split(".")):
        value = Section({name: value}, {name: COMMAND_LINE})
    return value


def _merged(old: Any, new: Any) -> Any:
    """`old` with the keys of `new`. Copies: a section may stand in several places (aliases)."""
    if not (isinstance(old, Section) and isinstance(new, Section)):
        return new
    return Section({**old, **{k: _merged(old.get(k), v) for k, v in new.items()}},
                   {**old.lines, **new.lines})


def _without_words(tree: Any, leaves: Mapping[str, Leaf]) -> Any:
    """`tree` with the number that `auto` stands for, where a key takes both."""
    for path, leaf in leaves.items():
        *around, name = path.split(".")
        inner, value = tree, leaf.key.auto
        for key in around:
            inner = inner.get(key) if isinstance(inner, Section) else None
        if value is None or not isinstance(inner, Section) or inner.get(name) != "auto":
            continue
        value = Section({name: value}, {name: inner.lines[name]})
        for key in reversed(around):
            value = Section({key: value}, {})
        tree = _merged(tree, value)
    return tree


def _without(tree: Any, path: Path) -> Any:
    """`tree` without the key at `path`; a list goes with any of its items."""
    if not path or not isinstance(tree, Section):
        return {}
    kept = Section({k: v for k, v in tree.items() if k != path[0]}, tree.lines)
    if path[1:] and isinstance(tree.get(path[0]), Section):
        kept[path[0]] = _without(tree[path[0]], path[1:])
    return kept


def _find(tree: Any, path: Path) -> tuple[int, bool]:
    """The line of the key at `path`, and whether it is there; else the line of what is around."""
    line = 1
    for name in path:
        if isinstance(tree, Section) and name in tree:
            line, tree = tree.lines[name], tree[name]
        elif isinstance(name, int) and isinstance(tree, list):
            tree = tree[name]
            line = min(tree.lines.values(), default=line) if isinstance(tree, Section) else line
        else:
            return line, False
    return line, True


def _broken_rules(section: Any, path: Path, tree: Any,
                  bad: set[Path]) -> Iterator[tuple[int, str]]:
    """Asks every section for rules between keys that are broken; not where a key involved, or a
    section that it is in, is wrong by itself."""
    if isinstance(section, tuple):
        inner = list(enumerate(section))
    else:
        inner = [(f.name, getattr(section, f.name)) for f in dataclasses.fields(section)]
    for name, value in inner:
        if dataclasses.is_dataclass(value) or isinstance(value, tuple):
            yield from _broken_rules(value, (*path, name), tree, bad)
    for conflict in section.conflicts() if hasattr(section, "conflicts") else ():
        keys = [(*path, *(int(p) if p.isdigit() else p for p in k.split(".")))
                for k in conflict.keys]
        if any(key[:n] in bad for key in keys for n in range(len(key) + 1)):
            continue
        given = [_find(tree, key)[0] for key in keys if _find(tree, key)[1]]
        value = reduce(lambda part, name: part[name] if isinstance(name, int) else getattr(
            part, name), keys[0][len(path):], section)
        text = f" = {show(value)}{'' if _find(tree, keys[0])[1] else ' (default)'}"
        if not given and not value:
            text = " is missing"
        # The line to go to: of the key blamed, or of the one that made its default wrong.
        yield (given or [NOWHERE])[0], f"{_dotted(keys[0])}{text}: {conflict.cure}"


class _Schema:
    """A class of sections with all below it, and what is said about values it does not take."""

    def __init__(self, cls: type) -> None:
        self.leaves = {leaf.path: leaf for leaf in leaves(cls)}
        self.sections = dict(sections(cls))
        for part in self.sections.values():
            part.__pydantic_config__ = {"extra": "forbid", "allow_inf_nan": False}
        self.adapter = TypeAdapter(cls)

    def message(self, error: dict, tree: Any) -> str:
        """What is wrong with the value of one of pydantic's errors, and the cure."""
        path, value, kind = error["loc"], error["input"], error["type"]
        place, name = _dotted(path), ".".join(p for p in path if isinstance(p, str))
        if kind == "unexpected_keyword_argument":
            return f"{place}: {self._unknown(path)}"
        if name in self.sections and kind != "missing":
            expected = (f"a {'list of sections' if kind == 'tuple_type' else 'section'} with keys: "
                        f"{', '.join(members(self.sections[name]))}")
            return f"{place or 'the top level'} is {_describe(value)}, expected {expected}"
        leaf = self.leaves[name]
        if kind == "missing":
            return f"{place} is missing: {leaf.key.doc}"
        given = f"is {_describe(value)}" if isinstance(value, dict | list) else f"= {show(value)}"
        return f"{place} {given}: {_cure(leaf, kind, value, error['msg'])}"

    def _unknown(self, path: Path) -> str:
        """What is wrong with a key that does not exist, and where it might belong."""
        *above, name = path
        where = ".".join(p for p in above if isinstance(p, str))
        everywhere = (*self.leaves, *self.sections)
        if "." in name and name in everywhere:  # a path as one key
            *outer, last = name.split(".")
            return f"write it nested: {': {'.join((*outer, last))}: ...{'}' * len(outer)}"
        names = members(self.sections[where])
        alias = [leaf.path for leaf in self.leaves.values() if name in leaf.key.aliases]
        likely = ([p for p in alias if p.rpartition(".")[0] == where]
                  or [p for p in everywhere if p.rpartition(".")[2] == name] or alias
                  or [f"{where}.{m}".lstrip(".")
                      for m in difflib.get_close_matches(name, names, n=1)])
        if likely:
            return f"unknown key; did you mean {' or '.join(map(repr, likely[:4]))}?"
        return f"unknown key; {where or 'a recipe'} has {', '.join(names)}"


@cache
def _schema(cls: type) -> _Schema:
    """Made once: most of the time of reading a recipe."""
    return _Schema(cls)


def _describe(value: Any) -> str:
    """What kind of value it is, for a message that expected another."""
    return {Section: "a section", list: "a list"}.get(type(value), f"the value {show(value)}")


def _cure(leaf: Leaf, kind: str, value: Any, said: str) -> str:
    """What the value has to be. kind, said: of pydantic's error."""
    # What YAML reads as true or false was perhaps one of the choices.
    choices = ", ".join(c or "'' (empty)" for c in leaf.key.choices)
    if kind == "string_type" and type(value) in (bool, int, float):
        quoted = not choices or {"no", "yes", "on", "off"} & set(leaf.key.choices)
        return "YAML does not read this as text: quote it" if quoted else f"choose one of {choices}"
    if kind == "tuple_type":
        return "must be a list of texts"
    if kind != "string_pattern_mismatch":
        return said.replace("Input should", "must")
    if not choices:
        return "must be one line of printable characters"
    return f"{did_you_mean(value, leaf.key.choices)}choose one of {choices}"
