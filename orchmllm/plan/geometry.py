"""The lengths of a medium: rows, positions and tokens.

Objective: lengths that are known from a medium's header alone, before anything is decoded, so that
a step can be planned by them.

Invariants: the processor of the model says what a header becomes (orchmllm.data.processed). A
medium that decodes to other than `rows` is refused, and so is an encoder that makes other than
`num_tokens` rows of features.
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
class AudioGeometry:
    """sample_rate: Hz after resampling. hop_length: samples per frame."""

    sample_rate: int = 16000
    hop_length: int = 160

    def resampled(self, num_samples: int, sample_rate: int) -> int:
        """Samples after resampling from `sample_rate` Hz to that of the geometry, rounded up."""
        return -(-num_samples * self.sample_rate // sample_rate)
