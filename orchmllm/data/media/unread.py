"""Keys of rows that would change what is learnt, and that are not read: a row with one of them is
refused, unless its value changes nothing."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orchmllm.data.media.headers import audio_header
from orchmllm.data.media.medium import MediaError, Medium, RowError
from orchmllm.plan.layout import AUDIO

_START = ("start", "start_time", "start_s", "begin", "begin_time", "offset")
_END = ("end", "end_time", "end_s")
_CUT_S = 0.2  # by which a clip that has been cut out may differ from the part that its row names
_ONE_TEXT = ('one text is learnt of a row with a medium; write the question and the answer as '
             '"conversations", or leave both out if that text is meant')
_SIZE = "pictures are resized by model.vision.max_side alone; leave it out"
# key -> (the rows in which it counts: True with turns, False without, None all; whether its value
# changes what is learnt, given all text of the row; what helps)
ROW_KEYS = {
    "label": (True, lambda value, text: value is False,
              "the answer is marked as a bad one; leave the row out"),
    "objects": (True, lambda value, text: value and re.search("<(bbox|ref-object)>", text),
                "write the names and boxes into the text in place of <ref-object> and <bbox>"),
    "system_prompt": (None, lambda value, text: str(value).strip() not in text,
                      'call it "system", in a row with turns'),
    **dict.fromkeys(("question", "answer", "answers"),
                    (False, lambda value, text: bool(value), _ONE_TEXT)),
    **dict.fromkeys(("resized_height", "resized_width"), (None, lambda value, text: True, _SIZE)),
}


def refuse_unread(row: Mapping, has_turns: bool, text: str = "") -> None:
    """Raises RowError if a row, or a part of a turn, has one of ROW_KEYS. text: all of its text."""
    for key, (where, matters, cure) in ROW_KEYS.items():
        value = row.get(key)
        if value is not None and where in (None, has_turns) and matters(value, text):
            raise RowError(f'"{key}" is {value!r:.80}, and is not read: {cure}')


def refuse_part(keys: Mapping, media: Sequence[Medium]) -> None:
    """Raises RowError if `keys`, of a row or a medium, name a part of the media, which are read
    whole. A start of 0 alone, a duration alone, and times of a clip that has been cut out already
    change nothing."""
    found = [next(((k, keys[k]) for k in names if keys.get(k) is not None), ("", None))
             for names in (_START, _END, ("duration",))]
    start, end, duration = (value for _, value in found)
    if not media or end is None and (not start if duration is None else start is None):
        return
    try:
        if all(m.modality == AUDIO and _is_cut(m, start, end, duration) for m in media):
            return
    except MediaError:
        return  # where lengths are read, it is raised again
    except (TypeError, ValueError):
        pass  # no numbers
    told = ", ".join(f'"{key}" is {value!r:.40}' for key, value in found if key)
    raise RowError(f"{told}, but a medium is read whole; cut the part out (ffmpeg -i in -ss START "
                   "-to END out.flac), or leave the keys out if that has been done", media[0].name)


def _is_cut(clip: Medium, start: object, end: object, duration: object) -> bool:
    """Whether a clip is as long as the part (given in seconds or milliseconds), or ends before the
    part starts. Raises MediaError for its header, TypeError and ValueError."""
    samples, rate = audio_header(clip)
    if end is None and duration is None:
        return float(start) >= samples / rate
    part = float(duration) if end is None else float(end) - float(start or 0)
    return min(abs(samples / rate - part / unit) for unit in (1, 1000)) <= _CUT_S
