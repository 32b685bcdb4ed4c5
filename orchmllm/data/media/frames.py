"""The frames of videos in containers, read with PyAV, in the process of
orchmllm.data.media.av_process.

The number of frames is that of the sample table (MP4) or of the packets, which are counted without
decoding. Decoding counts again, and refuses a file where the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import BinaryIO

import numpy as np

from orchmllm.data.media.containers import BadFile, check_whole, opened
from orchmllm.data.media.medium import VideoHeader

MAX_VIDEO_PIXELS = 36_000_000  # of a frame: 8K
MAX_VIDEO_S = 4 * 3600
MAX_VIDEO_FRAMES = 1_000_000
ROUNDED = 2  # units of time between frames that are even
_REMUX = "write it anew without a loss (ffmpeg -i in -c copy out.mp4)"


class _Damaged(Exception):
    """A packet cannot be decoded whole."""


def video_header(file: BinaryIO, demuxer: str) -> VideoHeader:
    """Lengths, with one frame decoded for its size and rotation. Raises BadFile."""
    check_whole(file, demuxer)
    with opened(file, demuxer, "video") as (container, stream):
        _check_size(stream.width, stream.height)
        table = _sample_table(container, stream, demuxer)
        if table is None:
            packets = list(_packets(container, stream))
            times, num_groups = sorted({pts for pts, _ in packets}), sum(key for _, key in packets)
            num_frames, duration = len(times), _span(times, stream)
        else:
            num_frames, duration, num_groups = table
        has_audio = bool(container.streams.audio)
    if num_frames > MAX_VIDEO_FRAMES or not 0 <= duration <= MAX_VIDEO_S:
        raise BadFile(f"{num_frames} frames, {duration:.6g} s: the limits are {MAX_VIDEO_FRAMES} "
                      f"frames and {MAX_VIDEO_S} s")
    file.seek(0)
    with opened(file, demuxer, "video") as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise BadFile("no frame of it can be decoded")
        _check_size(first.width, first.height)
        size = first.width, first.height
        turned = getattr(first, "rotation", 0) % 180 != 0
    return VideoHeader(*(size[::-1] if turned else size), num_frames, duration, has_audio,
                       max(num_groups, 1))


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_VIDEO_PIXELS:
        raise BadFile(f"{width}x{height} pixels: the limit is {MAX_VIDEO_PIXELS} a frame")


def _sample_table(container, stream, demuxer: str) -> tuple[int, float, int] | None:
    """(frames, seconds, key frames) as the table of an MP4 tells them; None where it does not. Its
    seconds are those of decoding, so they may end before frames that are shown in another order."""
    entries = getattr(stream, "index_entries", None) if demuxer == "mov" else None
    if not entries or not stream.frames == len(entries) or not stream.duration:
        return None
    at, skipped, is_key = np.array([(e.timestamp, e.is_discard, e.is_keyframe)
                                    for e in entries]).T
    if len(at) > 1 and np.ptp(np.diff(at)) > ROUNDED:  # the packets from the last key frame on
        container.seek(int(at[skipped == 0].max(initial=0)), stream=stream)
        last = max((pts for pts, _ in _packets(container, stream)), default=0)
        if last - (stream.start_time or 0) >= stream.duration:
            container.seek(int(at[0]), stream=stream)
            return None
    return int((skipped == 0).sum()), float(stream.duration * stream.time_base), int(is_key.sum())


def _packets(container, stream) -> Iterator[tuple[int, bool]]:
    """(time, whether decoding can begin there) of each packet that becomes a frame."""
    for packet in container.demux(stream):
        if not _is_shown(packet, stream):
            continue
        if packet.pts is None:
            raise BadFile(f"a frame has no time; {_REMUX}")
        yield packet.pts, packet.is_keyframe


def _is_shown(packet, stream) -> bool:
    """Whether a packet becomes a frame: one kind of VP8 is decoded, and never shown."""
    return bool(packet.size) and not packet.is_discard and (
        stream.codec_context.name != "vp8" or bool(bytes(packet)[0] & 16))


def _span(times: list[int], stream) -> float:
    """Seconds of the frames, the last one as long as the mean of the others."""
    if not times:
        raise BadFile("it has no frames")
    if len(times) == 1:
        return float(1 / stream.average_rate) if stream.average_rate else 0.0
    span = float((times[-1] - times[0]) * stream.time_base)
    return span * len(times) / (len(times) - 1)


def read_frames(file: BinaryIO, demuxer: str, seconds: list[float], header: Sequence
                ) -> list[np.ndarray]:
    """The frames that are seen at `seconds` after the first one, upright: (height, width, 3) uint8.
    header: the fields of the VideoHeader. Raises BadFile where decoding yields something else."""
    width, height, num_frames, *_ = header
    with opened(file, demuxer, "video") as (container, stream):
        packets = list(_packets(container, stream))
        base = stream.time_base
    times = sorted({pts for pts, _ in packets})
    if len(times) != num_frames:
        raise BadFile(f"its header says {num_frames} frames, and it holds {len(times)}; {_REMUX}")
    at = np.searchsorted(np.array(times), [times[0] + float(s / base) for s in seconds],
                         side="right") - 1
    wanted = [times[k] for k in np.clip(at, 0, len(times) - 1)]
    asked, found = set(wanted), {}
    for needed in (_needed(packets, asked), [True] * len(packets)):
        file.seek(0)
        with suppress(_Damaged), opened(file, demuxer, "video") as (container, stream):
            for frame in _decoded(container, stream, needed):
                if frame.pts in asked and frame.pts not in found:
                    found[frame.pts] = _picture(frame, (width, height))
        if asked <= found.keys():
            return [found[pts] for pts in wanted]
    lost = next(s for s, pts in zip(seconds, wanted, strict=True) if pts not in found)
    raise BadFile(f"damaged: the frame at {lost:.2f} s, or one that it rests on, cannot be decoded")


def _needed(packets: list[tuple[int, bool]], wanted: set[int]) -> list[bool]:
    """Which packets have to be decoded: those from the last key frame to a wanted frame, and the
    group before where it is shown before its key frame. A frame rests on none that comes later."""
    starts = [k for k, (_, key) in enumerate(packets) if key or k == 0]
    out = [False] * len(packets)
    for g, start in enumerate(starts):
        end = starts[g + 1] if g + 1 < len(starts) else len(packets)
        here = [k for k in range(start, end) if packets[k][0] in wanted]
        if here:
            shown = min(packets[k][0] for k in here)
            first = starts[max(0, g - 1)] if shown < packets[start][0] else start
            out[first: here[-1] + 1] = [True] * (here[-1] + 1 - first)
    return out


def _decoded(container, stream, needed: list[bool]):
    """Frames of the packets that are needed."""
    k, before = 0, True
    for packet in container.demux(stream):
        use = needed[min(k, len(needed) - 1)] if packet.size else before
        if before and not use:
            yield from _pictures(stream, None)
            stream.codec_context.flush_buffers()
        if use:
            yield from _pictures(stream, packet if packet.size else None)
        k, before = k + _is_shown(packet, stream), use


def _pictures(stream, packet) -> list:
    """What a packet becomes (None: the end). Raises _Damaged, also for pictures that the decoder
    patched up."""
    import av

    try:
        frames = stream.codec_context.decode(packet)
    except EOFError:
        return []
    except av.FFmpegError as error:
        raise _Damaged from error
    if any(f.is_corrupt for f in frames):
        raise _Damaged
    return frames


def _picture(frame, displayed: tuple[int, int]) -> np.ndarray:
    """A frame upright, over white where it is transparent."""
    from PIL import Image

    alpha = any(c.is_alpha for c in frame.format.components) or frame.format.has_palette
    pixels = frame.to_ndarray(format="rgba" if alpha else "rgb24")
    turns = getattr(frame, "rotation", 0) % 360  # degrees against the clock
    if not (alpha or turns) and (frame.width, frame.height) == displayed:
        return pixels
    image = Image.fromarray(pixels)
    del pixels  # a frame may have 100 MB
    if alpha:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    if turns % 90 == 0 and turns:
        image = image.rotate(turns, expand=True)
    if image.size != displayed:
        raise BadFile("a frame has {}x{} pixels, and the first one has {}x{}; {}".format(
            *image.size, *displayed, "convert it to one size (ffmpeg -i in -c:v libx264 out.mp4)"))
    return np.asarray(image)
