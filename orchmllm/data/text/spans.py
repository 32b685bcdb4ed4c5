"""A conversation as it is encoded: what the template writes, the texts of the data, and media."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import Medium
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.plan.layout import AUDIO, VISION


class Text(NamedTuple):
    """learnt: whether it is supervised. of_data: whether it is the data's text, which cannot write
    special tokens, and not the template's."""

    text: str
    learnt: bool
    of_data: bool = False


Span = Text | Medium


def before(spans: Sequence[Span], medium: int) -> Sequence[Span]:
    """The spans before a medium, by its number."""
    at = [k for k, span in enumerate(spans) if isinstance(span, Medium)]
    return spans[: at[medium]] if medium < len(at) else spans


class Expanded(NamedTuple):
    """What the media of an example become. texts: in place of the placeholder of each; grids:
    (t, h, w) of the encoder's items of each: t tiles of h x w patches, or 1, 1 and the frames of a
    clip. An image and a clip are one item."""

    texts: tuple[str, ...]
    grids: tuple[tuple[tuple[int, int, int], ...], ...]


class Tokens(NamedTuple):
    """An example's sequence. ids (n,) int32, learnt (n,) bool; segments: (modality, lengths) in
    reading order. digest: of the text that has these ids, with what its media become, and of
    their grids; empty where the sequence was cut."""

    ids: np.ndarray
    learnt: np.ndarray
    segments: list[tuple[int, SegmentLengths]]
    digest: bytes = b""


# The type of a content part. A video is one for a model that has tokens for it.
PART = {VISION: "image", AUDIO: "audio", VIDEO: "video"}
