"""From an example's text to token ids and labels of its whole sequence."""

from __future__ import annotations

import numpy as np

from orchmllm.batch import IGNORE_INDEX
from orchmllm.plan.layout import TEXT, BatchLayout


def token_ids_and_labels(
    layout: BatchLayout, text_ids: np.ndarray, supervised: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(L,) int32 token ids, 0 at media positions; (L,) int32 labels: the token at t + 1 where that
    is learnt, else IGNORE_INDEX. layout: of one example; text_ids (T,) int32, supervised (T,) bool:
    of its text."""
    is_text = np.repeat(layout.modality == TEXT, layout.num_tokens)
    tokens = np.zeros(len(is_text), np.int32)
    tokens[is_text] = text_ids
    labels = np.full(len(tokens) + 1, IGNORE_INDEX, np.int32)  # of the position before each token
    labels[:-1][is_text] = np.where(supervised, text_ids, IGNORE_INDEX)
    return tokens, labels[1:]
