"""What a part of a model of transformers computes and keeps, as orchmllm.models.counting counts it:
the types of what was counted, and how many pairs of positions attend to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from orchmllm.models.flops import Lengths

ARRAYS = ("item", "row", "position", "moved")  # of PartCounts


class Attention(NamedTuple):
    """Which positions of an item attend to each other. kind: `all`; those of a `frame` of a grid;
    those of a `square` of `size` x `size` positions of it, or of a `run` of `size`; `causal`, each
    with those before it, `size` with its own at most (0: all); those of a `tile` of `size`, all of
    which are alike, so that a position has as many in each item; `crossed`, each to all rows."""

    kind: str
    size: int = 0


class BlockCounts(NamedTuple):
    """Bytes of a block of transformers for a position. none, selective, full: what it keeps by each
    choice of checkpointing; largest: the largest tensor of these; moved: what operators but
    products read and write until all of it is there. repeated: share of the products' FLOP until
    then."""

    none: float
    selective: float
    full: float
    largest: float
    moved: float
    repeated: float


@dataclass(frozen=True)
class PartCounts:
    """What a part computes and keeps.

    FLOP, (3,) float64 each: of the forward pass, of the backward pass, and what activation
    checkpointing repeats. item, row, position: of products, of an item beside those of its rows
    (frames of sound, the LLM's targets, or states that an image is made from) and of its
    positions. attention: of a pair of positions.
    Bytes: moved, (2, 3), see moved_by; blocks, in their order; kept_row, kept_position: what is
    kept around them; kept_behind: of a position, what of it comes after them; row_bytes: of a patch
    or a frame that moves. Numbers: width, in a position of the blocks; outputs, in a token for the
    LLM or in a row of its logits; row_values, in a patch or frame for the encoder; attended, in the
    keys and values of a position in a layer of the LLM."""

    item: np.ndarray
    row: np.ndarray
    position: np.ndarray
    attention: Mapping[Attention, np.ndarray]
    moved: np.ndarray
    blocks: Sequence[BlockCounts]
    kept_row: float
    kept_position: float
    kept_behind: float
    width: int
    outputs: int
    row_bytes: int = 0
    row_values: int = 0
    attended: int = 0

    def as_json(self) -> dict:
        arrays = {name: getattr(self, name).tolist() for name in ARRAYS}
        attention = [[*kind, flop.tolist()] for kind, flop in self.attention.items()]
        return {**vars(self), **arrays, "attention": attention}

    @classmethod
    def from_json(cls, found: dict) -> PartCounts:
        arrays = {name: np.array(found[name]) for name in ARRAYS}
        attention = {Attention(kind, size): np.array(flop)
                     for kind, size, flop in found["attention"]}
        return cls(**{**found, **arrays, "attention": attention,
                      "blocks": [BlockCounts(*block) for block in found["blocks"]]})


def pairs(attention: Attention, lengths: Lengths) -> np.ndarray:
    """(n,) pairs of positions that attend to each other."""
    if lengths.before is not None:  # as of what ends with the piece, less what was before
        ends, before = (replace(lengths, positions=n, before=None) for n in (
            lengths.before + lengths.positions, lengths.before))
        return pairs(attention, ends) - pairs(attention, before)
    n, size = lengths.positions.astype(float), attention.size
    match attention.kind:
        case "crossed":
            return n * lengths.rows
        case "tile":
            return n * np.minimum(n, size)
        case "causal":
            seen = np.minimum(n, size or np.inf)
            return seen * (2 * n - seen + 1) / 2
        case "run":
            return _pieces(n, size)
        case "frame" | "square" if lengths.grid is not None:
            t, h, w = lengths.grid.T.astype(float)
            return t * (_pieces(h, size or np.inf) * _pieces(w, size or np.inf))
        case "square":
            return _pieces(n, size * size)
    return n * n


def _pieces(n: np.ndarray, size: float) -> np.ndarray:
    """Pairs inside of pieces of so many positions, of which the last one may be shorter."""
    whole = n // size
    return whole * np.minimum(size, n)**2 + (n - whole * np.minimum(size, n))**2
