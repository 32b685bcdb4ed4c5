"""Media -> what a processor reads: pixels of images, samples of clips.

Decoding gives exactly as many of them as the header promised. Everything that
can be wrong with a medium is raised as MediaError, so that one bad file can be quarantined by its
caller.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import closing

import numpy as np
import torch
from torch import Tensor

from orchmllm.data.media.headers import open_clip, open_image
from orchmllm.data.media.medium import MediaError, Medium, reading
from orchmllm.plan.geometry import AudioGeometry

OnError = Callable[[int, MediaError], None] | None


def _to_rgb(image, name: str):
    """First frame as 8-bit RGB; transparency over white. name: of the file, for the MediaError."""
    from PIL import Image

    if image.mode == "F":
        raise MediaError(name, "its pixels are floating-point numbers of unknown range; "
                               "convert it to 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
        if image.format == "TIFF" and not image.tag_v2.get(262):  # its white is 0
            values = 255 - values
        return Image.fromarray(values.astype(np.uint8)).convert("RGB")
    if "A" in image.getbands() or "transparency" in image.info:
        rgba = image.convert("RGBA")
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, rgba).convert("RGB")
    return image if image.mode == "RGB" else image.convert("RGB")  # which copies it


def _upright(image, orientation: int):
    from PIL.Image import Transpose as T

    method = {
        2: T.FLIP_LEFT_RIGHT, 3: T.ROTATE_180, 4: T.FLIP_TOP_BOTTOM, 5: T.TRANSPOSE,
        6: T.ROTATE_270, 7: T.TRANSVERSE, 8: T.ROTATE_90,
    }.get(orientation)
    return image if method is None else image.transpose(method)


def upright_image(medium: Medium):
    """A decoded image as Pillow's, RGB and as displayed. Raises MediaError."""
    with open_image(medium) as (image, orientation):
        image.load()
        return _upright(_to_rgb(image, medium.name), orientation)


def decode_samples(medium: Medium, geometry: AudioGeometry) -> np.ndarray:
    """(n,) float32 mean over channels, resampled to geometry.sample_rate. Raises MediaError, also
    for NaN or infinite samples."""
    import soxr

    with open_clip(medium) as (num_samples, rate, read):
        resampler = soxr.ResampleStream(rate, geometry.sample_rate, 1, dtype="float32")
        mono = np.zeros(geometry.resampled(num_samples, rate), np.float32)
        done = at = 0
        with closing(read()) as blocks:
            for block in blocks:
                if not np.isfinite(block).all():
                    raise MediaError(medium.name, "NaN or infinite samples")
                done, part = done + len(block), block.mean(axis=1)
                if rate != geometry.sample_rate:
                    part = resampler.resample_chunk(part, last=done == num_samples)
                part = part[: len(mono) - at]  # the resampler may be a sample off
                mono[at: at + len(part)] = part
                at += len(part)
    if done != num_samples:
        raise MediaError(medium.name, f"truncated: {done} of {num_samples} samples")
    return mono


def stored_bytes(medium: Medium, picture: np.ndarray | MediaError | None) -> Tensor:
    """Of the file; of a frame of a video (H, W, 3) as a PPM file; of a part of a clip as a WAV
    file. Raises MediaError."""
    import soundfile

    if isinstance(picture, MediaError):
        raise picture
    if picture is not None:
        height, width, _ = picture.shape
        data = b"P6 %d %d 255\n" % (width, height) + picture.tobytes()
    elif medium.part is not None:
        with open_clip(medium) as (_, rate, read):
            file = io.BytesIO()
            soundfile.write(file, np.concatenate(list(read())), rate, "FLOAT", format="WAV")
            data = file.getvalue()
    else:
        with reading(medium) as file:
            data = file.read()
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))


def fail(segment: int, error: MediaError, on_error: OnError) -> None:
    """Tells `on_error` of a segment that failed; raises the error where there is nobody to tell."""
    error.segment = segment
    if on_error is None:
        raise error
    on_error(segment, error)
