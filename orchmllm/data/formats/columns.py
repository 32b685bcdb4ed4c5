"""Which columns of a row are its fields: `columns` of a source, and the presets of presets.yaml.

What stands for a column, a *spec*: `name`; `a.b`, the key b of the object a; `a[0]` and `a[-1]`, an
element of a list; `a[].b`, b of each element; `{a}_{b:05}.wav`, a text made of columns, with zeros
in front; `a, b`, two names of one column; `a | b`, the first that a row has; `a | -`, a column that
rows may lack; `-`, none.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from orchmllm.data.media.medium import Medium, RowError, is_image

MEDIA = ("images", "audios", "videos")
# A cell that is a text holds them as JSON.
LISTS = ("messages", "history", "choices", "texts", "places", "segments", *MEDIA)
AROUND = {"rows", "segments"}  # hold the rows
PLACES = AROUND | {"split"}  # say which rows a store has
NONE = "-"  # the field of a preset is not read
DEEPEST = 200  # levels of JSON in a row
_JSON = re.compile(r"\s*(\[.*\]|\{.*\})\s*", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+|\[[^\]]*\]")
_IN_TEXT = re.compile(r"\{([^{}:]+)(?::0(\d+))?\}")


class Spec(NamedTuple):
    """choices: the names of each alternative. optional: whether rows may lack it."""

    text: str
    choices: tuple[tuple[str, ...], ...]
    optional: bool

    def is_in(self, row: Mapping) -> bool:
        """Whether a row has a value there, which may be empty."""
        return any(_get(row, name) is not None for names in self.choices for name in names)

    def find(self, row: Mapping) -> tuple[str, object]:
        """(name, value) in a row; ("", None) where it has none. Raises RowError where two names of
        one column have other values."""
        for names in self.choices:
            found = {name: value for name in names if not is_empty(value := _get(row, name))}
            values = [value if type(value) is list else [value] for value in found.values()]
            if values and values.count(values[0]) < len(values):
                raise RowError(f"{' and '.join(map(repr, found))} have other values: keep one of "
                               "them")
            if found:
                return next(iter(found.items()))
        blank = [name for names in self.choices for name in names if _get(row, name) == ""]
        return (blank[0], "") if blank else ("", None)


def parse_spec(text: str) -> Spec:
    choices = [choice.strip() for choice in text.split("|")]
    return Spec(text, tuple((choice,) if "{" in choice else tuple(map(str.strip, choice.split(",")))
                            for choice in choices if choice != NONE), NONE in choices)


def nothing_in(spec: Spec, field: str, row: Mapping) -> RowError:
    return RowError(f"there is nothing in {spec.text!r} ({field}) of "
                    f"{', '.join(map(str, row)):.300}; in columns write '{spec.text} | -' if rows "
                    "may lack it")


class Columns:
    """specs: field -> spec. Without those that are NONE."""

    def __init__(self, specs: Mapping[str, str]) -> None:
        self.specs = {field: parse_spec(text) for field, text in specs.items() if text != NONE}

    @property
    def names(self) -> set[str]:
        """Columns that are read, without what is in them."""
        written = [name for spec in self.specs.values() for names in spec.choices for name in names]
        inside = [m[1] for name in written for m in _IN_TEXT.finditer(name)]
        return {re.split(r"[.\[]", name)[0] for name in (*written, *inside)}

    def __str__(self) -> str:
        return ", ".join(f"{field}: {spec.text}" for field, spec in self.specs.items())

    def fits(self, row: Mapping, *, media: bool) -> bool:
        """Whether a row has all columns that it may not lack. media: and one of a medium."""
        turns = self.specs.get("messages")
        if turns and not (row.get(turns.text) and isinstance(row[turns.text], list | Mapping)):
            return False
        return all(spec.optional or spec.is_in(row) for spec in self.specs.values()) and (
            not media or any(self.specs[field].is_in(row) for field in MEDIA
                             if field in self.specs))

    def pick(self, row: Mapping) -> dict:
        """Field -> value; of media a list, which may be empty. Raises RowError for a column that
        the row lacks."""
        fields = {}
        for field, spec in self.specs.items():
            if field in PLACES:
                continue
            name, value = spec.find(row)
            if not name and not spec.optional:
                raise nothing_in(spec, field, row)
            if field in LISTS and is_json(value):
                value = from_json(value)
            if field in MEDIA:
                value = _media(name, value)
            if value is not None:
                fields[field] = value
        return fields


def _media(name: str, value: object) -> list:
    if is_empty(value):
        return []
    many = isinstance(value, list | tuple) and not isinstance(value, Medium)
    if name == "video" and many and all(map(is_image, value)):
        return [value]  # one video given as its list of frames
    return list(value) if many else [value]


def is_empty(value: object) -> bool:
    if isinstance(value, Mapping):  # as a column of images has for a row without one
        return bool(value) and all(inner is None for inner in value.values())
    return value is None or isinstance(value, str | list | tuple) and not value


def is_json(value: object) -> bool:
    """Whether a cell holds a list or an object as JSON, by how it begins and ends."""
    return isinstance(value, str) and _JSON.fullmatch(value) is not None


def from_json(value: object) -> object:
    """A value that may be written as JSON in a text. Raises RowError."""
    if not isinstance(value, str) or not value.strip():
        return value or None
    try:
        found = json.loads(value)
        check_depth(found, value.count("[") + value.count("{"))
    except (ValueError, RecursionError) as error:
        raise RowError(f"a column, a tool or its call is not JSON ({error}): {value[:200]!r}"
                       ) from error
    return found


def check_depth(value: object, most: int) -> None:
    """Raises RecursionError where JSON is nested more than DEEPEST levels deep, whatever the
    version of Python: newer ones read more levels than others of their functions can walk through.
    most: levels that it may have."""
    depth, level = 0, [value] if most > DEEPEST else []
    while level:
        if depth == DEEPEST:
            raise RecursionError(f"nested more than {DEEPEST} levels deep")
        depth += 1
        level = [inner for outer in level
                 for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, (dict, list))]


def _get(row: Mapping, name: str) -> object:
    if name in row or not re.search(r"[.\[{]", name):
        return row.get(name)
    if "{" not in name:
        return _walk(row, _STEP.findall(name))
    parts = {m[0]: (_get(row, m[1]), int(m[2] or 0)) for m in _IN_TEXT.finditer(name)}
    if not all(isinstance(value, str | int) for value, _ in parts.values()):
        return None
    return _IN_TEXT.sub(lambda m: str(parts[m[0]][0]).zfill(parts[m[0]][1]), name)


def _walk(value: object, steps: list[str]) -> object:
    for k, step in enumerate(steps):
        key = step.strip("[]")
        if step == "[]":
            found = [_walk(one, steps[k + 1:]) for one in value] if isinstance(value, list) else []
            return None if all(one is None for one in found) else found
        if isinstance(value, Mapping):
            value = value.get(key)
        elif (isinstance(value, list) and re.fullmatch(r"-?\d+", key)
              and -len(value) <= int(key) < len(value)):
            value = value[int(key)]
        else:
            return None
    return value


def changed(given: object) -> dict[str, str]:
    """The columns that a recipe names: field -> spec, of the section `columns`."""
    return {field: text for field, text in vars(given).items() if text}


def absent(columns: Mapping[str, str], rows: list[Mapping]) -> Iterator[str]:
    """Fields whose column none of the rows has."""
    for field, text in columns.items():
        spec = parse_spec(text)
        if field not in AROUND and not spec.optional and not any(map(spec.is_in, rows)):
            yield field
