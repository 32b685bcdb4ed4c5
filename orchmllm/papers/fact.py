"""The verdict of a row of `orchmllm papers reproduce`. It `agrees` if ours is at most a tenth
off the paper's value or the nearest end of its range, or rounds to it; of several values the one
that is furthest off counts. The error of a gain is relative to the gain: 1.2x where the paper
has 1.5x is 60% off. A gain of another size is `sign only` if ours is above its spread over seeds
(one standard deviation) and above a tenth of the paper's, and so is a claim in words that names
no size; `significant` and `substantial` mean 10% or more. All else is `off`. Counted apart:
`calibrated` to this very value, `other machine` (times) and `not modelled`."""

from __future__ import annotations

import csv
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CLOSE = 0.1  # largest error of a row that agrees, and smallest share of a gain that is one
CALIBRATED, MEASURED = "calibrated", "other machine"  # kinds that are counted apart


@dataclass(frozen=True)
class Fact:
    """A value of a paper beside ours. where: table or figure; what, case: the quantity, and of
    which model or setting. paper: as printed: a number, a range `low-high`, several numbers, words
    or nothing. means: the range that is meant where words or a slip are printed. base: what a gain
    is above (1 of a ratio, 0 of a difference), None of what is no gain. spread: of ours, over
    seeds. kind: why it is counted apart. note: is always told. needs: what would have to be true,
    told of a row that does not agree; of what is no gain with {up} for the paper's value over ours
    and {down} for its inverse."""

    where: str
    what: str
    case: str = ""
    paper: str = ""
    unit: str = ""
    base: float | None = None
    means: tuple[float, ...] = ()
    ours: float | Sequence[float] | None = None
    spread: float = 0.0
    kind: str = ""
    note: str = ""
    needs: str = ""

    def compared(self) -> list[tuple[float, float, float]]:
        """(ours, the least and the most of the paper's) of each value that can be compared."""
        spans = [(float(x),) * 2 for x in re.findall(r"\d*\.?\d+", self.paper)]
        if self.means or re.fullmatch(r"[\d.]+-[\d.]+", self.paper):
            spans = [self.means or tuple(map(float, self.paper.split("-")))]
        if self.ours is None or not spans:
            return []
        return [(x, *span) for x, span in zip(np.atleast_1d(self.ours), spans, strict=True)]

    @property
    def error(self) -> float | None:
        """Of the value that is furthest off; None where nothing can be compared."""
        return max((self._error(*x) for x in self.compared()), key=abs, default=None)

    def _error(self, ours: float, low: float, high: float) -> float:
        near = min(max(ours, low), high)
        over = abs(near - (self.base or 0))
        return (ours - near) / over if over else 0.0 if ours == near else np.inf

    @property
    def verdict(self) -> str:
        """By the rule above."""
        if self.kind or self.ours is None:
            return self.kind or "not modelled"
        error, digits = self.error, max(map(len, re.findall(r"\.(\d+)", self.paper)), default=0)
        gained = self.base is None or self.ours - self.base > self.spread and (
            error is None or error > CLOSE - 1)
        rounds = not self.means and all(
            low <= round(ours, digits) <= high for ours, low, high in self.compared())
        if gained and error is not None and (abs(error) <= CLOSE or rounds):
            return "agrees"
        return "sign only" if gained and self.base is not None else "off"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The paper's value, ours, the error and the verdict as text."""
        ours = "-" if self.ours is None else ", ".join(
            f"{x:.4g}{self.unit}" for x in np.atleast_1d(self.ours))
        return (self.paper + self.unit * self.paper[-1:].isdigit() or "-",
                ours + f" +- {self.spread:.2g}" * (self.spread > 0),
                "-" if self.error is None else f"{self.error:+.1%}", self.verdict)

    def __str__(self) -> str:
        paper, ours, error, verdict = self.cells
        more = [self.note] if self.note else []
        if self.needs and verdict in ("off", "sign only"):
            down = 1 + (self.error or 0)
            more.append("for the paper's value " + self.needs.format(
                up=1 / down if down else np.inf, down=down))
        return "\n    ".join((
            f"{self.where} | {self.what}{': ' * bool(self.case)}{self.case}",
            f"paper {paper} | ours {ours} | error {error} | {verdict}", *more))


class Printed:
    """What a paper prints, from values.csv; every value is asked for once, beside ours."""

    def __init__(self, paper: str) -> None:
        with Path(__file__).with_name("values.csv").open(encoding="utf-8", newline="") as file:
            self.left = {(row["where"], row["what"], row["case"]): row
                         for row in csv.DictReader(file) if paper in row["paper"].split()}

    def row(self, where: str, what: str, case: str = "", ours: float | Sequence | None = None,
            **options) -> Fact:
        """The paper's value with ours. options: of Fact. Raises KeyError for what it does not
        print, or has been asked for."""
        found = self.left.pop((where, what, case))
        means = tuple(map(float, found["means"].split("-"))) if found["means"] else ()
        return Fact(where, what, case, found["value"], found["unit"], float(found["base"]) if
                    found["base"] else None, means, ours, **options)

    def seeds(self, where: str, what: str, case: str, ours: np.ndarray, **options) -> Fact:
        """The same with a mean over seeds. ours: (seeds,)."""
        return self.row(where, what, case, float(ours.mean()), spread=float(ours.std(ddof=1)),
                        **options)

    def rest(self) -> Iterator[Fact]:
        """What nobody asked for, with the reason."""
        for key, found in tuple(self.left.items()):
            yield self.row(*key, note=found["why"])


def counts(facts: Iterable[Fact]) -> str:
    """How many rows have which verdict."""
    found = Counter(fact.verdict for fact in facts)
    compared = [f"{found.pop(name, 0)} {name}" for name in ("agrees", "sign only", "off")]
    apart = ", ".join(f"{n} {name}" for name, n in sorted(found.items()))
    return ", ".join(compared) + f"; apart: {apart}" * bool(apart)
