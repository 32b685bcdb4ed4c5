"""What a recipe may say, written once: as metadata of the dataclass fields beside the code that
reads them. Defaults, types, ranges, choices, error messages and docs/recipe.md all come from here.

    @dataclass(frozen=True)
    class TrainConfig:
        lr: float = key(1e-3, "Peak learning rate.", above=0)

        def conflicts(self) -> Iterator[Conflict]: ...  # optional: rules between keys

Sections are dataclasses, keys are fields of type bool, int, float or str, or tuple[S, ...] for a
list of sections S or of texts. pydantic checks types, bounds and choices: it reads the metadata of
the fields. This module does not import it, so that the drop-in does not need it.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass
from typing import Any, NamedTuple

MAX_INT = 2**63 - 1  # what numpy, torch and the core take
PRINTABLE = r"^[^\p{C}\p{Zl}\p{Zp}]*$"
# Names of bounds: ours, pydantic's, sign.
BOUNDS = (("at_least", "ge", ">="), ("above", "gt", ">"), ("at_most", "le", "<="),
          ("below", "lt", "<"))


@dataclass(frozen=True)
class Key:
    """doc: one or more sentences. bounds: as text, `>= 1`, `> 0 and < 1` or nothing. choices: the
    only values. aliases: names other programs use for it, for "did you mean". auto: what the word
    `auto` stands for; None: nothing."""

    doc: str
    bounds: str = ""
    choices: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()
    auto: int | None = None


class Conflict(NamedTuple):
    """Values that are fine alone and wrong together. keys: relative to the section that says so,
    `sources.2.weight` of an item of a list; the first is blamed."""

    keys: tuple[str, ...]
    cure: str


class Leaf(NamedTuple):
    """A key at its place. path: dotted, from the top. kind: bool, int, float, str, or tuple for a
    list. default: MISSING for a key that has to be given."""

    path: str
    kind: type
    default: Any
    key: Key


def key(default: Any, doc: str, **limits: Any) -> Any:
    """A field of a section. default: MISSING for a key that has to be given. limits: at_least,
    at_most (inclusive), above, below (exclusive), and see Key."""
    bounds = {name: limits.pop(name) for name, _, _ in BOUNDS if name in limits}
    about = Key(doc, " and ".join(f"{sign} {bounds[name]:g}" for name, _, sign in BOUNDS
                                  if name in bounds), **limits)
    checks = {theirs: bounds[name] for name, theirs, _ in BOUNDS if name in bounds}
    if type(default) is int:
        checks.setdefault("le", MAX_INT)
    elif about.choices:
        checks["pattern"] = f"^({'|'.join(map(re.escape, about.choices))})$"
    elif default is MISSING or isinstance(default, str):
        checks["pattern"] = PRINTABLE
    checks["strict"] = not isinstance(default, tuple)
    return dataclasses.field(default=default, metadata={"key": about, **checks})


def section(cls: type) -> Any:
    """A field that is a section of keys."""
    return dataclasses.field(default_factory=cls)


def members(cls: type) -> dict[str, tuple[type, dataclasses.Field]]:
    """name -> (type, field) of a section's keys and sections, in order."""
    hints = typing.get_type_hints(cls)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(cls)}


def sections(cls: type, where: str = "") -> Iterator[tuple[str, type]]:
    """(dotted path, dataclass) of `cls` and every section below it, those in lists too."""
    yield where, cls
    for name, (kind, _) in members(cls).items():
        inner = (typing.get_args(kind) or (kind,))[0]
        if dataclasses.is_dataclass(inner):
            yield from sections(inner, f"{where}.{name}" if where else name)


def leaves(cls: type, where: str = "") -> Iterator[Leaf]:
    """All keys below a section, section by section."""
    for path, part in sections(cls, where):
        for name, (kind, f) in members(part).items():
            if not dataclasses.is_dataclass(kind):
                yield Leaf(f"{path}.{name}" if path else name, typing.get_origin(kind) or kind,
                           f.default, f.metadata["key"])


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """`did you mean 'x'? ` (with the space) or nothing."""
    close = difflib.get_close_matches(str(word), [k for k in known if k], n=1)
    return f"did you mean {close[0]!r}? " if close else ""
