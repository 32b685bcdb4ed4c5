"""Chat templates: what one writes around the texts of a conversation, and which of it is learnt.

A template is rendered with a mark in place of each text, which shows where the texts go. It is
rendered again with the texts themselves, and both have to agree: a template may read what it is
given (a Qwen3 template splits an answer at "</think>"). Where they do not agree, the texts are cut
at the strings that the template looks for, and each part gets its own mark. What then still differs
is refused: what is trained on is what transformers' apply_chat_template renders, or nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.text.spans import ALL, END, NONE, Span, Text, spans_of, with_calls
from orchmllm.data.text.template_engine import environment, looked_for

_MARK = re.compile("\ue000(\\d+)\ue001")  # private use
_BLOCK = re.compile("\ue002(.*?)\ue003", re.DOTALL)  # what {% generation %} is around


class _Chunk(NamedTuple):
    """What one mark stands for. literals: the strings that come before it in its turn, back to the
    chunk before; lead: the space right before it; after: strings behind the last chunk of a turn.
    """

    turn: int
    parts: tuple[str | Medium, ...]
    literals: tuple[str, ...] = ()
    lead: str = ""
    after: tuple[str, ...] = ()


class ChatTemplate:
    """source: in Jinja. variables: its special tokens by name. special: tokens that data must not
    be able to write. Raises RowError, naming `path`, for a template that cannot be used."""

    def __init__(self, source: str, variables: dict[str, str], special: Sequence[str], path: str):
        self.source, self.variables, self.special = source, variables, list(special)
        try:
            self._marked = environment(marks=True).from_string(source)
            self._plain = environment(marks=False).from_string(source)
            self._literals = looked_for(source, special)
        except Exception as error:  # of jinja's parser
            raise RowError(f"{path}: the chat template cannot be read: {error}") from error
        self._trims = False
        self._probe(path)

    def spans(self, turns: Sequence[Turn]) -> list[Span]:
        """The conversation as rendered. Raises RowError for turns that the template refuses, and
        where it is not known which of the text is the template's."""
        tools, turns = self._tools(turns)
        truth = self._render(self._plain, turns, [_filled(_mark(0), [c]) for c in _whole(turns)],
                             tools, calls=True)
        called = any(turn.calls for turn in turns)
        turns = [with_calls(turn) for turn in turns]
        problem = ("the chat template writes tool calls in a way of its own; write them into the "
                   "text of the answer, as the model is to say them") if called else ""
        for cut in (self._uncut, self._cut):
            contents, chunks = cut(turns)
            try:
                rendered = self._render(self._marked, turns, contents, tools)
            except RowError as error:  # it takes the text, and not a mark in its place
                problem = error.reason
                continue
            wrong = _wrong(_marks(rendered), chunks)
            if not wrong and _filled(rendered, chunks) == truth:
                return self._read(rendered, chunks, turns)
            problem = wrong or problem
        raise RowError(problem or "the chat template changes the texts of turns, so what is learnt "
                       "cannot be told from the rest; write one that puts them in as they are")

    def _probe(self, path: str) -> None:
        """Whether the template strips texts; that it can write a question and an answer."""
        short, talk = (
            [Turn("user", (question,), False), Turn("assistant", (answer,), True)]
            for question, answer in (("  x  ", "y"), ("Who is it?", "It is I, Anna.")))
        try:
            self._trims = "  x  " not in self._render(self._plain, short, ["  x  ", "y"])
            self.spans(talk)
        except RowError as error:
            raise RowError(f"{path}: its chat template cannot write a question and an answer: "
                           f"{error.reason}") from error

    def _tools(self, turns: Sequence[Turn]) -> tuple[list | None, Sequence[Turn]]:
        """The definitions of tools, and the other turns."""
        if not turns or turns[0].role != "tools":
            return None, turns
        text = turns[0].parts[0]
        for token in self.special:
            if token in text:
                raise RowError(f"the definitions of the tools contain the special token {token}")
        return json.loads(text), turns[1:]

    def _render(self, template, turns: Sequence[Turn], content: Sequence[str],
                tools: list | None = None, *, calls: bool = False) -> str:
        messages = [{"role": t.role, "content": c} for t, c in zip(turns, content, strict=True)]
        for message, turn in zip(messages, turns, strict=True):
            if calls and turn.calls:
                message["tool_calls"] = [{"type": "function", "function": c} for c in turn.calls]
        try:
            return template.render(messages=messages, add_generation_prompt=False, tools=tools,
                                   documents=None, **self.variables)
        except Exception as error:  # templates raise on roles that they do not know
            raise RowError(f"the chat template refuses these turns: {error}") from error

    @cached_property
    def _opening(self) -> str:
        """What comes before every answer."""
        messages = [{"role": "user", "content": "x"}]
        keys = dict(messages=messages, tools=None, documents=None, **self.variables)
        try:
            without = self._plain.render(add_generation_prompt=False, **keys)
            prompt = self._plain.render(add_generation_prompt=True, **keys)
        except Exception:  # a template that wants a system turn
            return ""
        return prompt[len(without):] if prompt.startswith(without) else ""

    def _uncut(self, turns: Sequence[Turn]) -> tuple[list[str], list[_Chunk]]:
        """Each turn's content as one mark, and what the marks stand for."""
        chunks = _whole(turns)
        if self._trims:
            chunks = [c._replace(parts=_trimmed(c.parts)) for c in chunks]
        return [_mark(k) for k in range(len(turns))], chunks

    def _cut(self, turns: Sequence[Turn]) -> tuple[list[str], list[_Chunk]]:
        """Each turn's content with marks, and what they stand for: everything but the strings
        that the template looks for and the space around them."""
        contents, chunks = [], []
        for k, turn in enumerate(turns):
            content, first = "", len(chunks)
            literals: list[str] = []
            for bare, group in groupby(_pieces(turn, self._literals),
                                       lambda piece: isinstance(piece, Text)):
                pieces = list(group)
                if bare:
                    content += "".join(p.text for p in pieces)
                    literals = [p.text for p in pieces if p.text.strip()]
                    continue
                lead = content[len(content.rstrip()):]
                content += _mark(len(chunks))
                chunks.append(_Chunk(k, tuple(pieces), tuple(literals), lead))
                literals = []
            if len(chunks) > first and literals:
                chunks[-1] = chunks[-1]._replace(after=tuple(literals))
            contents.append(content)
        return contents, chunks

    def _read(self, rendered: str, chunks: list[_Chunk], turns: Sequence[Turn]) -> list[Span]:
        """What was rendered with marks, as spans."""
        if re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", self.source):
            return _in_blocks(rendered, chunks, turns)
        out: list[Span] = []
        last: _Chunk | None = None
        texts = _MARK.split(rendered)[::2]
        marks = [*_marks(rendered), None]
        for text, number in zip(texts, marks, strict=True):
            after = chunks[number] if number is not None else None
            supervised = last is not None and turns[last.turn].supervised
            if last and after and last.turn == after.turn:
                out.append(Text(text, ALL if supervised else NONE))
            else:
                out += self._between(text, last, after, turns)
            if after:
                learnt = turns[after.turn].supervised
                out += spans_of(after.parts, learnt)
                last = after
        return [s for s in out if isinstance(s, Medium) or s.text]

    def _between(self, text: str, last: _Chunk | None, after: _Chunk | None,
                 turns: Sequence[Turn]) -> Iterator[Text]:
        """Text from one turn's last mark to another turn's first. Strings of an answer that the
        template put back there are learnt with it."""
        end = NONE
        if last and turns[last.turn].supervised:
            end, at = END, 0
            for literal in last.after:
                found = text.find(literal, at)
                if found < 0 or text[at:found].strip():
                    break
                at = found + len(literal)
            if at:
                yield Text(text[:at], ALL)
                text = text[at:]
        start, opened = len(text), text.rfind(self._opening)
        if after and turns[after.turn].supervised and self._opening and opened >= 0:
            opened += len(self._opening)
            if after.literals and after.literals[0] in text[opened:]:
                start = text.index(after.literals[0], opened)
            elif after.lead.endswith(text[opened:]):  # the answer's own space
                start = opened
        yield Text(text[:start], end)
        if text[start:]:
            yield Text(text[start:], ALL)


def _in_blocks(rendered: str, chunks: list[_Chunk], turns: Sequence[Turn]) -> list[Span]:
    """Learnt is what stands in {% generation %}, unless its turn is not to be learnt."""
    out: list[Span] = []
    for k, block in enumerate(_BLOCK.split(rendered)):
        there = [chunks[number] for number in _marks(block)]
        learnt = [k % 2 == 1 and turns[chunk.turn].supervised for chunk in there]
        text, *texts = _MARK.split(block)[::2]
        out.append(Text(text, ALL if any(learnt[:1]) else NONE))
        for chunk, mine, text in zip(there, learnt, texts, strict=True):
            out += spans_of(chunk.parts, mine)
            out.append(Text(text, ALL if learnt[0] else NONE))
    return [s for s in out if isinstance(s, Medium) or s.text]


def _mark(number: int) -> str:
    return f"\ue000{number}\ue001"


def _marks(rendered: str) -> list[int]:
    return [int(number) for number in _MARK.findall(rendered)]


def _part(part: str | Medium) -> str:
    """A text, or what stands for a medium where texts are compared."""
    return part if isinstance(part, str) else "\ue004"


def _whole(turns: Sequence[Turn]) -> list[_Chunk]:
    return [_Chunk(k, turn.parts) for k, turn in enumerate(turns)]


def _filled(rendered: str, chunks: list[_Chunk]) -> str:
    return _MARK.sub(lambda m: "".join(map(_part, chunks[int(m[1])].parts)),
                     _BLOCK.sub(r"\1", rendered))


def _trimmed(parts: Sequence[str | Medium]) -> tuple[str | Medium, ...]:
    parts = list(parts)
    if parts and isinstance(parts[0], str):
        parts[0] = parts[0].lstrip()
    if parts and isinstance(parts[-1], str):
        parts[-1] = parts[-1].rstrip()
    return tuple(parts)


def _pieces(turn: Turn, literals: re.Pattern | None) -> Iterator[str | Medium | Text]:
    """A turn's parts, cut: Texts are the strings that the template sees as they are."""
    pieces: list[str | Medium | Text] = []
    for part in turn.parts:
        if isinstance(part, Medium) or literals is None:
            pieces.append(part)
        else:
            pieces += [Text(p, NONE) if k % 2 else p
                       for k, p in enumerate(literals.split(part)) if p]
    for k, piece in enumerate(pieces):
        if not isinstance(piece, str):
            yield piece
            continue
        opens = k == 0 or isinstance(pieces[k - 1], Text)
        closes = k + 1 == len(pieces) or isinstance(pieces[k + 1], Text)
        lead = piece[: len(piece) - len(piece.lstrip())] if opens else ""
        rest = piece[len(lead):]
        trail = rest[len(rest.rstrip()):] if closes else ""
        core = rest[: len(rest) - len(trail)]
        yield from (Text(lead, NONE),) * bool(lead)
        yield from (core,) * bool(core)
        yield from (Text(trail, NONE),) * bool(trail)


def _wrong(marks: list[int], chunks: list[_Chunk]) -> str:
    """What is wrong with the order in which marks were rendered, or nothing. A template may leave
    out a part of a turn (the reasoning of earlier answers)."""
    if marks != sorted(set(marks)):
        return "the chat template repeats or reorders turns"
    lost = [chunks[k] for k in set(range(len(chunks))) - set(marks)]
    if any(isinstance(p, Medium) for chunk in lost for p in chunk.parts):
        return "the chat template leaves out an image or a clip"
    if {chunk.turn for chunk in lost} - {chunks[k].turn for k in marks}:
        return "the chat template leaves out turns"
    return ""
