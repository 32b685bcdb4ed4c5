"""From the pieces of an example's text to token ids and labels of its whole sequence."""

from __future__ import annotations

import numpy as np

from orchmllm.batch import IGNORE_INDEX
from orchmllm.data.tokenizer import Piece
from orchmllm.plan.layout import TEXT, ExampleLayout


def text_sequence(
    layout: ExampleLayout, pieces: list[Piece]
) -> tuple[np.ndarray, np.ndarray]:
    """(L,) int32 token ids, 0 at media positions, and (L,) bool supervised."""
    tokens = np.zeros(int(layout.num_tokens.sum()), np.int32)
    supervised = np.zeros(len(tokens), bool)
    ends = np.cumsum(layout.num_tokens)
    for piece, start, end in zip(pieces, ends - layout.num_tokens, ends, strict=True):
        if piece.modality == TEXT:
            tokens[start:end] = piece.token_ids
            supervised[start:end] = piece.supervised
    return tokens, supervised


def padded_counts(counts: np.ndarray, size: int) -> list[int]:
    """Media that were cut off do not fit, whatever their length."""
    return [*counts.tolist(), *[1 << 30] * (size - len(counts))][:size]


def shifted_labels(tokens: np.ndarray, supervised: np.ndarray) -> np.ndarray:
    """(L,) int32: labels[t] is the token at t + 1 where that is learnt, else IGNORE_INDEX."""
    labels = np.full(len(tokens), IGNORE_INDEX, np.int32)
    labels[:-1] = np.where(supervised[1:], tokens[1:], IGNORE_INDEX)
    return labels

