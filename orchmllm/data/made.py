"""Images that a model makes: those of an assistant's turn that is learnt. In the text each is one
token, which is learnt, too; what is learnt of the image are its squares of pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from orchmllm.comm.pieces import Form, Piece
from orchmllm.data.formats.conversation import Conversation
from orchmllm.data.media.medium import Medium
from orchmllm.data.media.shapes import Size
from orchmllm.data.text.spans import Span, Text, Tokens
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import MADE, TEXT, VISION

SQUARES = "squares"  # the argument of the generator that holds images


class Made(NamedTuple):
    """token, id: what stands for an image; side: pixels of a square; max_pixels: of an image, which
    is made smaller."""

    token: str
    id: int
    side: int
    max_pixels: int

    @classmethod
    def of(cls, config: Any, tokenizer: Any) -> Made | None:
        """That of a model's configuration; None for one that makes no images."""
        if (given := getattr(config, "generator_config", None)) is None:
            return None
        token = int(given["token_id"])
        return cls(tokenizer.convert_ids_to_tokens(token), token, given["side"],
                   given["max_pixels"])

    def told(self, turns: Conversation) -> Conversation:
        """A conversation whose images are MADE that the model makes."""
        return tuple(turn if turn.role != "assistant" or not turn.supervised else turn._replace(
            parts=tuple(part._replace(modality=MADE) if isinstance(part, Medium)
                        and part.modality == VISION and part.sampled is None else part
                        for part in turn.parts)) for turn in turns)

    def written(self, spans: Sequence[Span]) -> list[Span]:
        """A rendered conversation with the token in place of these images."""
        return [Text(self.token, True) if isinstance(span, Medium) and span.modality == MADE
                else span for span in spans]

    def grid(self, size: Size) -> tuple[int, int]:
        """(rows, columns) of squares of an image."""
        shrink = min(1.0, math.sqrt(self.max_pixels / (size.height * size.width)))
        h, w = (max(1, int(n * shrink / self.side)) for n in size[:2])
        most = max(1, self.max_pixels // self.side**2)  # of a long one, which keeps no ratio
        return min(h, max(1, most // w)), min(w, max(1, most // h))

    def segment_lengths(self, width: int, height: int) -> SegmentLengths:
        """Of an image of so many pixels."""
        h, w = self.grid(Size(height, width))
        return SegmentLengths(h * w, h * w, 1, (1, h, w))

    def squares(self, image: Image.Image, grid: Sequence[int]) -> dict[str, Tensor]:
        """(h * w, 3 * side**2) uint8 of an image, the squares from left to right, row by row; their
        pixels likewise, with three colours each. grid: (h, w)."""
        (h, w), side = grid, self.side
        pixels = np.asarray(image.convert("RGB").resize((w * side, h * side),
                                                        Image.Resampling.LANCZOS))
        cut = pixels.reshape(h, side, w, side, 3).transpose(0, 2, 1, 3, 4)
        return {SQUARES: torch.from_numpy(cut.reshape(h * w, -1).copy())}

    def blank(self, squares: int = 1) -> dict[str, Tensor]:
        """So many black squares."""
        return {SQUARES: torch.zeros(squares, 3 * self.side**2, dtype=torch.uint8)}

    def counted(self, tokens: Tokens, sizes: Sequence[Size]) -> Tokens:
        """With segments for images of these sizes; those after the cut have none."""
        segments, start, images = [], 0, iter(sizes)
        for modality, lengths in tokens.segments:
            ids = tokens.ids[start: start + lengths.num_tokens]
            start += lengths.num_tokens
            if modality != TEXT:
                segments.append((modality, lengths))
                continue
            before = 0
            for at in np.flatnonzero(ids == self.id).tolist():
                height, width, *_ = next(images)
                segments += [(TEXT, text_lengths(at - before)),
                             (MADE, self.segment_lengths(width, height))]
                before = at + 1
            segments.append((TEXT, text_lengths(len(ids) - before)))
        return tokens._replace(segments=[one for one in segments if one[1].num_tokens])


def described(tensors: Mapping[str, Tensor]) -> Piece:
    """An image, (R, 3 * side**2) uint8 squares, as it moves between ranks."""
    squares = tensors[SQUARES]
    return Piece(SQUARES, np.ones((1, 0), np.int64),
                 (Form(squares.dtype, tuple(squares.shape)),), (squares,))
