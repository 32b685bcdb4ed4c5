"""From the pieces of an example's text to token ids and labels of its whole sequence."""

from __future__ import annotations

import numpy as np

from orchmllm.batch import IGNORE_INDEX
from orchmllm.data.tokenizer import Piece
from orchmllm.plan.layout import TEXT, ExampleLayout


def token_ids_and_labels(
    layout: ExampleLayout, pieces: list[Piece]
) -> tuple[np.ndarray, np.ndarray]:
    """(L,) int32 token ids, 0 at media positions; (L,) int32 labels: the token at t + 1 where that
    is learnt, else IGNORE_INDEX."""
    tokens = np.zeros(int(layout.num_tokens.sum()), np.int32)
    labels = np.full(len(tokens) + 1, IGNORE_INDEX, np.int32)  # of the position before each token
    end = 0
    for piece, count in zip(pieces, layout.num_tokens.tolist(), strict=True):
        start, end = end, end + count
        if piece.modality == TEXT:
            tokens[start:end] = piece.token_ids
            labels[start:end] = np.where(piece.supervised, piece.token_ids, IGNORE_INDEX)
    return tokens, labels[1:]
