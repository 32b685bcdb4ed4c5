"""Media headers: what planning needs, without decoding (about 35 times cheaper) and without torch.

A header fixes every length: decoding gives exactly the pixels and samples that it promises.
Limits on pixels, samples and expansion are checked here, so that nothing large is ever decoded.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import BinaryIO

import numpy as np

from orchmllm.data.media import av_process
from orchmllm.data.media.framing import JOIN, check_ogg, whole_mpeg
from orchmllm.data.media.kinds import AUDIO_FORMATS, CONVERT_AUDIO, IMAGE_FORMATS, container
from orchmllm.data.media.medium import (
    ZEROS_AT_END,
    MediaError,
    Medium,
    ends_in_zeros,
    reading,
)

MAX_IMAGE_PIXELS = 64_000_000  # 192 MB as RGB; below Pillow's own warning (89 MP)
MAX_ASPECT = 200  # of the sides; beyond it resizing to whole patches is no picture any more
MAX_SCANS = 100  # of a progressive JPEG; encoders write about 10
_SCAN = re.compile(rb"\xff\xda\x00(?:\x08\x01|\x0a\x02|\x0c\x03|\x0e\x04)")  # of 1 to 4 components
MAX_AUDIO_VALUES = 2**28  # samples x channels: 1 GiB as float32
MAX_AUDIO_S = 3600
BLOCK_SAMPLES = 1 << 20  # per channel that are decoded at a time
MIN_AUDIO_HZ = 1000  # resampling would turn a small file of a lower rate into a very long clip
MAX_EXPANSION = 400  # 16-bit bytes decoded per byte of file; speech in any codec stays below 100
EXPANSION_FROM_BYTES = 8 << 20  # decoded; below it a silent clip may compress as it likes
EXIF_ORIENTATION = 0x0112
# Sizes from here on mean "unknown" in WAV files written to a pipe.
WAV_STREAM_BYTES = 0x7FFF0000
# In libsndfile's report: the samples' chunk of WAV, AIFF and AU, the whole file of RF64 and W64.
_DATA_CHUNK = re.compile(r"^ *(?:data|SSND|Data Size|Riff size|riff) *: (\d+) \(should be (\d+)\)",
                         re.MULTILINE)


def image_header(medium: Medium) -> tuple[int, int]:
    """(width, height) in pixels as displayed, read from the file's header. Raises MediaError."""
    if medium.frame is not None:
        return medium.frame.video.width, medium.frame.video.height
    with open_image(medium) as (image, orientation):
        return image.size[::-1] if orientation >= 5 else image.size


@contextmanager
def open_image(medium: Medium) -> Iterator[tuple]:
    """(The lazily opened image, its EXIF orientation from 1 to 8), its size and its end checked.
    Raises MediaError, also for what decoding it raises."""
    from PIL import Image

    with reading(medium) as file, _lazily(file, medium.name) as image:
        width, height = image.size
        problem = ""
        if image.format in ("WEBP", "AVIF") and ends_in_zeros(file):  # other decoders notice it
            problem = ZEROS_AT_END
        if image.info.get("progressive"):  # each scan is decoded over the whole image
            file.seek(0)
            if (scans := len(_SCAN.findall(file.read()))) > MAX_SCANS:
                problem = f"{scans} scans: more than the limit of {MAX_SCANS}"
        if width * height > MAX_IMAGE_PIXELS:
            problem = f"more than the limit of {MAX_IMAGE_PIXELS} pixels"
        elif max(width, height) > MAX_ASPECT * min(width, height):
            problem = f"sides differ by more than the limit of {MAX_ASPECT} times"
        if problem:
            raise MediaError(medium.name, f"{width}x{height} pixels: {problem}")
        orientation = 1  # also of a TIFF, since Pillow turns it
        if image.format == "PNG" or image.format != "TIFF" and "exif" in image.info:
            # The base class's getexif: that of PNG would decode the pixels to look behind them.
            orientation = Image.Image.getexif(image).get(EXIF_ORIENTATION, 1)
        yield image, orientation if orientation in range(1, 9) else 1


def _lazily(file: BinaryIO, name: str):
    """Pillow's image of a file. Raises MediaError for one of which Pillow itself says that it is
    too large, and what Pillow raises."""
    from PIL import Image

    try:
        return Image.open(file, formats=IMAGE_FORMATS)
    except Image.DecompressionBombError as error:
        size = re.search(r"\d+ pixels", str(error))
        raise MediaError(name, f"{size[0] + ': ' if size else ''}more than the limit of "
                               f"{MAX_IMAGE_PIXELS} pixels") from error


def audio_header(medium: Medium) -> tuple[int, int]:
    """(samples per channel, rate in Hz), read from the file's header, or counted where the format
    has none. Raises MediaError."""
    with open_clip(medium) as (num_samples, rate, _):
        return num_samples, rate


@contextmanager
def open_clip(medium: Medium) -> Iterator[tuple[int, int, Callable[[], Iterator[np.ndarray]]]]:
    """(samples per channel, rate in Hz, a function that decodes them into blocks of (n, channels)
    float32), of the medium's part where it has one, the header checked. Raises MediaError, also for
    what the function raises."""
    with reading(medium) as file, ExitStack() as opened:
        demuxer, num_bytes = container(file.read(32)), file.seek(0, os.SEEK_END)
        if demuxer:
            frames, rate, channels = av_process.audio_header(medium, demuxer)
            first, count = _samples_of(medium, frames, rate)
            read = partial(_of_container, medium, demuxer, frames, first, count)
        else:
            sound = _open_sound(medium, file, num_bytes, opened)
            frames, rate, channels = sound.frames, sound.samplerate, sound.channels
            first, count = _samples_of(medium, frames, rate)
            read = partial(_of_file, sound, file, medium.name, first, count)
        _check_clip(medium.name, count, rate, channels, num_bytes, frames)
        yield count, rate, read


def _samples_of(medium: Medium, frames: int, rate: int) -> tuple[int, int]:
    """The first sample of a clip that is read, and how many are."""
    if medium.part is None:
        return 0, frames
    first, end = (min(frames, int(second * rate + 0.5)) for second in medium.part)
    return first, end - first


def _open_sound(medium: Medium, file: BinaryIO, num_bytes: int, opened: ExitStack):
    """libsndfile's reader of a clip, the framing of `file`, its bytes, checked. Raises
    MediaError."""
    from soundfile import SoundFile

    name, source = medium.name, medium.whole_file or opened.enter_context(reading(medium))
    sound = opened.enter_context(SoundFile(source))
    if sound.format not in AUDIO_FORMATS:
        raise MediaError(name, f"{sound.format_info} is not read; {CONVERT_AUDIO}")
    if (sound.format == "OGG" or "ALAC" in sound.subtype) and ends_in_zeros(file):
        raise MediaError(name, ZEROS_AT_END)
    # libsndfile silently shortens a clip whose data chunk runs past the end of the file.
    sizes = _DATA_CHUNK.search(sound.extra_info)
    if sizes and int(sizes[2]) < int(sizes[1]) < WAV_STREAM_BYTES:
        raise MediaError(name, f"truncated: {sizes[2]} of {sizes[1]} bytes of samples")
    if sound.format == "OGG":
        check_ogg(file, num_bytes, name)
    if sound.format == "MP3":
        data = whole_mpeg(file, sound.frames, name)
        if data is not None:
            return opened.enter_context(SoundFile(io.BytesIO(data)))
    return sound


def _of_container(medium: Medium, demuxer: str, frames: int, first: int, count: int
                  ) -> Iterator[np.ndarray]:
    """Decodes a clip in a container. Raises MediaError where it has other than `frames`."""
    at = 0
    with closing(av_process.audio_samples(medium, demuxer)) as blocks:
        for block in blocks:
            part = block[max(0, first - at): max(0, first + count - at)]
            at += len(block)
            if len(part):
                yield part
    if at != frames:
        raise MediaError(medium.name, f"truncated: {at} of {frames} samples")


def _of_file(sound, file: BinaryIO, name: str, first: int, count: int) -> Iterator[np.ndarray]:
    """Decodes a clip. Raises MediaError for a FLAC file that another one follows, of which only the
    first would be read (libsndfile refuses the same of WAV)."""
    if sound.format == "FLAC":
        _check_one_flac(file, name)
    sound.seek(0)  # as soundfile.read does: without it the last bits of an MP3 differ
    at = 0
    if sound.format != "MP3":  # its bits depend on what is decoded before
        at = sound.seek(first)
    while at < first + count:
        block = sound.read(min(BLOCK_SAMPLES, first + count - at), dtype="float32", always_2d=True)
        if not len(block):
            raise MediaError(name, f"truncated: {at} of {sound.frames} samples")
        at += len(block)
        yield block[max(0, len(block) - at + first):]


def _check_one_flac(file: BinaryIO, name: str) -> None:
    file.seek(0)
    head = file.read(8)
    heads = [head[:4] + bytes([last | head[4] & 127]) + head[5:] for last in (0, 128)]
    begin, kept = 8, b""
    while block := file.read(BLOCK_SAMPLES):
        data = kept + block
        at = max(map(data.find, heads))
        if at >= 0:
            raise MediaError(name, "several files in one: the second begins at byte "
                                   f"{begin - len(kept) + at}; {JOIN}")
        begin, kept = begin + len(block), data[-7:]


def _check_clip(name: str, frames: int, rate: int, channels: int, num_bytes: int, of_file: int
                ) -> None:
    """frames: that are read. of_file: that the file has."""
    if frames < 1 or rate < MIN_AUDIO_HZ:
        what = "the clip is empty" if frames < 1 else (
            f"less than {MIN_AUDIO_HZ} Hz is no sound; mend the rate in its header")
        raise MediaError(name, f"{frames} samples at {rate} Hz: {what}")
    size = f"{frames} samples of {channels} channels at {rate} Hz: "
    if frames > MAX_AUDIO_S * rate or frames * channels > MAX_AUDIO_VALUES:
        raise MediaError(
            name, size + f"more than the limit of {MAX_AUDIO_S} s or {MAX_AUDIO_VALUES} values")
    decoded = 2 * of_file * channels
    if decoded > EXPANSION_FROM_BYTES and decoded > MAX_EXPANSION * num_bytes:
        raise MediaError(name, size + f"a file of {num_bytes} bytes expands more than "
                               f"{MAX_EXPANSION} times")
