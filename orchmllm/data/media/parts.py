"""Keys that change what is learnt, in rows, turns and media: KEYS says which are read, and which
rows are refused. And the part of a clip or a video that a row or a medium names."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

from orchmllm.config.strict_yaml import parse
from orchmllm.data.media.headers import audio_header
from orchmllm.data.media.medium import MediaError, Medium, Part, RowError
from orchmllm.plan.layout import AUDIO

_CUT_S = 0.2  # by which a clip that has been cut out may differ from the part that its row names


class Meaning(NamedTuple):
    """A row of keys.yaml, which says what the fields are."""

    keys: tuple[str, ...]
    of: str
    done: str
    refused: str = ""

    def refuses(self, value: object, text: str) -> bool:
        """Whether a row with such a value is refused, where its texts are `text`."""
        return {"always": bool(value), "false": str(value).lower() == "false",
                "marked": bool(value and re.search("<(bbox|ref-object)>", text)),
                "unsaid": str(value).strip() not in text}[self.refused]


KEYS = {name: Meaning(**row) for name, row in parse(
    Path(__file__).with_name("keys.yaml").read_bytes()).items()}
START, END, DURATION = (KEYS[name].keys for name in ("start", "end", "duration"))


def refuse_unread(keys: Mapping, text: str = "",
                  skips: Collection[str] = KEYS["question"].keys) -> None:
    """Raises RowError if `keys` has one that is refused. text: all that a row says. skips: keys
    that are read, or do not matter."""
    held = dict(keys)
    for meaning in KEYS.values():
        for key in [key for key in meaning.keys if meaning.refused and key not in skips]:
            value = held.get(key)
            if value is not None and meaning.refuses(value, text):
                raise RowError(f'"{key}" is {value!r:.80}, and is not read: {meaning.done}')
            if type(value) is not int:  # a number may mean anything: it stays one that is not read
                keys.get(key)


def part_of(keys: Mapping) -> Part | None:
    """The part that keys of a row or a medium name, in seconds. Raises RowError."""
    told = {key: keys[key] for key in [*START, *END, *DURATION] if keys.get(key) is not None}
    if told.keys() <= {*DURATION}:
        return None
    try:
        times = [{float(told[key]) for key in names if key in told}
                 for names in (START, END, DURATION)]
    except (TypeError, ValueError):
        raise _no_part(told, "they must be numbers of seconds") from None
    if any(len(named) > 1 for named in times):
        raise _no_part(told, "keys of one meaning have other values")
    start, end, duration = (next(iter(named), None) for named in times)
    start = start or 0.0
    end = start + duration if end is None and duration is not None else end
    if end is None and start == 0:
        return None
    if not 0 <= start < (start + 1 if end is None else end) < float("inf"):
        raise _no_part(told, "the start must be from 0 to below the end")
    return Part(start, end)


def _no_part(told: object, why: str, file: str = "") -> RowError:
    return RowError(f"{str(told)[1:-1]:.200}: {why}; where the part has been cut out already, "
                    'leave the keys out, or set columns: {start: "-", end: "-", duration: "-"}',
                    file)


def seconds_in(part: Part, length: float, name: str) -> tuple[float, float] | None:
    """(first, last) second of a part of a clip or a video of `length` seconds; None where it has
    been cut out already, by its length. Raises RowError."""
    start, end = part
    if end is None:
        if start >= length:
            return None
        raise _no_part({"start": start}, "a start alone does not say whether the clip has been cut "
                       "there: give its end or duration, too", name)
    if end > length and min(abs(length - (end - start) / s) for s in (1, 1000)) <= _CUT_S:
        return None  # in seconds or milliseconds of the file that it was cut out of
    if end > length + _CUT_S:
        raise _no_part({"start": start, "end": end}, f"the file has {length:.6g} s", name)
    return start, min(end, length)


def cut(clip: Medium, part: Part | None) -> Medium:
    """A clip of which a part is read. Raises RowError, also where its header cannot be read."""
    if part is None:
        return clip
    try:
        samples, rate = audio_header(clip)
    except MediaError as error:
        raise RowError(error.reason, clip.name, AUDIO) from error
    return clip._replace(part=seconds_in(part, samples / rate, clip.name))
