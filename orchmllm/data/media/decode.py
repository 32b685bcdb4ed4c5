"""Media -> rows (what the encoders read): patches of images, log-mel frames of clips.

Decoding produces exactly the rows that `segment_lengths` promised from the header. Everything that
can be wrong with a medium is raised as MediaError, so that one bad file can be quarantined by its
caller.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import closing
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from orchmllm.data.media.headers import (
    audio_lengths,
    open_clip,
    open_image,
)
from orchmllm.data.media.medium import MediaError, Medium, reading
from orchmllm.plan.geometry import AudioGeometry, VisionGeometry
from orchmllm.plan.layout import AUDIO, VISION

MEL_FRAMES = 4096
OnError = Callable[[int, MediaError], None] | None


def _to_rgb(image):
    """First frame as 8-bit RGB; transparency over white."""
    from PIL import Image

    if image.mode == "F":
        raise MediaError("", "its pixels are floating-point numbers of unknown range; "
                             "convert it to 8 bits")
    if image.mode == "I" or image.mode.startswith("I;16"):
        values = np.clip(np.asarray(image).astype(np.int64), 0, 65535) >> 8
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


def patchify(pixels: np.ndarray, geometry: VisionGeometry) -> Tensor:
    """(H, W, 3), of the size that `geometry` resizes to -> (h * w, 3 * patch_size^2),
    h = H / patch_size, w = W / patch_size.

    Order: the merge_size x merge_size neighbourhoods in raster order, and inside each its patches
    in raster order, so that the connector merges consecutive rows. A row is (channel, y, x).
    """
    p, m = geometry.patch_size, geometry.merge_size
    height, width, _ = pixels.shape
    blocks = pixels.reshape(height // (p * m), m, p, width // (p * m), m, p, 3)
    # (h/m, m, p, w/m, m, p, 3) -> (h/m, w/m, m, m, 3, p, p)
    rows = blocks.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * p * p)
    return torch.from_numpy(np.ascontiguousarray(rows))


def decode_image(medium: Medium, geometry: VisionGeometry) -> Tensor:
    """(rows, 3 * patch_size^2) uint8 patches in the order of `patchify`, upright, RGB, resized
    (bicubic) to `geometry.resized`. Raises MediaError."""
    from PIL import Image

    upright = upright_image(medium)
    size = geometry.resized(*upright.size)
    if size != upright.size:
        upright = upright.resize(size, Image.Resampling.BICUBIC)
    return patchify(np.asarray(upright), geometry)


def upright_image(medium: Medium):
    """A decoded image as Pillow's, RGB and as displayed. Raises MediaError."""
    with open_image(medium) as (image, orientation):
        image.load()
        return _upright(_to_rgb(image), orientation)


@lru_cache(maxsize=8)
def _mel_extractor(geometry: AudioGeometry):
    from transformers import WhisperFeatureExtractor

    return WhisperFeatureExtractor(
        feature_size=geometry.num_mels, sampling_rate=geometry.sample_rate,
        hop_length=geometry.hop_length,
    )


def log_mel(samples: np.ndarray, geometry: AudioGeometry) -> np.ndarray:
    """(n,) float32 mono samples at geometry.sample_rate -> (ceil(n / hop), num_mels) float32:
    the first frames of what Whisper's front end gives for the clip padded with zeros to any
    length. Three hops of zeros are enough: no window (400 samples) that reaches into the clip
    meets the reflection at the end, so neither those frames nor the maximum depend on it.
    With geometry.window_frames (all of them): just what it gives for the padded clip. Frames are
    computed MEL_FRAMES at a time, so that a long clip takes little more memory than its result."""
    hop, extractor = geometry.hop_length, _mel_extractor(geometry)
    size, filters = extractor.n_fft, torch.from_numpy(extractor.mel_filters).float().T
    frames = geometry.window_frames or -(-len(samples) // hop)
    total = frames if geometry.window_frames else frames + 3
    window, half = torch.hann_window(size), size // 2
    out = np.empty((total, geometry.num_mels), np.float32)
    for first in range(0, total, MEL_FRAMES):
        last = min(first + MEL_FRAMES, total)
        piece = _reflected(samples, first * hop - half, (last - 1) * hop + half, total * hop)
        spectrum = torch.stft(torch.from_numpy(piece), size, hop, window=window, center=False,
                              return_complex=True)
        mels = filters @ spectrum.abs() ** 2  # (num_mels, last - first)
        out[first:last] = mels.clamp(min=1e-10).log10().T.numpy()
    np.maximum(out, out.max() - np.float32(8), out=out)
    out += np.float32(4)
    out /= np.float32(4)
    return out[:frames]


def _reflected(samples: np.ndarray, first: int, end: int, length: int) -> np.ndarray:
    """Samples first to end, of a clip that is filled with zeros to `length` and reflected at both
    ends."""
    at = np.abs(np.arange(first, end))
    at = np.where(at < length, at, 2 * (length - 1) - at)
    piece = samples.take(at, mode="clip")
    piece[at >= len(samples)] = 0
    return piece


def decode_audio(medium: Medium, geometry: AudioGeometry) -> Tensor:
    """(rows, num_mels) float32 log-mel frames of what `decode_samples` gives. Raises MediaError."""
    return torch.from_numpy(log_mel(decode_samples(medium, geometry), geometry))


def decode_samples(medium: Medium, geometry: AudioGeometry) -> np.ndarray:
    """(n,) float32 mean over channels, resampled to geometry.sample_rate. Raises MediaError, also
    for NaN or infinite samples."""
    import soxr

    with open_clip(medium) as (num_samples, rate, read):
        audio_lengths(medium, num_samples, rate, geometry)  # refuses one beyond the window
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


class SegmentReader:
    """vision, audio: as the model has them."""

    def __init__(self, vision: VisionGeometry, audio: AudioGeometry) -> None:
        self.vision, self.audio = vision, audio

    def __call__(
        self, medium: Medium | MediaError, modality: int, rows: int, segment: int,
        on_error: OnError, *, encoded: bool = False,
        picture: np.ndarray | MediaError | None = None,
    ) -> Tensor:
        """(rows, values) of a medium, or, encoded, its bytes (n,) uint8. medium, picture (the frame
        of a video): an error is one that was met before. A medium that fails raises MediaError with
        `segment` set; with `on_error`, it is called with (segment, error) instead, and the rows are
        zeros (there are no bytes)."""
        try:
            if isinstance(medium, MediaError):
                raise medium
            if encoded:
                return stored_bytes(medium, picture)
            if isinstance(picture, MediaError):
                raise picture
            decoded = (patchify(picture, self.vision) if picture is not None
                       else decode_image(medium, self.vision) if modality == VISION
                       else decode_audio(medium, self.audio))
            if len(decoded) == rows:
                return decoded
            raise MediaError(medium.name, f"decoded to {len(decoded)} rows where {rows} were "
                             "planned: the file has changed since its header was read; "
                             "orchmllm data lint reads all headers of an index again")
        except MediaError as error:
            error.modality = modality
            fail(segment, error, on_error)
        if encoded:
            return torch.zeros(0, dtype=torch.uint8)
        if modality == AUDIO:
            return torch.zeros(rows, self.audio.row_size)
        return torch.zeros(rows, self.vision.row_size, dtype=torch.uint8)


def stored_bytes(medium: Medium, picture: np.ndarray | MediaError | None) -> Tensor:
    """Of the file; of a frame of a video (H, W, 3) as a PPM file, as it is cut into patches; of a
    part of a clip as a WAV file. Raises MediaError."""
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
