"""Where what the rows of a source hold goes.

Every character and every medium of a row has one of FATES. None of them is told by who reads the
row: a row is read with its keys watched, and what it holds is looked for in the conversation that
was made of it, in what the chat template wrote of that, and in what was kept of this. So the shares
add up to 100%, and what gets lost on the way is seen wherever that happens. White space does not
count, and what a medium is given by (a path, base64) is the medium.
"""

from __future__ import annotations

import copy
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from textwrap import wrap
from typing import NamedTuple

from orchmllm.data.formats.columns import Columns, from_json, is_json
from orchmllm.data.formats.conversation import PLACEHOLDER, ROLES, Turn, media_of
from orchmllm.data.formats.open import DataSource
from orchmllm.data.formats.row_formats import OF_ALL
from orchmllm.data.formats.scanned import File
from orchmllm.data.lengths import LengthReader, MeasuredExample
from orchmllm.data.media.kinds import modality_of
from orchmllm.data.media.medium import MediaError, Medium, RowError, given_by
from orchmllm.data.text.spans import Span
from orchmllm.plan.layout import MADE, TEXT

FATES = {"learnt": "learnt", "read": "read", "cut": "cut by data.max_example_tokens",
         "left out": "left out by the chat template", "refused": "in refused rows",
         "unread": "not read", "names": "roles, types and numbers"}
GAP = "\0"  # in place of a text that was found
NONE: Counter = Counter()


class Watched(dict):
    """A row, or an object in it, which remembers which of its keys are read."""

    def __init__(self, keys: Mapping) -> None:
        super().__init__({key: _watched(value) for key, value in keys.items()})
        self.seen: set[str] = set()

    def get(self, key: str, default: object = None) -> object:
        self.seen.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> object:
        self.seen.add(key)
        return super().__getitem__(key)

    def unread(self) -> set[str]:
        """Keys that hold something and are not read, of turns as "content of a turn"."""
        inner = ("messages", "a turn"), ("conversations", "a turn"), ("content", "a part")
        return {key for key, value in self.items()
                if value not in (None, "", [], {}) and key not in self.seen} | {
            f"{key} of {what}" for name, what in inner for one in dict.get(self, name) or ()
            if isinstance(one, Watched) for key in one.unread()}


def _watched(value: object) -> object:
    if isinstance(value, list):
        return [Watched(one) if isinstance(one, dict) else one for one in value]
    return value


class Leaf(NamedTuple):
    """A text, a number or a medium in a row. key, last: of the row, and of the innermost object,
    that it is under. is_read: whether the first is read; is_known: whether all of them are."""

    value: object
    key: str
    last: str
    is_read: bool
    is_known: bool


@dataclass
class Ledger:
    """Of the rows of a source that were looked at. chars, media: fate -> how many. refused: reason
    -> (where it was met first, rows). unread: keys that nothing reads. targets: (those that are
    learnt, those without data.max_example_tokens) of each row that is not refused. said, left_out:
    characters of the assistant, and those that the chat template leaves out; num_ends: special
    tokens that are learnt."""

    name: str
    rows: int = 0
    chars: Counter = field(default_factory=Counter)
    media: Counter = field(default_factory=Counter)
    refused: dict[str, tuple[str, int]] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)
    targets: list[tuple[int, int]] = field(default_factory=list)
    said: int = 0
    left_out: int = 0
    num_ends: int = 0

    @property
    def num_refused(self) -> int:
        return sum(count for _, count in self.refused.values())

    def saved(self) -> dict:
        """What the report of a run shows of it."""
        return {key: getattr(self, key) for key in ("name", "rows", "chars", "media")}

    def shares(self) -> list[tuple[str, float, float]]:
        """(fate in words, share of the characters, share of the media), of those that occur."""
        chars, media = (max(1, found.total()) for found in (self.chars, self.media))
        return [(words, self.chars[fate] / chars, self.media[fate] / media)
                for fate, words in FATES.items() if self.chars[fate] or self.media[fate]]

    def __str__(self) -> str:
        told = [f"{self.name}: {self.rows} rows"]
        for column, what, counts in ((1, "characters", self.chars), (2, "media", self.media)):
            shares = [f"{row[column]:.1%} {row[0]}" for row in self.shares() if row[column]]
            told += wrap(f"{counts.total()} {what}{': ' * bool(shares)}{', '.join(shares)}", 98,
                         subsequent_indent="  ")
        return "\n  ".join(told)

    def follow(self, source: DataSource, reader: LengthReader, row: Mapping, file: File,
               place: str, *, decode: bool = False) -> None:
        """Reads a row as a run does, and counts what becomes of it. decode: with its media. Raises
        OSError or StorageError where it cannot be read for now, which counts nothing."""
        row, taken, whole = Watched(row), [], copy.copy(reader)
        whole.max_example_tokens = 0
        try:
            turns = replace(source, root=replace(source.root, taken=taken)).parse(row, file)
            [kept] = reader.plan(lambda _: turns, [0])
            [every] = whole.plan(lambda _: turns, [0]) if reader.max_example_tokens else [kept]
            if every.problem is not None:
                raise every.problem
            if decode and kept.problem is None:
                reader.load(kept, lambda: place)
            spans = every.spans or reader.tokenizer.spans(turns)
        except (RowError, MediaError) as error:
            self.refuse(error, place)
            self._count(source, row, taken)
            return
        self.rows += 1
        self.unread |= row.unread()
        self.targets.append(tuple(int(one.layout.num_targets.sum()) * (one.problem is None)
                                  for one in (kept, every)))
        self._say(turns, spans, reader)
        self._count(source, row, taken, turns, kept, _written(
            spans, reader, _num_text(kept) / max(1, _num_text(every))))

    def refuse(self, error: Exception, place: str) -> None:
        """A row of which nothing is known."""
        self.rows += 1
        first, count = self.refused.get(str(error), (place, 0))
        self.refused[str(error)] = first, count + 1

    def _say(self, turns: Sequence[Turn], spans: Sequence[Span], reader: LengthReader) -> None:
        """What the assistant says and the template leaves out; ends of answers."""
        learnt = [span for span in spans if not isinstance(span, Medium) and span.learnt]
        written = [s.text if s.of_data else reader.tokenizer.plain(s.text) for s in learnt]
        said = _squeezed("".join(text for turn in turns if turn.supervised
                                 for text in (*turn.parts, turn.reasoning)
                                 if isinstance(text, str)))
        self.said += len(said)
        self.left_out += max(0, len(said) - len(_squeezed("".join(written))))
        self.num_ends += sum(text != span.text for text, span in zip(written, learnt, strict=True))

    def _count(self, source: DataSource, row: Watched, taken: Sequence, turns: Sequence[Turn] = (),
               kept: MeasuredExample | None = None, written: Counter = NONE) -> None:
        """Gives what a row holds its fates. taken: (what was taken for a medium, the medium or
        None); kept: None of a row that is refused; written: see _written."""
        contents, names = self._count_media(taken, turns, kept)
        leaves = _without(_leaves(row, contents), names)
        texts = [(_squeezed(text), turn) for turn in turns for text in _texts(turn)]
        claimed, rest = _claims([text for text, _ in texts], [
            _squeezed(str(leaf.value)) if leaf.is_read and not _is_bytes(leaf) else ""
            for leaf in leaves])
        self._share(texts, claimed, written)
        said = Columns({field: spec.text for field, spec in source.row_format.columns.specs.items()
                        if field in OF_ALL}).names
        for leaf, left in zip(leaves, rest, strict=True):
            whole = _squeezed("" if _is_bytes(leaf) else str(leaf.value))
            left = left if leaf.is_read else whole
            is_name = leaf.is_known and (
                leaf.key in said or not isinstance(leaf.value, str) or leaf.value in ROLES
                or leaf.last == "type" or any(whole in name != whole for name in names))
            if kept is None:
                fate, marks = "refused", ""
            else:
                fate, marks = "names" if is_name else "unread", "".join(PLACEHOLDER.findall(left))
            if _is_bytes(leaf) or (left == whole and fate != "names" and _is_path(leaf.value)):
                self.media[fate] += 1
            else:
                self.chars["names"] += len(marks)
                self.chars[fate] += len(left) - len(marks)

    def _count_media(self, taken: Sequence, turns: Sequence[Turn], kept: MeasuredExample | None
                     ) -> tuple[set[int], list[str]]:
        """(Ids of the contents, names) by which a row gives media."""
        there = {_file(medium) for medium in media_of(turns)}
        shown = {_file(medium): "learnt" if medium.modality == MADE else "read"
                 for medium in kept.media_at.values()} if kept else {}
        contents, names = set(), []
        for value, medium in taken:
            content, name = given_by(value)
            has_content = isinstance(content, bytes | list | Medium)
            has_name = isinstance(name, str) and name != ""
            contents |= {id(content)} if has_content else set()
            names += [name] * has_name
            file = medium and _file(medium)
            self.media["refused" if kept is None else shown[file] if file in shown else
                       "cut" if file in there else "unread"] += has_content or has_name
        return contents, names

    def _share(self, texts: Sequence[tuple[str, Turn]], claimed: Sequence[int], written: Counter
               ) -> None:
        """Of the texts of a conversation, those characters that are a row's. What a format adds (a
        question, the syntax of calls) is taken from where it was written. claimed: of each text."""
        left = 0
        for (text, turn), count in zip(texts, claimed, strict=True):
            if turn.role == "tools":  # as JSON that the template writes
                self.chars["read"] += count
            else:
                left += count
                written["learnt" if turn.supervised else "read"] -= len(text) - count
        for fate in ("learnt", "cut", "read"):
            count = min(max(0, written[fate]), left)
            self.chars[fate] += count
            left -= count
        self.chars["left out"] += left


def _leaves(value: object, contents: Collection[int], key: str = "", last: str = "",
            is_read: bool = True, is_known: bool = True) -> Iterator[Leaf]:
    """What a row holds but for what has an id of contents."""
    if id(value) in contents:
        return
    if key and is_read and is_json(value):
        with suppress(RowError):  # what only looks like JSON is a text, and its row is refused
            value = from_json(value)
    if isinstance(value, Mapping):
        for name, inner in value.items():
            known = is_known and (not isinstance(value, Watched) or name in value.seen)
            yield from _leaves(inner, contents, key or str(name), str(name),
                               is_read if key else known, known)
    elif isinstance(value, list | tuple) and not isinstance(value, Medium):
        for inner in value:
            yield from _leaves(inner, contents, key, last, is_read, is_known)
    elif value is not None and not isinstance(value, bool):
        yield Leaf(value, key, last, is_read, is_known)


def _without(leaves: Iterable[Leaf], names: Iterable[str]) -> list[Leaf]:
    """Those that are none of the texts that gave media, each of which is one leaf, or ends with the
    base64 that is one."""
    left = Counter(name.partition("base64,")[2] or name for name in names)
    left += Counter(name for name in names if "base64," in name)
    out = []
    for leaf in leaves:
        if isinstance(leaf.value, str) and left[leaf.value] > 0:
            left[leaf.value] -= 1
        else:
            out.append(leaf)
    return out


def _claims(texts: Sequence[str], leaves: Sequence[str]) -> tuple[list[int], list[str]]:
    """(Characters of each text that are those of a leaf, what is left of each leaf). A leaf is a
    text, holds texts with placeholders between them, or is one of the parts of a text."""
    free, rest, claimed = list(texts), list(leaves), [0] * len(texts)
    at: dict[str, list[int]] = {}
    for k, text in enumerate(texts):
        at.setdefault(text, []).append(k)
    for n, leaf in enumerate(rest):
        if leaf and at.get(leaf):
            same = at[leaf].pop(0)
            claimed[same], free[same], rest[n] = len(leaf), "", ""
    for k in _longest_first(free):
        holds = next((n for n, leaf in enumerate(rest) if free[k] in leaf), None)
        if holds is not None:
            rest[holds] = rest[holds].replace(free[k], GAP, 1)
            claimed[k], free[k] = len(free[k]), ""
    for n in _longest_first(rest):
        for form in (rest[n], _squeezed(json.dumps(rest[n], ensure_ascii=False)[1:-1])):
            holds = next((k for k, text in enumerate(free) if form in text), None)
            if holds is not None:
                free[holds] = free[holds].replace(form, GAP, 1)
                claimed[holds], rest[n] = claimed[holds] + len(rest[n]), ""
                break
    return claimed, [leaf.replace(GAP, "") for leaf in rest]


def _longest_first(texts: Sequence[str]) -> list[int]:
    return sorted((k for k, text in enumerate(texts) if text), key=lambda k: -len(texts[k]))


def _texts(turn: Turn) -> Iterator[str]:
    """What a turn says, as one or several texts."""
    yield from (part for part in turn.parts if isinstance(part, str))
    yield from (turn.reasoning, *dict(turn.named).values())
    if turn.calls:
        yield json.dumps(turn.calls, ensure_ascii=False)


def _written(spans: Sequence[Span], reader: LengthReader, share: float) -> Counter:
    """learnt, read, cut -> characters of the data in what the template wrote. share: of its tokens,
    the first of which are kept; a text in which they end is cut by its own tokens."""
    texts = [span for span in spans if not isinstance(span, Medium)]
    counts = [len(reader.tokenizer.encode_spans([s])[0]) if share < 1 else 1 for s in texts]
    left, out = sum(counts) * share, Counter()
    for span, count in zip(texts, counts, strict=True):
        if span.of_data:
            length = len(_squeezed(span.text))
            kept = round(length * min(1, max(0, left) / max(1, count)))
            out["learnt" if span.learnt else "read"] += kept
            out["cut"] += length - kept
        left -= count
    return out


def _num_text(row: MeasuredExample) -> int:
    """Tokens of text of a row; none of a stand-in."""
    return int(row.layout.num_tokens[row.layout.modality == TEXT].sum()) * (row.problem is None)


def _squeezed(text: str) -> str:
    return "".join(text.split())


def _file(medium: Medium) -> Medium:
    """What is the same of all that is read of a file."""
    return medium._replace(modality=0, frame=None, sampled=None, part=None)


def _is_bytes(leaf: Leaf) -> bool:
    return isinstance(leaf.value, bytes | Medium)


def _is_path(value: object) -> bool:
    """Whether a text names a medium."""
    return isinstance(value, str) and not re.search(r"\s", value) and (
        value.startswith("data:") or modality_of(value) is not None)
