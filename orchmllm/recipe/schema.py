"""What a recipe may say, written once: as metadata of the dataclass fields beside the code that
reads them. Defaults, types, ranges, choices, error messages and docs/recipe.md all come from here.

    @dataclass(frozen=True)
    class TrainConfig:
        lr: float = key(1e-3, "Peak learning rate.", above=0)

        def conflicts(self) -> Iterator[Conflict]: ...  # optional: rules between keys

Sections are dataclasses, keys are fields of type bool, int, float or str, or tuple[S, ...] for a
list of sections S.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import typing
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

MAX_INT = 2**63 - 1  # what numpy, torch and the core take


@dataclass(frozen=True)
class Key:
    """doc: one or more sentences. at_least, at_most: inclusive, above, below: exclusive bounds.
    choices: the only values. required: what to give, for a key without a usable default; unless:
    the key beside it that can be given instead. aliases: names other programs use for it, for "did
    you mean". renamed: (earlier name, name now) of choices."""

    doc: str = ""
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    required: str = ""
    unless: str = ""
    aliases: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def bounds(self) -> str:
        """`>= 1`, `> 0 and < 1` or nothing."""
        limits = (("at_least", ">="), ("above", ">"), ("at_most", "<="), ("below", "<"))
        return " and ".join(f"{sign} {getattr(self, name):g}" for name, sign in limits
                            if getattr(self, name) is not None)

    def allowed(self) -> str:
        """The choices as text; an empty one is spelled out."""
        return ", ".join(c or "'' (empty)" for c in self.choices)

    def problem(self, value: Any) -> str:
        """The cure for a value of the right type outside bounds or choices; empty if it is fine."""
        if value in dict(self.renamed):
            return f"is now called {dict(self.renamed)[value]!r}"
        if self.choices and value not in self.choices:
            return f"{did_you_mean(value, self.choices)}choose one of {self.allowed()}"
        if isinstance(value, str) and not value.isprintable():
            return "must be one line of printable characters"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return ""
        if not math.isfinite(value):
            return "must be a finite number"
        inside = ((self.at_least is None or value >= self.at_least)
                  and (self.at_most is None or value <= self.at_most)
                  and (self.above is None or value > self.above)
                  and (self.below is None or value < self.below))
        if not inside:
            return f"must be {self.bounds()}"
        if isinstance(value, int) and abs(value) > MAX_INT:
            return "does not fit 64 bits"
        return ""


class Conflict(NamedTuple):
    """Values that are fine alone and wrong together. keys: relative to the section that says so;
    the first is blamed."""

    keys: tuple[str, ...]
    cure: str


class Leaf(NamedTuple):
    """A key at its place. path: dotted, from the top. kind: bool, int, float, str, or tuple for a
    list of sections `item`."""

    path: str
    kind: type
    default: Any
    key: Key
    item: type | None = None


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A field of a section; limits: see Key."""
    return dataclasses.field(default=default, metadata={"key": Key(doc, **limits)})


def section(cls: type) -> Any:
    """A field that is a section of keys."""
    return dataclasses.field(default_factory=cls)


def members(cls: type) -> dict[str, tuple[type, dataclasses.Field]]:
    """name -> (type, field) of a section's keys and sections, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(cls)}


def leaves(cls: type, where: str = "") -> Iterator[Leaf]:
    """All keys below a section, in order."""
    for name, (kind, f) in members(cls).items():
        path = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(kind):
            yield from leaves(kind, path)
        else:
            item = typing.get_args(kind)[0] if typing.get_origin(kind) is tuple else None
            yield Leaf(path, tuple if item else kind, f.default, f.metadata.get("key", Key()), item)


def sections(cls: type, where: str = "") -> Iterator[tuple[str, type]]:
    """(dotted path, dataclass) of `cls` and every section below it."""
    yield where, cls
    for name, (kind, _) in members(cls).items():
        if dataclasses.is_dataclass(kind):
            yield from sections(kind, f"{where}.{name}" if where else name)


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` (with the space) or nothing."""
    close = difflib.get_close_matches(str(word), [k for k in known if k], n=1)
    return f"did you mean {close[0]!r}? " if close else ""
