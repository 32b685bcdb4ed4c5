"""Bytes per position that the blocks of a phase keep for the backward pass, by what they compute
again. `none` keeps every tensor that some backward formula reads, `selective` the block's input and
the outputs of products and attention, `full` the block's input alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchmllm.config.fsdp import CHOICES

Counts = Mapping[str, "int | np.ndarray"]  # of CHOICES -> layers; arrays (n, 1) for n cases at once


class Stack(NamedTuple):
    """Bytes per position of all blocks of a phase: what they keep, and what one needs for a moment
    beside it, at the end of the forward pass and at the start of the backward pass. Numbers, or
    arrays (n, 1) for n cases."""

    kept: float | np.ndarray
    forward: float | np.ndarray
    backward: float | np.ndarray


@dataclass(frozen=True)
class BlockBytes:
    """Per position. kept: choice -> bytes that stay until the backward pass. forward: what exists
    at the same time where nothing is kept. backward: gradients inside one block, beside what
    `none` keeps. moved: what all operators but products and attention read and write where a
    block recomputes. repeated: the share of the products' FLOP that `full` computes again: torch
    stops as soon as all is there that the backward pass reads, and it does not read the output of
    the last product and what follows it."""

    kept: dict[str, float]
    forward: float
    backward: float
    moved: float = 0.0
    repeated: float = 1.0


def stack(blocks: Sequence[BlockBytes], counts: Counts) -> Stack:
    """Of the blocks of a phase in their order, which need not be alike: the first ones are those of
    `full`, the last ones those of `none`. When a block computes again what it did not keep, what
    the kinds after its own kept has gone."""
    first = {c: np.cumsum([0.0, *(block.kept[c] for block in blocks)]) for c in CHOICES}
    again = {c: max(block.kept["none"] - block.kept[c] for block in blocks) for c in CHOICES}
    full, recomputing = counts["full"], counts["full"] + counts["selective"]
    none = first["none"][-1] - first["none"][recomputing]
    selective = first["selective"][recomputing] - first["selective"][full]
    work = np.maximum(0.0, np.maximum(again["selective"] - none, again["full"] - none - selective))
    return Stack(first["full"][full] + selective + none,
                 np.minimum(work, max(block.forward for block in blocks)),
                 work + max(block.backward for block in blocks))


NOTHING = BlockBytes(dict.fromkeys(CHOICES, 0.0), 0.0, 0.0)  # of a part that a model has not
