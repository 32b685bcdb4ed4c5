"""Media headers: what planning needs, without decoding (about 35 times cheaper) and without torch.

A header fixes every length: decoding produces exactly the rows that `segment_lengths` promised.
Limits on pixels, samples and expansion are checked here, so that nothing large is ever decoded.
"""

from __future__ import annotations

import io
import os
import re
from functools import lru_cache
from importlib import import_module

import numpy as np

from orchmllm.data.media import av_process
from orchmllm.data.media.framing import check_joined, check_ogg, mpeg_samples
from orchmllm.data.media.kinds import AUDIO_FORMATS, CONVERT_AUDIO, IMAGE_FORMATS, container
from orchmllm.data.media.medium import (
    ZEROS_AT_END,
    MediaError,
    Medium,
    MediumSource,
    binary,
    ends_in_zeros,
    medium_of,
    reading,
)
from orchmllm.plan.geometry import AudioGeometry, SegmentLengths

MAX_IMAGE_PIXELS = 64_000_000  # 192 MB as RGB; below Pillow's own warning (89 MP)
MAX_ASPECT = 200  # of the sides; beyond it resizing to whole patches is no picture any more
MAX_AUDIO_VALUES = 2**28  # samples x channels: 1 GiB as float32
MAX_AUDIO_S = 3600
MIN_AUDIO_HZ = 1000  # resampling would turn a small file of a lower rate into a very long clip
MAX_EXPANSION = 400  # 16-bit bytes decoded per byte of file; speech in any codec stays below 100
EXPANSION_FROM_BYTES = 8 << 20  # decoded; below it a silent clip may compress as it likes
EXIF_ORIENTATION = 0x0112
# Sizes from here on mean "unknown" in WAV files written to a pipe.
WAV_STREAM_BYTES = 0x7FFF0000
# In libsndfile's report: the samples' chunk of WAV, AIFF and AU, the whole file of RF64 and W64.
_DATA_CHUNK = re.compile(r"^ *(?:data|SSND|Data Size|Riff size|riff) *: (\d+) \(should be (\d+)\)",
                         re.MULTILINE)

_PLUGINS = {"WEBP": "WebP", "JPEG2000": "Jpeg2K"}  # the others are spelt like Bmp


@lru_cache(maxsize=1)
def _pillow():
    """Pillow with the readers of IMAGE_FORMATS only (others would be imported on a bad file)."""
    from PIL import Image

    for reader in IMAGE_FORMATS:
        import_module(f"PIL.{_PLUGINS.get(reader, reader.title())}ImagePlugin")
    return Image


def open_image(name: str, file):
    """The lazily opened image, its size and its end checked. Raises MediaError."""
    image = _pillow().open(file, formats=IMAGE_FORMATS)
    width, height = image.size
    problem = ""
    if image.format in ("WEBP", "AVIF"):  # the other decoders notice that an end is missing
        with binary(file) as opened:
            problem = ZEROS_AT_END if ends_in_zeros(opened) else ""
    if width * height > MAX_IMAGE_PIXELS:
        problem = f"more than the limit of {MAX_IMAGE_PIXELS} pixels"
    elif max(width, height) > MAX_ASPECT * min(width, height):
        problem = f"sides differ by more than the limit of {MAX_ASPECT} times"
    if problem:
        image.close()
        raise MediaError(name, f"{width}x{height} pixels: {problem}")
    return image


def orientation(image) -> int:
    """EXIF orientation, 1 to 8. The base class's getexif: that of PNG would decode the pixels to
    look for a chunk after them."""
    if "exif" not in image.info and image.format not in ("PNG", "TIFF"):
        return 1
    value = _pillow().Image.getexif(image).get(EXIF_ORIENTATION, 1)
    return value if value in range(1, 9) else 1


def image_header(source: MediumSource) -> tuple[int, int]:
    """(width, height) in pixels as displayed, read from the file's header. Raises MediaError."""
    medium = medium_of(source)
    if medium.frame is not None:
        return medium.frame.width, medium.frame.height
    with reading(medium) as file, open_image(medium.name, file) as image:
        # Releases of Pillow differ in whether the size of a TIFF is that of the upright image.
        size = (image.tag_v2[256], image.tag_v2[257]) if image.format == "TIFF" else image.size
        return size[::-1] if orientation(image) >= 5 else size


def audio_header(source: MediumSource) -> tuple[int, int]:
    """(samples per channel, rate in Hz), read from the file's header, or counted where the format
    has none. Raises MediaError."""
    return audio_clip(medium_of(source))[:2]


def audio_clip(
    medium: Medium, *, thorough: bool = False
) -> tuple[int, int, bytes | None, str]:
    """(samples per channel; rate in Hz; what has to be decoded in place of the file, or None: the
    file itself; FFmpeg's demuxer of a container, or "": libsndfile reads it). thorough: reads the
    whole file to make sure that it holds nothing else. Raises MediaError."""
    import soundfile

    name, data = medium.name, None
    with reading(medium) as file, binary(file) as opened:
        demuxer, num_bytes = container(opened.read(32)), opened.seek(0, os.SEEK_END)
        opened.seek(0)
        if demuxer:
            frames, rate, channels = av_process.audio_header(medium, demuxer)
            _check_clip(name, frames, rate, channels, num_bytes)
            return frames, rate, None, demuxer
        info = soundfile.info(file, verbose=True)
        frames = info.frames
        if info.format not in AUDIO_FORMATS:
            raise MediaError(name, f"{info.format_info} is not read; {CONVERT_AUDIO}")
        if (info.format == "OGG" or "ALAC" in info.subtype) and ends_in_zeros(opened):
            raise MediaError(name, ZEROS_AT_END)
        if info.format == "MP3":
            frames, data = mpeg_samples(opened, num_bytes, frames, name, trust=not thorough)
        elif info.format == "OGG":
            check_ogg(opened, num_bytes, name)
        elif thorough:
            check_joined(opened, name)
    _check_clip(name, frames, info.samplerate, info.channels, num_bytes)
    # libsndfile silently shortens a clip whose data chunk runs past the end of the file.
    sizes = _DATA_CHUNK.search(info.extra_info)
    if sizes and int(sizes[2]) < int(sizes[1]) < WAV_STREAM_BYTES:
        raise MediaError(name, f"truncated: {sizes[2]} of {sizes[1]} bytes of samples")
    return frames, info.samplerate, data, ""


def _check_clip(name: str, frames: int, rate: int, channels: int, num_bytes: int) -> None:
    if frames < 1 or rate < MIN_AUDIO_HZ:
        what = "the clip is empty" if frames < 1 else (
            f"less than {MIN_AUDIO_HZ} Hz is no sound; mend the rate in its header")
        raise MediaError(name, f"{frames} samples at {rate} Hz: {what}")
    size = f"{frames} samples of {channels} channels at {rate} Hz: "
    if frames > MAX_AUDIO_S * rate or frames * channels > MAX_AUDIO_VALUES:
        raise MediaError(
            name, size + f"more than the limit of {MAX_AUDIO_S} s or {MAX_AUDIO_VALUES} values")
    decoded = 2 * frames * channels
    if decoded > EXPANSION_FROM_BYTES and decoded > MAX_EXPANSION * num_bytes:
        raise MediaError(name, size + f"a file of {num_bytes} bytes expands more than "
                               f"{MAX_EXPANSION} times")


def audio_samples(medium: Medium) -> tuple[np.ndarray, int]:
    """((n, channels) float32, rate in Hz) of a clip that was read whole. Raises MediaError."""
    import soundfile

    num_samples, rate, data, demuxer = audio_clip(medium, thorough=True)
    if demuxer:
        samples = av_process.audio_samples(medium, demuxer)
    else:
        with reading(medium) as file:
            samples, _ = soundfile.read(file if data is None else io.BytesIO(data),
                                        dtype="float32", always_2d=True)
    if len(samples) != num_samples:
        raise MediaError(medium.name,
                         f"truncated: {len(samples)} of {num_samples} samples")
    return samples, rate


def audio_lengths(
    medium: Medium, num_samples: int, sample_rate: int, geometry: AudioGeometry
) -> SegmentLengths:
    """Lengths of a clip. Raises MediaError for one that is longer than the encoder's window."""
    try:
        return geometry.segment_lengths(num_samples, sample_rate)
    except ValueError as error:
        raise MediaError(medium.name, str(error)) from error
