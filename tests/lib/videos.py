"""Videos and clips in containers, written with PyAV."""

from __future__ import annotations

import os
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np

SIZE = (112, 56)  # multiples of 28: no frame is resized
LATER = {"movflags": "frag_keyframe+empty_moov"}


def picture(k: int, size: tuple[int, int] = SIZE) -> np.ndarray:
    """(H, W, 3) uint8: brighter with k, and brighter at the top left."""
    width, height = size
    out = np.full((height, width, 3), 10 + 7 * (k % 25), np.uint8)
    out[: height // 2, : width // 2] += 60
    return out


def write_video(path: Path, codec: str = "libx264", count: int = 24, rate: int = 8, *,
                size: tuple[int, int] = SIZE, times: Sequence[int] | None = None, pixels="yuv420p",
                sound: str = "", turned: int = 0, mux: dict | None = None, options=None,
                frames: np.ndarray | None = None) -> Path:
    """frames: (count, H, W, 3) uint8, else `picture`. times: of each frame, in ms, instead of rate.
    sound: codec of 3 s at 48 kHz."""
    with av.open(str(path), "w", options=mux or {}) as out:
        stream = out.add_stream(codec, rate=rate, options=options or {})
        stream.width, stream.height = size
        stream.pix_fmt = pixels
        if times is not None:
            stream.codec_context.time_base = Fraction(1, 1000)
        audio = out.add_stream(sound, rate=48000, layout="stereo") if sound else None
        for k in range(count):
            frame = av.VideoFrame.from_ndarray(
                picture(k, size) if frames is None else frames[k], format="rgb24")
            if times is not None:
                frame.pts, frame.time_base = times[k], Fraction(1, 1000)
            out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
        if audio is not None:
            _encode_sound(out, audio, 48000, 3 * 48000, 2)
    if codec == "libsvtav1":  # as root it makes this thread a real-time one, and what that starts
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    if turned:
        turn(path, turned)
    return path


def turn(path: Path, degrees: int) -> None:
    """Writes into an MP4 that it is shown turned clockwise, as phones do."""
    data = bytearray(path.read_bytes())
    cos, sin = {90: (0, 1), 180: (-1, 0), 270: (0, -1)}[degrees]
    at = data.index(b"tkhd") + 4 + 4 + 36  # version and flags, then what is before the matrix
    for k, value in enumerate((cos, sin, 0, -sin, cos)):
        data[at + 4 * k: at + 4 * k + 4] = (value << 16).to_bytes(4, "big", signed=True)
    path.write_bytes(data)


def write_clip(path: Path, codec: str, rate: int = 44100, count: int = 100_003, channels: int = 1,
               mux: dict | None = None, container: str | None = None) -> Path:
    with av.open(str(path), "w", options=mux or {}, format=container) as out:
        layout = {1: "mono", 2: "stereo"}[channels]
        _encode_sound(out, out.add_stream(codec, rate=rate, layout=layout), rate, count, channels)
    return path


def _encode_sound(out, stream, rate: int, count: int, channels: int) -> None:
    tone = (8000 * np.sin(np.arange(count) / 20)).astype(np.int16)
    samples = np.repeat(tone[:, None], channels, axis=1).reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(samples, "s16", {1: "mono", 2: "stereo"}[channels])
    frame.sample_rate, frame.pts = rate, 0
    out.mux(stream.encode(frame))
    out.mux(stream.encode(None))


def uneven(count: int) -> list[int]:
    return np.cumsum(np.random.default_rng(0).integers(20, 400, count)).tolist()


# Name -> arguments of write_video.
VIDEOS: dict[str, dict] = {
    "plain.mp4": {}, "first.mp4": {"mux": {"movflags": "faststart"}}, "parts.mp4": {
        "mux": LATER, "options": {"g": "5"}},
    "groups.mp4": {"count": 60, "options": {"g": "10", "bf": "3"}},
    "open.mp4": {"count": 60, "options": {"g": "12", "bf": "3", "x264-params": "open-gop=1"}},
    "ntsc.mp4": {"rate": 30}, "one.mp4": {"count": 1}, "fast.mov": {"rate": 60, "count": 90},
    "mpeg4.mp4": {"codec": "mpeg4", "options": {"bf": "2"}}, "hevc.mp4": {
        "codec": "libx265", "options": {"x265-params": "log-level=none"}},
    "av1.mp4": {"codec": "libsvtav1", "size": (112, 84)}, "plain.mkv": {"sound": "aac"},
    "sound.mp4": {"sound": "aac"}, "vp9.webm": {"codec": "libvpx-vp9", "sound": "libopus"},
    "vp8.webm": {"codec": "libvpx", "count": 60, "options": {
        "auto-alt-ref": "1", "lag-in-frames": "16", "deadline": "good", "b": "40k"}},
    "browser.webm": {"codec": "libvpx-vp9", "mux": {"live": "1"}, "sound": "libopus"},
    "jpeg.mov": {"codec": "mjpeg", "pixels": "yuvj420p"}, "pro.mov": {
        "codec": "prores_ks", "pixels": "yuv422p10le"},
    "uneven.mp4": {"times": uneven(24)}, "uneven.mkv": {"times": uneven(24)},
    "slides.mp4": {"count": 14, "times": [*range(0, 2000, 200), *range(10000, 50000, 10000)]},
    "odd.mp4": {"codec": "mpeg4", "size": (101, 57)}, "odd.webm": {
        "codec": "libvpx-vp9", "size": (101, 57)},
    "plain.gif": {"codec": "gif", "pixels": "rgb8"},
    "turned.mp4": {"turned": 90}, "over.mp4": {"turned": 180}, "left.mp4": {"turned": 270},
}
# Name -> arguments of write_clip.
CLIPS: dict[str, dict] = {
    "aac.m4a": {"codec": "aac"}, "low.m4a": {"codec": "aac", "rate": 16000, "channels": 2},
    "parts.m4a": {"codec": "aac", "mux": LATER}, "adts.aac": {"codec": "aac", "container": "adts"},
    "alac.m4a": {"codec": "alac"}, "mp3.mp4": {"codec": "libmp3lame"},
    "opus.mp4": {"codec": "libopus", "rate": 48000}, "pcm.mov": {"codec": "pcm_s16le"},
    "opus.weba": {"codec": "libopus", "rate": 48000, "container": "webm"},
    "opus.webm": {"codec": "libopus", "rate": 48000, "channels": 2},
    "aac.mka": {"codec": "aac", "container": "matroska"},
    "mp3.mka": {"codec": "libmp3lame", "container": "matroska"},
}
