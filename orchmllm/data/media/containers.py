"""Containers (MP4, QuickTime, Matroska, WebM, GIF, AAC), read with PyAV, and the clips in them; the
frames are those of orchmllm.data.media.frames.

This runs in a process of its own, see orchmllm.data.media.av_process: FFmpeg may crash, hang or
take all memory on damaged input. A file is always given as a file object with its demuxer named, so
nothing in it can make FFmpeg open another file or an address.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import BinaryIO

import numpy as np

from orchmllm.data.media.medium import ZEROS_AT_END, ends_in_zeros

# What people call them -> FFmpeg's decoders.
VIDEO_NAMES = {"H.264": ("h264",), "H.265": ("hevc",), "AV1": ("libdav1d", "av1"), "VP8": ("vp8",),
               "VP9": ("vp9",), "MPEG-4": ("mpeg4",), "MJPEG": ("mjpeg",), "ProRes": ("prores",),
               "GIF": ("gif",)}
AUDIO_NAMES = {"AAC": ("aac",), "Opus": ("opus",), "MP3": ("mp3float", "mp3"), "ALAC": ("alac",),
               "FLAC": ("flac",), "PCM": ("pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_f32le")}
_OPUS_MS = (10, 20, 40, 60) * 3 + (10, 20) * 2 + (2.5, 5, 10, 20) * 4  # by the first 5 bits
FRAMES = 512  # of sound that are sent at a time; each has about 1,000 samples


class BadFile(Exception):
    """A file that is not read; the text says why."""


@contextmanager
def opened(file: BinaryIO, demuxer: str, kind: str):
    """(container, its first stream of `kind`: "video" or "audio"). Raises BadFile."""
    import av

    names = {"video": VIDEO_NAMES, "audio": AUDIO_NAMES}
    codecs = ",".join(c for table in names.values() for known in table.values() for c in known)
    try:
        with av.open(file, format=demuxer, options={"codec_whitelist": codecs}) as container:
            streams = [s for s in getattr(container.streams, kind)
                       if not s.disposition & av.stream.Disposition.attached_pic]
            if not streams:
                raise BadFile(f"it has no {kind} track")
            context = streams[0].codec_context
            if context is None or not any(context.name in c for c in names[kind].values()):
                name = context.name if context else "unknown"
                raise BadFile(f"its codec is {name}, or it is damaged or truncated; the codec must "
                              f"be one of {', '.join(names[kind])} "
                              "(ffmpeg -i in -c:v libx264 -c:a aac out.mp4)")
            context.thread_count = 1
            yield container, streams[0]
    except (av.FFmpegError, ValueError, EOFError) as error:
        raise BadFile(f"it cannot be read: {getattr(error, 'strerror', error)}") from error


def check_whole(file: BinaryIO, demuxer: str) -> None:
    """Raises BadFile for a file whose own structure shows that its end is missing."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    head = file.read(256)
    if demuxer == "matroska":
        at = head.find(b"\x18\x53\x80\x67")  # the segment, and the length of what follows
        if at >= 0 and len(head) > at + 12:
            length = 8 - head[at + 4].bit_length() + 1 if head[at + 4] else 0
            field = int.from_bytes(head[at + 4: at + 4 + length], "big") - (1 << 7 * length)
            unknown = field == (1 << 7 * length) - 1
            if length and not unknown and at + 4 + length + field > num_bytes:
                raise BadFile(f"truncated: {num_bytes} of {at + 4 + length + field} bytes")
        if ends_in_zeros(file):
            raise BadFile(ZEROS_AT_END)
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
            raise BadFile(f"truncated: {num_bytes} of {at} bytes")
        if b"moov" not in kinds:
            raise BadFile("truncated: its index (moov) is missing, so the recording was not ended")
        if bytes(4) in kinds:
            raise BadFile(ZEROS_AT_END)
    elif demuxer == "gif":
        file.seek(max(0, num_bytes - 64))
        if not file.read().rstrip(b"\0\r\n").endswith(b";"):
            raise BadFile("truncated: the mark at the end of a GIF is missing")
    file.seek(0)


def audio_header(file: BinaryIO, demuxer: str) -> tuple[int, int, int]:
    """(samples per channel, rate in Hz, channels) of the first audio track. Raises BadFile."""
    check_whole(file, demuxer)
    with opened(file, demuxer, "audio") as (container, stream):
        total = sum(_num_samples(packet, stream) - _skipped(packet)
                    for packet in container.demux(stream)
                    if packet.size and not packet.is_discard)
        return total, stream.codec_context.sample_rate, stream.codec_context.channels


def _num_samples(packet, stream) -> int:
    """Samples per channel that a packet becomes, before some of them are skipped."""
    context, rate = stream.codec_context, stream.codec_context.sample_rate
    if context.name == "opus":
        data = bytes(packet)
        if len(data) > 8 and not data.strip(b"\0"):
            raise BadFile(ZEROS_AT_END)
        code = data[0] & 3
        count = 1 if code == 0 else 2 if code < 3 else data[1] & 63 if len(data) > 1 else 0
        return int(count * _OPUS_MS[data[0] >> 3] * 48)
    if context.frame_size:
        return context.frame_size
    exact = packet.duration and packet.duration * stream.time_base * rate
    if not exact or stream.time_base.denominator % rate:
        raise BadFile(f"its container does not tell the samples of {context.name}; copy the sound "
                      "out without a loss (ffmpeg -i in -c:a copy out.ogg, .flac or .wav)")
    return int(exact)


def _skipped(packet) -> int:
    """Samples of it that are not heard: at the start what the encoder needs, at the end what fills
    its last packet."""
    if not packet.has_sidedata("skip_samples"):
        return 0
    data = bytes(packet.get_sidedata("skip_samples"))
    return int.from_bytes(data[:4], "little") + int.from_bytes(data[4:8], "little")


def read_audio(file: BinaryIO, demuxer: str) -> Iterator[np.ndarray]:
    """The first audio track in blocks of (samples, channels) float32. Raises BadFile."""
    import av

    with opened(file, demuxer, "audio") as (container, stream):
        parts, resampler = [], av.AudioResampler(format="fltp")
        for frame in chain(container.decode(stream), [None]):
            parts += [f.to_ndarray() for f in resampler.resample(frame)]
            if len(parts) >= FRAMES:
                yield np.concatenate(parts, axis=1).T
                parts = []
    if parts:
        yield np.concatenate(parts, axis=1).T
