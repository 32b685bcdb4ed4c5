"""Lines for a recipe that would read rows which are not read, each tried on these rows."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, permutations, product, takewhile

from orchmllm.data.formats.columns import Columns, is_empty
from orchmllm.data.formats.conversation import ROLES, Conversation, media_of
from orchmllm.data.formats.row_formats import FORMATS, RowFormat, choose
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.kinds import VIDEO, modality_of
from orchmllm.data.media.medium import MediaError, Medium, RowError
from orchmllm.data.media.root import MediaRoot, is_base64
from orchmllm.data.storage.clients import StorageError
from orchmllm.plan.layout import AUDIO, VISION

NUM_ROWS = 12  # on which lines are tried
MOST_FILES = 20_000  # below the root that are looked at
FIELD = {VISION: "images", AUDIO: "audios", VIDEO: "videos"}
Read = Callable[[Mapping, RowFormat], Conversation]


def proposal(rows: Sequence[Mapping], root: MediaRoot, read: Read, now: RowFormat | None = None
             ) -> str:
    """The line under which most rows can be used, with most media; empty where there is none that
    is better than it is and gives up no medium, or where each row is one turn. read: a row as a
    format reads it; now: the format as it is."""
    around = {}
    for name, value in rows[0].items() if len(rows) == 1 else ():
        if isinstance(value, list) and len(value) > 1 and all(isinstance(v, dict) for v in value):
            rows, around = value, {"rows": name}
    rows = rows[:NUM_ROWS]
    if _are_turns(rows):
        return ""
    *best, named = _used(rows, read, now) if now else (0, 0, 0)
    line = ""
    for columns in chain(() if around else FORMATS, _guesses(rows, root)):
        try:
            row_format = FORMATS[columns] if isinstance(columns, str) else RowFormat(columns)
        except ValueError:
            continue
        if _misreads(row_format.columns, rows):
            continue
        *found, _ = _used(rows, read, row_format)
        if found > best and found[1] >= named:
            said = ", ".join(f"{field}: {json.dumps(spec, ensure_ascii=False)}" for field, spec in (
                {} if isinstance(columns, str) else around | columns).items())
            best, line = found, f"columns: {{{said}}}" if said else f'row_format: "{columns}"'
    return (f"; write {line} in the source: it reads {best[0]} of {len(rows)} rows, with "
            f"{best[1]} images, clips and frames" if line else "")


def _misreads(columns: Columns, rows: Sequence[Mapping]) -> bool:
    """Whether columns take turns apart, or leave out what belongs to a question and its answer."""
    if "messages" in columns.specs:
        return False
    names = {name: value for row in rows for name, value in row.items() if not is_empty(value)}
    turns = {name for name, value in names.items()
             for one in (value if isinstance(value, list) else [value])[:1]
             if isinstance(one, Mapping) and not {"from", "role"}.isdisjoint(one)}
    belong = [names.keys() & group for group in (
        {"question"}, {"answer", "answers"}, {"context"}, {"tools"})]
    return bool(turns & columns.names) or any(
        group and group.isdisjoint(columns.names) for group in belong)


def _used(rows: Sequence[Mapping], read: Read, row_format: RowFormat) -> tuple[int, int, int]:
    """(Rows that can be used with a format, media in them, media of all rows that it reads)."""
    count = num_media = named = 0
    for row in rows:
        try:
            media = media_of(read(row, row_format))
            named += len(media)
            for medium in media:
                (audio_header if medium.modality == AUDIO else image_header)(medium)
        except (RowError, MediaError, OSError, StorageError):
            continue
        count, num_media = count + 1, num_media + len(media)
    return count, num_media, named


def _guesses(rows: Sequence[Mapping], root: MediaRoot) -> Iterator[dict[str, str]]:
    """Columns that hold what a field does, the likeliest first."""
    values: dict[str, list] = {}
    for name, value in chain.from_iterable(map(_places, rows)):
        values.setdefault(name, []).append(value)
    values = {name: found for name, found in values.items() if 2 * len(found) > len(rows)}
    media: dict[str, str] = {}
    for field, name in _media_columns(values, rows, root):
        media.setdefault(field, name)
    if not media and any(all(modality_of(one) is not None for one in found)
                         for found in values.values()):
        return  # of media that cannot be had
    texts = [name for name, found in values.items() if name not in media.values() and all(
        type(one) in (str, int, float) or _are_texts(one) for one in found)]
    words = [name for name in texts if any(" " in str(one) and "://" not in str(one)
                                           for one in values[name])]
    by_length = sorted(words, key=lambda name: -sum(len(str(one)) for one in values[name]))
    asked, answered, shown = (_named(field, names) for field, names in (
        ("question", texts), ("answer", texts), ("text", dict.fromkeys([*by_length, *texts]))))
    for name, found in values.items():
        if all(map(_are_turns, found)):
            yield {"messages": name} | media
    pairs = [(q, a) for q, a in chain(
        product(asked, answered), product(asked, words), product(words, answered)) if q != a]
    beside = media | {field: name for field, names in (("tools", values), ("context", texts))
                      for name in names if name.split(".")[0] == field}
    for name, answer in _chosen(values, texts):
        for question in (one for one in [*asked, *words] if one not in (name, answer)):
            yield {"question": question, "choices": name, "answer": answer} | media
    lettered = _lettered(texts)
    for question, answer in pairs:
        if lettered and answer not in lettered:
            yield {"question": "{" + question + "}" + lettered, "answer": answer} | media
    for question, answer in product(asked, answered):
        if question != answer:
            yield {"question": question, "answer": answer} | beside
    for name in [*shown, *by_length * ("audios" in media)] if media else ():
        yield {"text": name} | media
    for question, answer in [*pairs, *permutations(words, 2)]:
        yield {"question": question, "answer": answer} | beside
    for name in [*shown, *by_length, *sorted(texts, key=lambda name: _are_numbers(values[name]))]:
        yield {"text": name} | media


def _lettered(names: Sequence[str]) -> str:
    """Lines of columns that differ in a letter from A on, as choices do; empty without them."""
    for first in names:
        if first[-1] in "aA":
            found = [first[:-1] + chr(ord(first[-1]) + k) for k in range(26)]
            found = [*takewhile(names.__contains__, found)]
            if len(found) > 1:
                return "".join(f"\n{name[-1].upper()}. {{{name}}}" for name in found)
    return ""


def _places(row: Mapping, around: str = "") -> Iterator[tuple[str, object]]:
    """(Column, value) of a row, and of the objects in it."""
    for key, value in row.items():
        if value is None or not isinstance(key, str) or re.search(r"[.\[\]{},|]", key):
            continue
        yield around + key, value
        if isinstance(value, Mapping) and not around:
            yield from _places(value, f"{key}.")
        elif isinstance(value, list) and value and isinstance(value[0], Mapping) and not around:
            for inner in value[0]:
                yield f"{key}[].{inner}", [one.get(inner) for one in value]
                yield f"{key}[0].{inner}", value[0][inner]


def _named(field: str, names: Iterable[str]) -> list[str]:
    """Those of the names that have a word in them by which formats call a field."""
    known = {field, *(word for one in FORMATS.values() if field in one.columns.specs
                      for word in _words(one.columns.specs[field].text))}
    found = [name for name in names if known & _words(name)]
    return sorted(found, key=lambda name: (field not in _words(name), len(_words(name))))


def _words(name: str) -> set[str]:
    return set(re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", name).lower()))


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _are_turns(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) and any(
        str(v).lower() in ROLES for v in one.values()) for one in value)


def _are_numbers(found: Sequence) -> bool:
    return all(re.fullmatch(r"[\d.+-]*", str(one)) for one in found)


def _chosen(values: Mapping[str, list], texts: Sequence[str]) -> list[tuple[str, str]]:
    """(Column of choices, column that names one of them in every row), first what repeats."""
    found = [(name, answer) for name, all_choices in values.items() for answer in texts
             if name.split(".")[0] != answer.split(".")[0]
             and len(all_choices) == len(values[answer])
             and all(map(_is_choice, all_choices, values[answer]))]
    return sorted(found, key=lambda pair: len(set(map(str, values[pair[1]]))))


def _is_choice(choices: object, answer: object) -> bool:
    try:
        return len(choose(choices, answer)[0]) > 1
    except RowError:
        return False


def _media_columns(values: Mapping[str, list], rows: Sequence[Mapping], root: MediaRoot
                   ) -> Iterator[tuple[str, str]]:
    """(Field, column) of media: what holds their content, or names files that are there."""
    files: list[str] | None = None

    def likely(name: str) -> tuple[bool, bool]:  # the content of a medium, then names of files
        one = values[name][0]
        return isinstance(one, str | int) and not is_base64(str(one)), modality_of(one) is None

    for name in sorted(values, key=likely):
        found = values[name]
        first = found[0][0] if isinstance(found[0], list) and found[0] else found[0]
        if (modality := _content(first, root)) is not None:
            yield FIELD[modality], name
        elif isinstance(first, str | int) and not isinstance(first, bool) and (
                len(str(first)) < 200 and len({str(one) for one in found}) == len(found)):
            files = _files(root) if files is None else files
            yield from _by_name(name, str(first), files, rows, root)


def _content(value: object, root: MediaRoot) -> int | None:
    """The modality of what is a medium by itself."""
    named = modality_of(value)
    if named is not None and os.path.isfile(os.path.join(root.path, value)):
        return named
    if not (isinstance(value, bytes | Medium | Mapping)
            or isinstance(value, str) and (value.startswith("data:") or is_base64(value))):
        return None
    for modality, header in ((VISION, image_header), (AUDIO, audio_header)):
        try:
            header(root.medium(modality, value))
        except (RowError, MediaError):
            continue
        return modality
    return None


def _files(root: MediaRoot) -> list[str]:
    """Names of the media below the root."""
    found: list[str] = []
    for folder, _, names in os.walk(root.path):
        below = os.path.relpath(folder, root.path)
        found += [os.path.normpath(os.path.join(below, name)) for name in names
                  if modality_of(name) is not None]
        if len(found) > MOST_FILES:
            break
    return found


def _by_name(column: str, value: str, files: Sequence[str], rows: Sequence[Mapping],
             root: MediaRoot) -> Iterator[tuple[str, str]]:
    """A column whose values are part of the names of files, as a text made of columns."""
    known = re.compile(rf"(?:(.*)/)?([^/]*?)(0*){re.escape(value)}(\.\w+)?")
    for file in files:
        if not (match := known.fullmatch(file)) or value.isdecimal() and match[2][-1:].isdecimal():
            continue
        folder, before, zeros, suffix = (text or "" for text in match.groups())
        pad = f":0{len(zeros + value)}" if zeros else ""
        name = "/".join(filter(None, (folder, before + "{" + column + pad + "}" + suffix)))
        for spec in (name, _with_others(name, rows[0], column)):
            spec = column if spec == "{" + column + "}" else spec
            if all(_is_there(spec, row, root) for row in rows):
                yield FIELD[modality_of(file)], spec
                return


def _with_others(name: str, row: Mapping, column: str) -> str:
    """With the columns in place of folders that are their values."""
    known = {str(value): key for key, value in row.items()
             if key != column and isinstance(value, str | int) and str(value)}
    return "/".join("{" + known[step] + "}" if step in known else step for step in name.split("/"))


def _is_there(spec: str, row: Mapping, root: MediaRoot) -> bool:
    name = RowFormat({"text": spec}).columns.specs["text"].find(row)[1]
    return bool(name) and os.path.isfile(os.path.join(root.path, str(name)))
