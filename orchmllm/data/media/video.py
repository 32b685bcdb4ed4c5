"""A video as the vision encoder's items: each frame that is chosen is one, as an image is.

Which frames are chosen follows from the header alone. A frame is a Medium that says where in its
video it is; those of one video that are decoded together are decoded in one pass.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from orchmllm.data.media import av_process
from orchmllm.data.media.kinds import VIDEO, container, listed, refusal
from orchmllm.data.media.medium import (
    Frame,
    MediaError,
    Medium,
    Part,
    RowError,
    Sampled,
    VideoHeader,
    VideoSampling,
    reading,
)
from orchmllm.data.media.parts import cut, seconds_in
from orchmllm.plan.layout import AUDIO, VISION


def expand(medium: Medium, sampling: VideoSampling, options: Mapping, part: Part | None = None
           ) -> list[Medium]:
    """The frames of a video, or its part, that are read, and its sound if that is asked for.
    options: keys of a row's content part that go before `sampling`: fps, nframes, max_frames,
    timestamps (seconds from the start of what is read). Raises RowError."""
    try:
        with reading(medium) as file:
            head = file.read(32)
        demuxer = container(head)
        if demuxer in ("", "aac"):
            raise ValueError(refusal(head) or (
                f"no video that is read: its first bytes are {head[:8]!r}; a video is "
                f"{listed(VIDEO)}, or a list of images"))
        header = av_process.video_header(medium, demuxer)
        span = part and seconds_in(part, header.duration_s, medium.name)
        begin, end = span or (0.0, header.duration_s)
        seconds = chosen(header, sampling, options, end - begin)
    except RowError:
        raise
    except (MediaError, ValueError) as error:
        raise RowError(getattr(error, "reason", str(error)), medium.name, VISION) from error
    out = as_video([medium._replace(modality=VISION, frame=Frame(begin + second, header, demuxer))
                   for second in seconds], seconds, end - begin)
    if sampling.audio and header.has_audio:
        out.append(cut(medium._replace(modality=AUDIO), span and Part(*span)))
    return out


def as_video(frames: Sequence[Medium], seconds: Sequence[float], length_s: float) -> list[Medium]:
    """The frames of one video, of which each says what it is of. seconds: of each, after the start
    of the length_s that are read."""
    seconds, length_s = tuple(seconds), max(length_s, 1e-3)
    return [frame._replace(sampled=Sampled(k, seconds, length_s))
            for k, frame in enumerate(frames)]


def images_as_video(frames: Sequence[Medium], sampling: VideoSampling, options: Mapping
                   ) -> list[Medium]:
    """A video that is given as its frames, of which `fps` follow each other in a second: the
    content part's, or those that `sampling` reads of files. Raises RowError."""
    try:
        fps = number_of(options, "fps", 0) or sampling.fps
    except ValueError as error:
        raise RowError(str(error)) from error
    return as_video(frames, [k / fps for k in range(len(frames))], len(frames) / fps)


def number_of(options: Mapping, key: str, default: float, kind=(int, float)) -> float:
    """Raises ValueError."""
    value = options.get(key, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value <= 1e6:
        raise ValueError(f"{key} of a video is {value!r:.80}: must be a number from 0 to 1e6")
    return value


def chosen(header: VideoHeader, sampling: VideoSampling, options: Mapping,
           length_s: float | None = None) -> list[float]:
    """Seconds after the start of what is read, which has length_s (None: all of it), at which a
    frame is read: each in the middle of an equal part of it, or as `timestamps` say. Raises
    ValueError."""
    length_s = header.duration_s if length_s is None else length_s
    most = min(sampling.max_frames,
               number_of(options, "max_frames", sampling.max_frames, int)) or 1
    times = options.get("timestamps")
    if times is not None:
        if not isinstance(times, list) or not 0 < len(times) <= most:
            raise ValueError(f"timestamps of a video are {times!r:.80}: must be a list of 1 to "
                             f"{most} seconds (video_max_frames)")
        for t in times:
            if isinstance(t, bool) or not isinstance(t, int | float) or not (
                    0 <= t < max(length_s, 1e-3)):
                raise ValueError(f"a timestamp of a video is {t!r:.80}: must be from 0 to below "
                                 f"its {length_s:.6g} s")
        return [float(t) for t in times]
    wanted = number_of(options, "nframes", 0 if options.get("fps") else sampling.frames, int) or (
        length_s * number_of(options, "fps", sampling.fps))
    there = int(header.num_frames * length_s / max(header.duration_s, 1e-3)) + 1
    count = max(1, min(int(wanted + 0.5), most, header.num_frames, there))
    return [(k + 0.5) * length_s / count for k in range(count)]


def pictures(media: Collection[Medium]) -> dict[Medium, np.ndarray | MediaError]:
    """The frames among `media`, (H, W, 3) uint8 in the video's own size. Of a video that cannot be
    decoded the first one is the reason, and the others are black: it is one file that failed."""
    out: dict[Medium, np.ndarray | MediaError] = {}
    videos: dict[Medium, list[Medium]] = {}
    for medium in media:
        if medium.frame is not None:
            videos.setdefault(medium._replace(frame=None, sampled=None), []).append(medium)
    for video, wanted in videos.items():
        header, seconds = wanted[0].frame.video, [m.frame.second for m in wanted]
        try:
            out |= zip(wanted, av_process.frames(video, wanted[0].frame.demuxer, seconds, header),
                       strict=True)
        except MediaError as error:
            black = np.zeros((header.height, header.width, 3), np.uint8)
            out |= dict.fromkeys(wanted, black)
            out[wanted[0]] = error
    return out
