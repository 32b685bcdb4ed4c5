"""The framing of MPEG and Ogg audio, where libsndfile takes the length of a clip on trust.

Without a Xing or Info frame libsndfile estimates the length of an MP3 from its size, and reads no
further than that; of several streams in one file it reads the first. So frames are counted here,
and a file that holds more than its header says is refused by name.
"""

from __future__ import annotations

import io
import struct
from functools import lru_cache
from typing import BinaryIO, NamedTuple

from orchmllm.data.media.medium import ZEROS_AT_END, MediaError, ends_in_zeros

_KBPS = {  # of layer III and a bitrate index from 1, by whether the MPEG version is 1
    True: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    False: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
JOIN = "split it, or join its parts by decoding them (ffmpeg -i in -c:a flac out.flac)"


class _Frame(NamedTuple):
    """num_bytes and num_samples of an MP3 frame; side: offset of a Xing tag in it."""

    rate: int
    mono: bool
    num_bytes: int
    num_samples: int
    side: int


@lru_cache(maxsize=4096)
def _frame(header: bytes) -> _Frame | None:
    """What a frame's 4 bytes say; None if they are no header of layer III, or leave the bitrate
    open."""
    if len(header) < 4:
        return None
    bits = int.from_bytes(header, "big")
    version, layer_3 = bits >> 19 & 3, bits >> 17 & 3 == 1
    bitrate, rate = bits >> 12 & 15, bits >> 10 & 3
    if bits >> 21 != 0x7FF or version == 1 or not layer_3 or bitrate in (0, 15) or rate == 3:
        return None
    first, mono = version == 3, bits >> 6 & 3 == 3
    hertz, bps = _RATES[version][rate], 1000 * _KBPS[first][bitrate - 1]
    samples = 1152 if first else 576
    size = samples // 8 * bps // hertz + (bits >> 9 & 1)
    side = 4 + ((17 if mono else 32) if first else (9 if mono else 17))
    return _Frame(hertz, mono, size, samples, side)


def _tag(frame: bytes, side: int) -> bytes:
    """The Xing, Info or VBRI tag that a first frame holds instead of sound, or nothing."""
    at = next((at for at, names in ((side, (b"Xing", b"Info")), (side + 2, (b"Xing", b"Info")),
                                    (36, (b"VBRI",))) if frame[at: at + 4] in names), None)
    return b"" if at is None else frame[at:]


def _after_id3(file: BinaryIO) -> int:
    """Position after the ID3v2 tags at the start."""
    at = 0
    while True:
        file.seek(at)
        head = file.read(10)
        if head[:3] != b"ID3" or len(head) < 10:
            return at
        size = sum((byte & 127) << shift for byte, shift in zip(head[6:], (21, 14, 7, 0),
                                                                strict=True))
        at += 20 + size if head[5] & 16 else 10 + size


def _first(data: bytes, at: int) -> int:
    """Position of the first frame from `at` that another one of its kind follows, -1: none."""
    while (at := data.find(b"\xff", at)) >= 0:
        frame = _frame(data[at: at + 4])
        after = frame and _frame(data[at + frame.num_bytes: at + frame.num_bytes + 4])
        if after and after[:2] == frame[:2]:
            return at
        at += 1
    return -1


def whole_mpeg(file: BinaryIO, estimate: int, name: str) -> bytes | None:
    """What a decoder has to be given instead of an MP3 file to get all of its sound, or None: the
    file itself. estimate: samples per channel as libsndfile says. All frames are counted.

    Raises MediaError where the frames are not those that the file's tag announces, or are not one
    stream."""
    start = _after_id3(file)
    file.seek(start)
    data = file.read()
    first = _first(data, 0)
    if first < 0:
        raise MediaError(name, "no MP3 frames (MPEG layer III) of a known bitrate; convert it to "
                               "FLAC (ffmpeg -i in -c:a flac out.flac)")
    frame = kind = _frame(data[first: first + 4])
    tag = _tag(data[first: first + frame.num_bytes], frame.side)
    begin = at = first + frame.num_bytes if tag else first
    count = 0
    while (frame := _frame(data[at: at + 4])) is not None and frame[:2] == kind[:2]:
        if at + frame.num_bytes > len(data):
            raise MediaError(name, f"truncated: the last MPEG frame has {len(data) - at} of "
                                   f"{frame.num_bytes} bytes")
        if data[at + frame.side: at + frame.side + 4] in (b"Xing", b"Info"):
            break
        count, at = count + 1, at + frame.num_bytes
    if frame is not None or _first(data, at) >= 0:
        raise MediaError(name, f"several MPEG streams in one file, or damage: the first ends after "
                               f"{count} frames at byte {start + at}; {JOIN}")
    if tag[:4] in (b"Xing", b"Info") and len(tag) >= 12 and tag[7] & 1:
        declared = int.from_bytes(tag[8:12], "big")
        if declared != count:
            how = "truncated" if count < declared else "joined, or its tag is wrong"
            raise MediaError(name, f"{how}: {count} MPEG frames where its {tag[:4].decode()} tag "
                                   f"says {declared}; {JOIN}")
        return None
    if ends_in_zeros(io.BytesIO(data), at):
        raise MediaError(name, ZEROS_AT_END)
    if count * kind.num_samples == estimate:
        return None
    return _info_frame(data[begin: begin + 4], kind, count) + data[begin:at]


def _info_frame(header: bytes, kind: _Frame, count: int) -> bytes:
    """A frame without sound that tells a decoder how many follow."""
    bits = int.from_bytes(header, "big") & ~0xF200 | 0x1E000  # 14th bitrate, no padding, no CRC
    header = bits.to_bytes(4, "big")
    tag = b"Info" + struct.pack(">II", 1, count)
    return (header + bytes(kind.side - 4) + tag).ljust(_frame(header).num_bytes, b"\0")


def check_ogg(file: BinaryIO, num_bytes: int, name: str) -> None:
    """Raises MediaError for an Ogg file that holds streams one after the other (only the first
    would be read), that ends within a page, or whose last page does not end its stream."""
    at, sound, ended = 0, False, 0
    while at < num_bytes:
        file.seek(at)
        head = file.read(27 + 255)
        if head[:4] != b"OggS" or len(head) < 27:
            break  # damage, or what is no part of the sound
        begins, ended = head[5] & 2, head[5] & 4
        if begins and sound:
            raise MediaError(name, f"several Ogg streams one after the other, the second from byte "
                                   f"{at}; {JOIN}")
        sound = sound or not begins
        at += 27 + head[26] + sum(head[27: 27 + head[26]])
    if at > num_bytes:
        raise MediaError(name, f"truncated: the last Ogg page ends {at - num_bytes} bytes behind "
                               "the file")
    if not ended:
        raise MediaError(name, "truncated or damaged: the last Ogg page does not "
                               "end its stream; fetch it again, or mark the end of a whole one "
                               "(ffmpeg -c copy)")
