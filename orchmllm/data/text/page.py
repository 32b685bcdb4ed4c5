"""What a chat template wrote for a conversation: where its texts and its turns are, which of it is
learnt, and where media stand."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from orchmllm.data.formats.conversation import Turn, media_of
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.text.spans import Placeholder, Span, Text
from orchmllm.data.text.traced import BEGUN, ENDED, ENTERED, LEFT, origin_of

CHANGED = ("the chat template changes the texts of turns or leaves out turns, so what is learnt "
           "cannot be told from the rest; write one that puts them in as they are")
CONTENT, REASONING, NAME, ARGUMENT = "content", "reasoning", "name", "argument"


class Source(NamedTuple):
    """A text or a medium of the data. turn: its number. kind: CONTENT, REASONING, or NAME or
    ARGUMENT of a call of a tool."""

    turn: int
    kind: str
    value: str | Medium


class Page(NamedTuple):
    """Of each character of `text`: source (n,): its number in `sources` from 1, 0 for the
    template's; turn (n,): the one that a loop of the template was at, or -1; in_call (n,) bool:
    whether a loop was at a call of a tool; block (n,) bool: whether {% generation %} is around it.
    """

    text: str
    sources: list[Source]
    source: np.ndarray
    turn: np.ndarray
    in_call: np.ndarray
    block: np.ndarray

    @classmethod
    def of(cls, written: str, sources: list[Source]) -> Page:
        """written: with the events of orchmllm.data.text.template_engine."""
        codes = np.frombuffer(origin_of(written).encode("utf-32-le", "surrogatepass"), np.uint32)
        events = np.flatnonzero(codes >= LEFT).tolist()
        plain, at, in_block = "".join([written]), [], False
        turn, in_call, block = np.full(len(codes), -1), *np.zeros((2, len(codes)), bool)
        for start, end in pairwise([*events, len(codes)]):
            code, loop = int(codes[start]), plain[start]
            if code in (BEGUN, ENDED):
                in_block = code == BEGUN
            else:
                while loop in [number for number, _ in at]:
                    at.pop()
                at += [(loop, code - ENTERED)] if code >= ENTERED else []
            turn[start:end] = at[-1][1] // 2 if at else -1
            in_call[start:end] = at[-1][1] % 2 if at else False
            block[start:end] = in_block
        kept = codes < LEFT
        texts = [plain[a + 1: b] for a, b in pairwise([-1, *events, len(plain)])]
        return cls("".join(texts), sources, codes[kept].astype(np.int64), turn[kept],
                   in_call[kept], block[kept])

    @property
    def said(self) -> np.ndarray:
        """(n,) The turn whose text each character is of, or -1."""
        return np.array([-1, *(source.turn for source in self.sources)])[self.source]

    def check(self) -> None:
        """Raises RowError where turns or calls are left out, or turns are repeated or moved."""
        said, there = self.said, set(self.source.tolist())
        turns = set(said.tolist())
        if (np.diff(said[said >= 0]) < 0).any():
            raise RowError("the chat template repeats or reorders turns")
        for number, (turn, kind, value) in enumerate(self.sources, 1):
            if number in there or isinstance(value, str) and not value.strip():
                continue
            if isinstance(value, Medium):
                raise RowError("the chat template leaves out an image or a clip")
            if kind == NAME:
                raise RowError("the chat template does not write calls of tools; write them into "
                               "the text of the answer, as the model is to say them")
            if kind == CONTENT and turn not in turns:
                raise RowError(CHANGED)

    def num_left_out(self, turns: Sequence[Turn]) -> tuple[int, int]:
        """(Characters of the texts that are to be learnt and were not written, all of them);
        space does not count."""
        space = np.array([c.isspace() for c in self.text], bool)
        written = np.bincount(self.source[~space], minlength=len(self.sources) + 1).tolist()
        sizes = [(len("".join(value.split())), written[number])
                 for number, (turn, _, value) in enumerate(self.sources, 1)
                 if turns[turn].supervised and isinstance(value, str)]
        return sum(max(0, n - w) for n, w in sizes), sum(n for n, _ in sizes)

    def in_blocks(self, turns: Sequence[Turn]) -> np.ndarray:
        """(n,) bool: learnt is what stands in {% generation %}, if its turn is to be learnt. A
        block outside all turns belongs to the one before it."""
        turn = np.where(self.turn >= 0, self.turn, self.said)
        latest = np.maximum.accumulate(np.where(turn >= 0, np.arange(len(turn)), -1))
        supervised = np.array([turn.supervised for turn in turns])
        return self.block & (latest >= 0) & supervised[turn[latest]]

    def answer(self, turn: int, opening: str | None, ending: re.Pattern) -> tuple[int, int]:
        """First and last character of an answer that are learnt: its texts, what the template
        writes between them, before them for reasoning and calls, and the special tokens that end
        it. opening: what comes before every answer, if it is known; ending: a run of special
        tokens."""
        said, text = self.said, self.text
        there = np.flatnonzero(self.turn == turn)
        if not len(there):  # not written by a loop: the next turn may begin anywhere
            own = np.flatnonzero(said == turn)
            if not len(own):
                return 0, 0
            found = re.compile(rf"\s*{ending.pattern}").match(text, own[-1] + 1)
            return own[0], found.end() if found else own[-1] + 1
        mine, called = self.turn == turn, (self.turn == turn) & self.in_call
        names = np.array([False, *(source.kind == NAME for source in self.sources)])[self.source]
        # The name of a tool may be written again before its answer.
        own = np.flatnonzero((said == turn) & mine & (called | ~names | ~called.any()))
        last = max([there[0] - 1, *own[-1:], *np.flatnonzero(called)[-1:]]) + 1
        others = np.flatnonzero(((self.turn[last:] >= 0) & ~mine[last:]) | (said[last:] > turn))
        end = last + others[0] if len(others) else len(text)
        begin = _after(opening, text[there[0]: own[0] if len(own) else end], ending)
        begin += there[0] * (begin >= 0)
        if not len(own):
            found = ending.search(text, begin, end) if begin >= 0 else None
            return found.span() if found else (0, 0)
        start = own[0] if begin < 0 or self._is_start(own[0]) else begin
        found = ending.search(text, last, end)
        return start, found.end() if found else last + len(text[last:end].rstrip())

    def _is_start(self, at: int) -> bool:
        """Whether an answer begins as its content does: nothing of it has been put before it."""
        source = self.source[at]
        rest = np.flatnonzero(self.source[at:] != source)
        written = self.text[at: at + rest[0] if len(rest) else None]
        _, kind, value = self.sources[source - 1]
        return kind == CONTENT and value.lstrip().startswith(written.lstrip())

    def media(self, turns: Sequence[Turn], placeholders: dict[int, Placeholder]
              ) -> dict[int, tuple[int, Medium, Placeholder]]:
        """First character -> (the one after the last, medium, its placeholder). Raises RowError
        where the placeholders are not those of the media, in their order."""
        every = media_of(turns)
        found = {}
        for number, (_, _, value) in enumerate(self.sources, 1):
            if isinstance(value, Medium):
                for at in np.flatnonzero(self.source == number).tolist():
                    found[at] = at + 1, value, Placeholder("")
        for modality, placeholder in placeholders.items():
            media = [m for m in every if m.modality == modality]
            if not media or any(s.value in media for s in self.sources):
                continue
            places = [m.span() for m in re.finditer(re.escape(placeholder.text), self.text)
                      if not self.source[m.start(): m.end()].any()]
            found |= {start: (end, medium, placeholder)
                      for (start, end), medium in zip(places, media, strict=False)}
            if len(places) != len(media):
                found.clear()
                break
        if [found[at][1] for at in sorted(found)] != every:
            raise RowError("the chat template leaves out an image or a clip, repeats or moves it")
        return found

    def spans(self, learnt: np.ndarray, media: dict[int, tuple[int, Medium, Placeholder]]
              ) -> list[Span]:
        """The page cut where it changes from text of the template to text of the data, and where
        what is learnt begins and ends."""
        of_data = self.source > 0
        changes = np.flatnonzero(np.diff(2 * learnt + of_data)) + 1
        cuts = sorted({0, len(self.text), *changes.tolist(), *media,
                       *(end for end, _, _ in media.values())})
        out: list[Span] = []
        for start, end in pairwise(cuts):
            if start in media:
                _, medium, placeholder = media[start]
                out += [Text(placeholder.before, bool(learnt[start])), medium,
                        Text(placeholder.after, bool(learnt[start]))]
            elif not any(a < end and start < b for a, (b, _, _) in media.items()):
                out.append(Text(self.text[start:end], bool(learnt[start]), bool(of_data[start])))
        return [s for s in out if isinstance(s, Medium) or s.text]


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
