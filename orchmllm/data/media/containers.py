"""Videos and clips in containers (MP4, QuickTime, Matroska, WebM, GIF, AAC), read with PyAV.

This runs in a process of its own, see orchmllm.data.media.av_process: FFmpeg may crash, hang or
take all memory on damaged input. A file is always given as a file object with its demuxer named, so
nothing in it can make FFmpeg open another file or an address.

The number of frames is that of the sample table (MP4) or of the packets, which are counted without
decoding. Decoding counts again, and refuses a file where the two differ.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, NamedTuple

import numpy as np

MAX_VIDEO_PIXELS = 36_000_000  # of a frame: 8K
MAX_VIDEO_S = 4 * 3600
MAX_VIDEO_FRAMES = 1_000_000
# What people call them -> FFmpeg's decoders.
VIDEO_NAMES = {"H.264": ("h264",), "H.265": ("hevc",), "AV1": ("libdav1d", "av1"), "VP8": ("vp8",),
               "VP9": ("vp9",), "MPEG-4": ("mpeg4",), "MJPEG": ("mjpeg",), "ProRes": ("prores",),
               "GIF": ("gif",)}
AUDIO_NAMES = {"AAC": ("aac",), "Opus": ("opus",), "MP3": ("mp3float", "mp3"), "ALAC": ("alac",),
               "FLAC": ("flac",), "PCM": ("pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_f32le")}
_OPUS_MS = (10, 20, 40, 60) * 3 + (10, 20) * 2 + (2.5, 5, 10, 20) * 4  # by the first 5 bits
_REMUX = "write it anew without a loss (ffmpeg -i in -c copy out.mp4)"


class Refused(Exception):
    """A file that is not read; the text says why."""


class _Damaged(Exception):
    """A packet cannot be decoded whole."""


class VideoHeader(NamedTuple):
    """Size in pixels as displayed. num_frames: that decoding yields. duration_s: from the first
    frame to the end of the last. has_audio: whether there is an audio track."""

    width: int
    height: int
    num_frames: int
    duration_s: float
    has_audio: bool


@contextmanager
def _opened(file: BinaryIO, demuxer: str, kind: str):
    """(container, its first stream of `kind`: "video" or "audio")."""
    import av

    names = {"video": VIDEO_NAMES, "audio": AUDIO_NAMES}
    codecs = ",".join(c for table in names.values() for known in table.values() for c in known)
    try:
        with av.open(file, format=demuxer, options={"codec_whitelist": codecs}) as container:
            streams = [s for s in getattr(container.streams, kind)
                       if not s.disposition & av.stream.Disposition.attached_pic]
            if not streams:
                raise Refused(f"it has no {kind} track")
            context = streams[0].codec_context
            if context is None or not any(context.name in c for c in names[kind].values()):
                name = context.name if context else "unknown"
                raise Refused(f"its codec is {name}, or it is damaged or truncated; the codec must "
                              f"be one of {', '.join(names[kind])} "
                              "(ffmpeg -i in -c:v libx264 -c:a aac out.mp4)")
            context.thread_count = 1
            yield container, streams[0]
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise Refused(f"it cannot be read: {getattr(error, 'strerror', error)}") from error


def video_header(file: BinaryIO, demuxer: str, num_bytes: int) -> VideoHeader:
    """Lengths, with one frame decoded for its size and rotation. Raises Refused."""
    _check_whole(file, demuxer, num_bytes)
    with _opened(file, demuxer, "video") as (container, stream):
        _check_size(stream.width, stream.height)
        table = _sample_table(stream, demuxer, num_bytes)
        if table is None:
            times = sorted({pts for pts, _ in _packets(container, stream)})
            num_frames, duration = len(times), _span(times, stream)
        else:
            num_frames, duration = table
        has_audio = bool(container.streams.audio)
    if num_frames > MAX_VIDEO_FRAMES or not 0 <= duration <= MAX_VIDEO_S:
        raise Refused(f"{num_frames} frames, {duration:.6g} s: the limits are {MAX_VIDEO_FRAMES} "
                      f"frames and {MAX_VIDEO_S} s")
    file.seek(0)
    with _opened(file, demuxer, "video") as (container, stream):
        first = next(container.decode(stream), None)
        if first is None:
            raise Refused("no frame of it can be decoded")
        _check_size(first.width, first.height)
        size = first.width, first.height
        turned = getattr(first, "rotation", 0) % 180 != 0
    return VideoHeader(*(size[::-1] if turned else size), num_frames, duration, has_audio)


def _check_size(width: int, height: int) -> None:
    if not 0 < width * height <= MAX_VIDEO_PIXELS:
        raise Refused(f"{width}x{height} pixels: the limit is {MAX_VIDEO_PIXELS} a frame")


def _check_whole(file: BinaryIO, demuxer: str, num_bytes: int) -> None:
    """Raises Refused for a file that says itself that its end is missing."""
    file.seek(0)
    head = file.read(256)
    if demuxer == "matroska":
        at = head.find(b"\x18\x53\x80\x67")  # the segment, and the length of what follows
        if at >= 0 and len(head) > at + 12:
            length = 8 - head[at + 4].bit_length() + 1 if head[at + 4] else 0
            field = int.from_bytes(head[at + 4: at + 4 + length], "big") - (1 << 7 * length)
            unknown = field == (1 << 7 * length) - 1
            if length and not unknown and at + 4 + length + field > num_bytes:
                raise Refused(f"truncated: {num_bytes} of {at + 4 + length + field} bytes")
    elif demuxer == "mov":
        at, kinds = 0, set()
        while at + 8 <= num_bytes:  # boxes, each of which begins with its length
            file.seek(at)
            box = file.read(16)
            size = int.from_bytes(box[:4], "big")
            size = int.from_bytes(box[8:16], "big") if size == 1 else size or num_bytes - at
            kinds.add(box[4:8])
            at += max(size, 8)
        if at > num_bytes:
            raise Refused(f"truncated: {num_bytes} of {at} bytes")
        if b"moov" not in kinds:
            raise Refused("truncated: its index (moov) is missing, so the recording was not ended")
    elif demuxer == "gif":
        file.seek(max(0, num_bytes - 64))
        if not file.read().rstrip(b"\0\r\n").endswith(b";"):
            raise Refused("truncated: the mark at the end of a GIF is missing")
    file.seek(0)


def _sample_table(stream, demuxer: str, num_bytes: int) -> tuple[int, float] | None:
    """(frames, seconds) as the table of an MP4 tells them; None where it does not."""
    entries = getattr(stream, "index_entries", None) if demuxer == "mov" else None
    if not entries or not stream.frames == len(entries) or not stream.duration:
        return None
    end = max(e.pos + e.size for e in entries)
    if end > num_bytes:
        raise Refused(f"truncated: {num_bytes} of at least {end} bytes")
    return sum(not e.is_discard for e in entries), float(stream.duration * stream.time_base)


def _packets(container, stream) -> Iterator[tuple[int, bool]]:
    """(time, whether decoding can begin there) of each packet that becomes a frame."""
    count = 0
    vp8 = stream.codec_context.name == "vp8"
    for packet in container.demux(stream):
        if not packet.size or packet.is_discard or (vp8 and not bytes(packet)[0] & 16):
            continue  # the last kind is read, and never shown
        if packet.pts is None:
            raise Refused(f"a frame has no time; {_REMUX}")
        count += 1
        if count > MAX_VIDEO_FRAMES:
            raise Refused(f"more than the limit of {MAX_VIDEO_FRAMES} frames")
        yield packet.pts, packet.is_keyframe


def _span(times: list[int], stream) -> float:
    """Seconds of the frames, the last one as long as the mean of the others."""
    if not times:
        raise Refused("it has no frames")
    if len(times) == 1:
        return float(1 / stream.average_rate) if stream.average_rate else 0.0
    span = float((times[-1] - times[0]) * stream.time_base)
    return span * len(times) / (len(times) - 1)


def read_frames(file: BinaryIO, demuxer: str, seconds: list[float], num_frames: int,
                displayed: tuple[int, int], size: tuple[int, int]) -> list[np.ndarray]:
    """The frames that are seen at `seconds` after the first one, upright, resized to `size` =
    (width, height): (height, width, 3) uint8. num_frames, displayed: what the header said. Raises
    Refused where decoding yields something else."""
    with _opened(file, demuxer, "video") as (container, stream):
        packets = list(_packets(container, stream))
        base = stream.time_base
    times = sorted({pts for pts, _ in packets})
    if len(times) != num_frames:
        raise Refused(f"its header says {num_frames} frames, and it holds {len(times)}; {_REMUX}")
    at = np.searchsorted(np.array(times), [times[0] + float(s / base) for s in seconds],
                         side="right") - 1
    wanted = [times[k] for k in np.clip(at, 0, len(times) - 1)]
    asked, found = set(wanted), {}
    for needed in (_needed(packets, asked), [True] * len(packets)):
        file.seek(0)
        with suppress(_Damaged), _opened(file, demuxer, "video") as (container, stream):
            for frame in _decoded(container, stream, needed):
                if frame.pts in asked and frame.pts not in found:
                    found[frame.pts] = _picture(frame, displayed, size)
        if asked <= found.keys():
            return [found[pts] for pts in wanted]
    lost = next(s for s, pts in zip(seconds, wanted, strict=True) if pts not in found)
    raise Refused(f"damaged: the frame at {lost:.2f} s, or one that it rests on, cannot be decoded")


def _needed(packets: list[tuple[int, bool]], wanted: set[int]) -> list[bool]:
    """Which packets have to be decoded: the groups from one key frame to the next that hold a
    wanted frame, and the group before where it is shown before its key frame."""
    starts = [k for k, (_, key) in enumerate(packets) if key or k == 0]
    out = [False] * len(packets)
    for g, start in enumerate(starts):
        end = starts[g + 1] if g + 1 < len(starts) else len(packets)
        here = [pts for pts, _ in packets[start:end] if pts in wanted]
        if here:
            first = starts[max(0, g - 1)] if min(here) < packets[start][0] else start
            out[first:end] = [True] * (end - first)
    return out


def _decoded(container, stream, needed: list[bool]):
    """Frames of the packets that are needed."""
    k, before = 0, True
    vp8 = stream.codec_context.name == "vp8"
    for packet in container.demux(stream):
        counts = packet.size and not packet.is_discard and not (vp8 and not bytes(packet)[0] & 16)
        use = needed[min(k, len(needed) - 1)] if packet.size else before
        if before and not use:
            yield from _pictures(stream, None)
            stream.codec_context.flush_buffers()
        if use:
            yield from _pictures(stream, packet if packet.size else None)
        k, before = k + bool(counts), use


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


def _picture(frame, displayed: tuple[int, int], size: tuple[int, int]) -> np.ndarray:
    """A frame upright, over white where it is transparent, resized."""
    from PIL import Image

    alpha = any(c.is_alpha for c in frame.format.components) or frame.format.has_palette
    pixels = frame.to_ndarray(format="rgba" if alpha else "rgb24")
    image = Image.fromarray(pixels)
    if alpha:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image).convert("RGB")
    turns = getattr(frame, "rotation", 0) % 360  # degrees against the clock
    if turns % 90 == 0 and turns:
        image = image.rotate(turns, expand=True)
    if image.size != tuple(displayed):
        raise Refused("a frame has {}x{} pixels, and the first one has {}x{}; {}".format(
            *image.size, *displayed, "convert it to one size (ffmpeg -i in -c:v libx264 out.mp4)"))
    if image.size != tuple(size):
        image = image.resize(size, Image.Resampling.BICUBIC)
    return np.asarray(image)


def audio_header(file: BinaryIO, demuxer: str, num_bytes: int) -> tuple[int, int, int]:
    """(samples per channel, rate in Hz, channels) of the first audio track. Raises Refused."""
    _check_whole(file, demuxer, num_bytes)
    with _opened(file, demuxer, "audio") as (container, stream):
        context, total, first = stream.codec_context, 0, True
        for packet in container.demux(stream):
            if packet.size and not packet.is_discard:
                skipped = _skipped(packet)
                if first and not skipped and context.name == "opus":  # FFmpeg before version 8
                    skipped = int.from_bytes((context.extradata or b"")[10:12], "little")
                total, first = total + _num_samples(packet, stream) - skipped, False
        return total, context.sample_rate, context.channels


def _num_samples(packet, stream) -> int:
    """Samples per channel that a packet becomes, before some of them are skipped."""
    context, rate = stream.codec_context, stream.codec_context.sample_rate
    if context.name == "opus":
        data = bytes(packet)
        code = data[0] & 3
        count = 1 if code == 0 else 2 if code < 3 else data[1] & 63 if len(data) > 1 else 0
        return int(count * _OPUS_MS[data[0] >> 3] * 48)
    if context.frame_size:
        return context.frame_size
    exact = packet.duration and packet.duration * stream.time_base * rate
    if not exact or stream.time_base.denominator % rate:
        raise Refused(f"its container does not tell the samples of {context.name}; copy the sound "
                      "out without a loss (ffmpeg -i in -c:a copy out.ogg, .flac or .wav)")
    return int(exact)


def _skipped(packet) -> int:
    """Samples of it that are not heard: at the start what the encoder needs, at the end what fills
    its last packet."""
    if not packet.has_sidedata("skip_samples"):
        return 0
    data = bytes(packet.get_sidedata("skip_samples"))
    return int.from_bytes(data[:4], "little") + int.from_bytes(data[4:8], "little")


def read_audio(file: BinaryIO, demuxer: str) -> np.ndarray:
    """(samples, channels) float32 of the first audio track. Raises Refused."""
    import av

    with _opened(file, demuxer, "audio") as (container, stream):
        parts, resampler = [], av.AudioResampler(format="fltp")
        for frame in container.decode(stream):
            parts += [f.to_ndarray() for f in resampler.resample(frame)]
        parts += [f.to_ndarray() for f in resampler.resample(None)]
    if not parts:
        raise Refused("no sound of it can be decoded")
    return np.concatenate(parts, axis=1).T
