"""How a medium becomes rows, positions and tokens: its lengths, from its header alone.

Objective: lengths that are known before anything is decoded, so that a step can be planned by them.

Invariants: `segment_lengths` is the one method per modality that turns a media header into lengths.
A medium that decodes to other than `rows` is refused, and the encoder asserts that it produces
exactly `num_tokens`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class SegmentLengths(NamedTuple):
    """Lengths of one segment.

    rows: rows that travel to the encoder (image patches; mel frames; 0 for text).
    attn_len: positions the encoder's attention sees (patches; frames after the convolutions).
    num_tokens: LLM positions it becomes after the connector.
    grid: (t, h, w); (1, h, w) patches for an image, (1, 1, rows) for audio, (0, 0, 0) for text.
    """

    rows: int
    attn_len: int
    num_tokens: int
    grid: tuple[int, int, int]


def text_lengths(num_tokens: int) -> SegmentLengths:
    """Of a segment of text."""
    return SegmentLengths(0, 0, num_tokens, (0, 0, 0))


@dataclass(frozen=True)
class VisionGeometry:
    """How an image becomes patches and tokens (OrchMLLM section 8, "Input preprocessing").

    patch_size: pixels per patch side. merge_size: the connector merges merge_size x merge_size
    patches into one token (1: no downsampling). max_side: pixels; larger images are resized."""

    patch_size: int = 14
    merge_size: int = 2
    max_side: int = 448

    @property
    def row_size(self) -> int:
        """Values per patch: RGB pixels."""
        return 3 * self.patch_size**2

    def resized(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) in pixels to which the image is resized: multiples of
        patch_size * merge_size, at least one unit a side, the long side at most max_side."""
        unit = self.patch_size * self.merge_size
        scale = min(1.0, self.max_side / max(width, height))
        limit = max(1, self.max_side // unit)
        width = min(limit, max(1, int(width * scale / unit + 0.5)))
        height = min(limit, max(1, int(height * scale / unit + 0.5)))
        return width * unit, height * unit

    def segment_lengths(self, width: int, height: int) -> SegmentLengths:
        """Of an image of so many pixels as displayed, i.e. after the EXIF orientation. Raises
        ValueError for an empty one."""
        if width < 1 or height < 1:
            raise ValueError(f"image size {width}x{height}: both must be >= 1 pixel")
        width, height = self.resized(width, height)
        h, w = height // self.patch_size, width // self.patch_size
        return SegmentLengths(h * w, h * w, h * w // self.merge_size**2, (1, h, w))


@dataclass(frozen=True)
class AudioGeometry:
    """How a clip becomes log-mel frames, encoder positions and tokens (Whisper's front end).

    sample_rate: Hz after resampling. hop_length: samples per frame. num_mels: values per frame.
    stack: the connector joins `stack` encoder positions into one token (the last group of a clip is
    filled with zeros)."""

    sample_rate: int = 16000
    hop_length: int = 160
    num_mels: int = 80
    stack: int = 2

    def resampled(self, num_samples: int, sample_rate: int) -> int:
        """Samples after resampling from `sample_rate` Hz to that of the geometry, rounded up."""
        return -(-num_samples * self.sample_rate // sample_rate)

    def segment_lengths(self, num_samples: int, sample_rate: int) -> SegmentLengths:
        """Of a clip of num_samples a channel at sample_rate Hz. Raises ValueError for an empty
        one."""
        if num_samples < 1 or sample_rate < 1:
            raise ValueError(
                f"audio of {num_samples} samples at {sample_rate} Hz: both must be >= 1")
        frames = -(-self.resampled(num_samples, sample_rate) // self.hop_length)
        positions = (frames + 1) // 2  # after Whisper's stride-2 convolution (kernel 3, padding 1)
        return SegmentLengths(frames, positions, -(-positions // self.stack), (1, 1, frames))

