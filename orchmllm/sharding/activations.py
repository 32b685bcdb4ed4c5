"""Bytes per position that the blocks of a phase keep for the backward pass, by what they compute
again. `none` keeps every tensor that some backward formula reads, `selective` the block's input and
the outputs of products and attention, `full` the block's input alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from orchmllm.config.fsdp import CHOICES
from orchmllm.models.counted_parts import BlockCounts

Counts = Mapping[str, "int | np.ndarray"]  # of CHOICES -> layers; arrays (n, 1) for n cases at once


class Stack(NamedTuple):
    """Bytes per position of all blocks of a phase: what they keep, and what one needs for a moment
    beside it, at the end of the forward pass and at the start of the backward pass; going: what of
    a block goes while the gradients of its weights are made. whole: blocks that keep everything.
    Numbers, or arrays (n, 1) for n cases."""

    kept: float | np.ndarray
    forward: float | np.ndarray
    backward: float | np.ndarray
    going: float
    whole: float | np.ndarray


def stack(blocks: Sequence[BlockCounts], counts: Counts) -> Stack:
    """Of the blocks of a phase in their order, which need not be alike: the first ones are those of
    `full`, the last ones those of `none`. When a block computes again what it did not keep, what
    the kinds after its own kept has gone; in the backward pass the gradients of the largest tensor
    and of what it was made of are there at the same time."""
    first = {c: np.cumsum([0.0, *(getattr(block, c) for block in blocks)]) for c in CHOICES}
    again = {c: max(block.none - getattr(block, c) for block in blocks) for c in CHOICES}
    full, recomputing = counts["full"], counts["full"] + counts["selective"]
    none = first["none"][-1] - first["none"][recomputing]
    selective = first["selective"][recomputing] - first["selective"][full]
    work = np.maximum(0.0, np.maximum(again["selective"] - none, again["full"] - none - selective))
    largest = 2 * max(block.largest for block in blocks)
    return Stack(first["full"][full] + selective + none,
                 np.minimum(work, max(block.none for block in blocks)),
                 work + largest, again["full"] + largest, len(blocks) - recomputing)
