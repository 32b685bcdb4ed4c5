"""What a chat template wrote for a conversation: where its texts and its turns are, which of it is
learnt, and where media stand."""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import Turn, media_of
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.text.spans import Span, Text
from orchmllm.data.text.traced import BLOCK, CALL, SOURCE, TURN, runs_of

CHANGED = ("the chat template changes the texts of turns or leaves out turns, so what is learnt "
           "cannot be told from the rest; write one that puts them in as they are")
LOST_MEDIUM = "the chat template leaves out an image or a clip, repeats or moves it"
CONTENT, REASONING, NAME, ARGUMENT = "content", "reasoning", "name", "argument"


class Source(NamedTuple):
    """A text or a medium of the data. turn: its number. kind: CONTENT, REASONING, or NAME or
    ARGUMENT of a call of a tool."""

    turn: int
    kind: str
    value: str | Medium


class Page:
    """text: what was written. Of each of its characters (n,): source: its number in `sources` from
    1, 0 for the template's; said: the turn whose text it is of, or -1; turn: that which a loop was
    at, or -1; in_call, in_block: see orchmllm.data.text.traced; in_name: of a tool."""

    def __init__(self, written: str, sources: Sequence[Source]) -> None:
        self.text, self.sources = "".join([written]), sources
        counts, codes = np.array(runs_of(written), np.int64).reshape(-1, 2).T
        source = codes & SOURCE
        said = np.array([-1, *(source.turn for source in sources)])[source]
        turn = (codes & CALL - 1) // TURN - 1
        names = np.array([False, *(source.kind == NAME for source in sources)])[source]
        self.source, self.said, self.turn, self.in_call, self.in_block, self.in_name = (
            each.repeat(counts) for each in (
                source, said, turn, codes & CALL > 0, codes & BLOCK > 0, names))
        self._ends = counts.cumsum().tolist()
        self._runs = list(zip(source.tolist(), said.tolist(), turn.tolist(), strict=True))
        self._extents: dict[int, tuple[int, int]] = {}  # of the characters of a turn
        for start, end, (_, *turns) in zip([0, *self._ends], self._ends, self._runs, strict=False):
            for number in turns:
                self._extents[number] = (self._extents.get(number, (start,))[0], end)

    def check(self, special: re.Pattern) -> None:
        """Raises RowError where turns or calls are left out, or turns are repeated or moved; where
        a text with a special token was not found again, which may be in it all the same."""
        there, turns = set(self.source.tolist()), set(self.said.tolist())
        if (np.diff(self.said[self.said >= 0]) < 0).any():
            raise RowError("the chat template repeats or reorders turns")
        for number, (turn, kind, value) in enumerate(self.sources, 1):
            if number in there or isinstance(value, str) and not value.strip():
                continue
            if isinstance(value, Medium):
                raise RowError(LOST_MEDIUM)
            if kind == NAME:
                raise RowError("the chat template does not write calls of tools; write them into "
                               "the text of the answer, as the model is to say them")
            if kind == CONTENT and turn not in turns or special.search(value):
                raise RowError(CHANGED)

    def in_blocks(self, turns: Sequence[Turn]) -> np.ndarray:
        """(n,) bool: learnt is what stands in {% generation %}, if its turn is to be learnt. A
        block outside all turns belongs to the one before it."""
        turn = np.maximum(self.turn, self.said)
        latest = np.maximum.accumulate(np.where(turn >= 0, np.arange(len(turn)), -1))
        supervised = np.array([turn.supervised for turn in turns])
        return self.in_block & (latest >= 0) & supervised[turn[latest]]

    def answer(self, turn: int, opening: str | None, ending: re.Pattern, following: re.Pattern
               ) -> tuple[int, int]:
        """First and last character of an answer that are learnt: its texts, what the template
        writes between them, before them for reasoning and calls, and the special tokens that end
        it. opening: what comes before every answer, if it is known; ending: a run of special
        tokens; following: the first of them after an answer whose turn has none."""
        text, (low, high) = self.text, self._extents.get(turn, 2 * (len(self.text),))
        mine, said = self.turn[low:high] == turn, self.said[low:high] == turn
        looped, called = mine.any(), mine & self.in_call[low:high]
        if called.any():
            called = _calls(called, said)
        # The name of a tool may be written again before its answer.
        own = low + np.flatnonzero(said & (mine if looped else True) & (
            called | ~self.in_name[low:high] | ~called.any()))
        first = low + _first(mine if looped else said)
        last = max([first - 1, *own[-1:], *low + np.flatnonzero(called)[-1:]]) + 1
        data = self._next(last, lambda _, said, at: said > turn)
        end = self._next(last, lambda _, said, at: said > turn or 0 <= at != turn
                         ) if looped else last
        begin = _after(opening, text[first: own[0] if len(own) else end], ending) if looped else -1
        if not len(own):
            found = ending.search(text, first + begin, end) if begin >= 0 else None
            return found.span() if found else (0, 0)
        start = own[0] if begin < 0 or self._is_start(own[0]) else first + begin
        found = ending.search(text, last, end)
        close = last + len(text[last:end].rstrip())
        if not found and close not in [run.end() for run in ending.finditer(text, start, close)]:
            found = following.match(text, close, data)
        return start, found.end() if found else close

    def _next(self, start: int, found: Callable[[int, int, int], bool]) -> int:
        """The first character from `start` on for whose source, said and turn `found` is true; the
        end of the text where there is none."""
        for k in range(bisect_right(self._ends, start), len(self._ends)):
            if found(*self._runs[k]):
                return max(start, self._ends[k - 1] if k else 0)
        return len(self.text)

    def _is_start(self, at: int) -> bool:
        """Whether an answer begins as its content does: nothing of it has been put before it."""
        number = self.source[at]
        written = self.text[at: self._next(at, lambda source, said, turn: source != number)]
        _, kind, value = self.sources[number - 1]
        return kind == CONTENT and (isinstance(value, Medium) or value.lstrip().startswith(
            written.lstrip()))

    def media(self, turns: Sequence[Turn], marks: dict[int, str]) -> dict[int, tuple[int, Medium]]:
        """First character -> (the one after the last, medium). marks: what the template writes for
        a medium, by modality. Raises RowError where marks are not those of the media, in their
        order."""
        every = media_of(turns)
        found = {}
        for number, (_, _, value) in enumerate(self.sources, 1):
            if isinstance(value, Medium):
                found |= {at: (at + 1, value)
                          for at in np.flatnonzero(self.source == number).tolist()}
        placed = {medium for _, medium in found.values()}
        for modality, mark in marks.items():
            media = [m for m in every if m.modality == modality and m not in placed]
            places = [m.span() for m in re.finditer(re.escape(mark), self.text)
                      if not self.source[m.start(): m.end()].any()] if media else []
            if len(places) != len(media):
                raise RowError(LOST_MEDIUM)
            found |= {start: (end, medium)
                      for (start, end), medium in zip(places, media, strict=True)}
        if [found[at][1] for at in sorted(found)] != every:
            raise RowError(LOST_MEDIUM)
        return found

    def spans(self, learnt: np.ndarray, media: dict[int, tuple[int, Medium]]) -> list[Span]:
        """The page cut where it changes from text of the template to text of the data, and where
        what is learnt begins and ends."""
        of_data = self.source > 0
        cuts = {0, len(self.text), *media, *(end for end, _ in media.values()),
                *(np.flatnonzero(np.diff(2 * learnt + of_data)) + 1).tolist()}
        out: list[Span] = []
        for start, end in pairwise(sorted(cuts)):
            out.append(media[start][1] if start in media else Text(
                self.text[start:end], bool(learnt[start]), bool(of_data[start])))
        return out


def _calls(called: np.ndarray, said: np.ndarray) -> np.ndarray:
    """(n,) bool: what is written at the calls of a turn, up to its last stretch with a text of
    them: results of tools may be written in another loop over the calls. called: at its calls;
    said: its texts."""
    stretch = np.cumsum(np.diff(called, prepend=False)) * called
    own = stretch[called & said]
    return called & (stretch <= own.max(initial=0)) if len(own) else called


def _first(where: np.ndarray) -> int:
    """The place of the first that is true, len(where) if there is none."""
    return int(np.append(np.flatnonzero(where), len(where))[0])


def _after(opening: str | None, text: str, ending: re.Pattern) -> int:
    """Where what comes before every answer ends in a text, which may begin with less of it: up to a
    line or a special token; -1 if it is not there."""
    if opening is None:
        return -1
    found = text.rfind(opening)
    if found >= 0:
        return found + len(opening)
    same = os.path.commonprefix([opening, text])
    return max([same.rfind("\n") + 1, *(m.end() for m in ending.finditer(same))]) or -1
