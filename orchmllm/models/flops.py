"""FLOPs of every phase without padding, and what follows: MFU, tokens per second and GPU.

OrchMLLM section 8: "we universally calculate effective GPU FLOPs without paddings". Counted are
matrix products and attention (causal: half of the square, what a kernel that skips masked blocks
computes), forward and backward; recomputation is work but never counts as useful. The backward
pass of a product is one towards its weights, if they learn, and one towards its input, if something
before it learns: a frozen encoder has none, its connector that of its weights, and a frozen LLM
still passes gradients on to what is before it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from orchmllm.models.gpus import GPUS, kind_of
from orchmllm.plan.layout import ENCODERS, GENERATOR, MADE, BatchLayout
from orchmllm.plan.step import StepPlan


@dataclass(frozen=True)
class Lengths:
    """A phase's items, (n,) int64 each: rows that arrive (patches, mel frames) or, in the LLM, its
    targets, or states that an image is made from; positions that attention sees (patches, frames
    after the convolutions, tokens); LLM tokens they become, or states again. grid: (n, 3) tiles,
    rows and columns of patches, which windows are cut from; None: unknown. before: of pieces of
    examples, the positions of the example before them, to which they attend, too; None: these are
    whole."""

    rows: np.ndarray
    positions: np.ndarray
    tokens: np.ndarray
    grid: np.ndarray | None = None
    before: np.ndarray | None = None


@dataclass(frozen=True)
class Work:
    """FLOP per item, (2, n) float64 each: matrix products and attention. recompute: what
    activation checkpointing repeats."""

    forward: np.ndarray
    backward: np.ndarray
    recompute: np.ndarray

    @property
    def useful(self) -> np.ndarray:
        """(n,) forward and backward."""
        return (self.forward + self.backward).sum(axis=0)


def phase_lengths(layout: BatchLayout, phase: str) -> Lengths:
    """The items of a phase in source order."""
    if phase == "llm":
        tokens = layout.tokens_per_example
        return Lengths(layout.num_targets, tokens, tokens)
    if phase == GENERATOR:
        return Lengths(layout.conditions, layout.attn_len[layout.segments[MADE]], layout.conditions)
    seg = layout.segments[ENCODERS[phase]]
    # That of a clip has its frames, of which two make a position.
    grid = layout.grid[seg] if phase == "vision" else None
    return Lengths(layout.rows[seg], layout.attn_len[seg], layout.num_tokens[seg], grid)


def planned_lengths(plan: StepPlan, phase: str) -> Lengths:
    """The items of a phase as they are processed, in source order: of the LLM the pieces of
    examples, each with as many targets as it may have."""
    if phase != "llm" or plan.pieces is None:
        return phase_lengths(plan.layout, phase)
    return replace(phase_lengths(plan.parts, phase), before=plan.pieces.start)


def item_rank(plan: StepPlan, phase: str) -> np.ndarray:
    """(n,) rank that processes each item of planned_lengths."""
    move = plan.rearrangement(phase)
    return move.target_rank[move.inverse.order]


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU by its name; None if unknown (a CPU)."""
    kind = kind_of(device_name)
    return GPUS[kind].bfloat16 if kind else None


def mfu(flops: float, seconds: float, num_ranks: int, peak: float | None) -> float | None:
    """Share of the ranks' peak that was useful; None where the peak is not known. flops: of all
    ranks (step_flops, summed)."""
    return flops / (seconds * num_ranks * peak) if peak else None
