"""Where items of a phase are, and where that makes moving them cheapest: their home.

Encoder phase: the sampling rank. LLM phase: the rank that holds most of the example's features
after encoding; OrchMLLM plans every phase from the sampling rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from orchmllm.plan.balance import core
from orchmllm.plan.layout import ENCODERS, TEXT, BatchLayout

TEXT_BYTES = 8  # an int32 token id and an int32 label

# Where the bytes of a phase's items are: (rank, item, bytes), each (m,), of m pieces of items.
Pieces = tuple[np.ndarray, np.ndarray, np.ndarray]


def segment_bytes(layout: BatchLayout, feature_bytes: int) -> np.ndarray:
    """(s,) bytes of each segment in the LLM's input."""
    return layout.num_tokens * np.where(layout.modality == TEXT, TEXT_BYTES, feature_bytes)


def example_pieces(
    layout: BatchLayout, encode: Mapping[str, np.ndarray] | None, feature_bytes: int
) -> Pieces:
    """Where each example's LLM input is: features on encoder ranks (without `encode`: all on the
    sampling rank), text on the sampling rank. encode: modality -> (segments,) encoder ranks."""
    rank = layout.rank_of_example[layout.example_of_segment]
    for phase, rank_of in (encode or {}).items():
        rank[layout.segments[ENCODERS[phase]]] = rank_of
    return rank, layout.example_of_segment, segment_bytes(layout, feature_bytes)


def example_bytes(layout: BatchLayout, feature_bytes: int) -> np.ndarray:
    """(n,) bytes of an example's LLM input: text-only examples are by far the cheapest to move."""
    return layout.sum_segments(segment_bytes(layout, feature_bytes))


def feature_home(
    layout: BatchLayout, encode: Mapping[str, np.ndarray], feature_bytes: int
) -> np.ndarray:
    """(n,) rank from which each example's LLM input is cheapest: the one that holds most of its
    feature bytes; ties go to the sampling rank, then to the lowest. Text-only: the sampling rank.
    """
    media = layout.modality != TEXT
    rank, example, num_bytes = [x[media] for x in example_pieces(layout, encode, feature_bytes)]
    return core().heaviest_holder(example, rank, num_bytes, layout.rank_of_example)
