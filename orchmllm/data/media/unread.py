"""Keys of rows, of content parts and of media that are not read: what has one of them is refused,
unless its value changes nothing of what is learnt."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from orchmllm.data.media.headers import audio_header
from orchmllm.data.media.medium import MediaError, Medium, RowError
from orchmllm.plan.layout import AUDIO

_START = ("start", "start_time", "start_s", "begin", "begin_time", "offset")
_END = ("end", "end_time", "end_s")
_CUT_S = 0.2  # by which a clip that has been cut out may differ from the part that its row names
UNREAD = {  # key -> (whether its value changes what is learnt beside the row's text, what helps)
    "label": (lambda value, text: value is False,
              "the answer is marked as a bad one; leave the row out"),
    "objects": (lambda value, text: value and re.search("<(bbox|ref-object)>", text),
                "write the names and boxes into the text in place of <ref-object> and <bbox>"),
    "system_prompt": (lambda value, text: str(value).strip() not in text,
                      'call it "system", in a row with turns'),
    **dict.fromkeys(
        ("resized_height", "resized_width", "video_start", "video_end", "min_frames"),  # of Qwen
        (lambda value, text: True, "pictures have the size that model.vision.max_side says, and "
         "frames are chosen by timestamps (a list of seconds), fps, nframes or max_frames")),
}


def refuse_unread(keys: Mapping, media: Sequence[Medium], text: str = "") -> None:
    """Raises RowError if `keys` has one of UNREAD, or names a part of `media`, which are read
    whole. A start of 0 alone, a duration alone, and times of a clip that has been cut out already
    change nothing. text: all that a row says."""
    for key, (matters, cure) in UNREAD.items():
        if (value := keys.get(key)) is not None and matters(value, text):
            raise RowError(f'"{key}" is {value!r:.80}, and is not read: {cure}')
    told = {k: keys[k] for k in (*_START, *_END, "duration") if keys.get(k) is not None}
    if told.keys() <= {"duration"} or list(told.values()) == [0]:
        return
    try:
        if all(m.modality == AUDIO and _is_cut(m, told) for m in media):
            return
    except MediaError:
        return  # where lengths are read, it is raised again
    except (TypeError, ValueError):
        pass  # they are no numbers
    raise RowError(f"{str(told)[1:-1]:.200}: a medium is read whole; cut the part out (ffmpeg "
                   "-i in -ss START -to END out.flac), or leave the keys out if that was done",
                   media[0].name)


def _is_cut(clip: Medium, told: Mapping) -> bool:
    """Whether a clip is as long as the part (given in seconds or milliseconds), or ends before the
    part starts. Raises MediaError for its header, TypeError and ValueError."""
    samples, rate = audio_header(clip)
    start, end = (next((float(told[k]) for k in names if k in told), None)
                  for names in (_START, _END))
    part = told.get("duration") if end is None else end - (start or 0)
    if part is None:
        return start >= samples / rate
    return min(abs(samples / rate - float(part) / unit) for unit in (1, 1000)) <= _CUT_S
