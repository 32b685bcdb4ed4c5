"""What activation checkpointing takes in time: what the layers of a phase compute again."""

from __future__ import annotations

import numpy as np

from orchmllm.models.flops import Lengths
from orchmllm.models.whole_flops import phase_work
from orchmllm.sharding.activations import Counts
from orchmllm.sharding.loads import Loads
from orchmllm.sharding.memory import Choice, MemoryModel

# What an H100 computes in bfloat16 while it moves a byte: 77% of 989 TFLOP/s, 60% of 3.35 TB/s.
FLOP_PER_BYTE = 380


def recomputed_flop(memory: MemoryModel, loads: Loads, choice: Choice) -> float:
    """FLOP that the slowest rank of each phase repeats: what `auto` keeps low."""
    return sum(float(phase_flop(memory, p, loads, memory.counts(p, choice[p])).max())
               for p in memory.phases)


def phase_flop(memory: MemoryModel, phase: str, loads: Loads, counts: Counts) -> np.ndarray:
    """(d,) FLOP that a phase repeats, or (n, d) for n cases; bytes that are moved count, too."""
    lengths, layers = loads.phases[phase], memory.num_layers(phase)
    # As many items as the rank has, each as long as the one that a position is in on average.
    share = np.maximum(loads.pairs[phase], 1.0) / np.maximum(lengths.positions, 1.0)**2
    one = Lengths(lengths.rows * share, lengths.positions * share, lengths.tokens * share)
    products, attention = phase_work(phase, memory.model, one, "full").recompute / share / layers
    return recomputed(memory, phase, counts, products, attention,
                      FLOP_PER_BYTE * lengths.positions)


def moved_bytes(memory: MemoryModel, phase: str) -> float:
    """Bytes per position that a layer's forward pass moves where it computes again."""
    return np.mean([block.moved for block in memory.blocks(phase)])


def recomputed(memory: MemoryModel, phase: str, counts: Counts, products, attention, moving):
    """What the layers of a phase compute again, in FLOP or seconds. products, attention: what
    those of a layer's forward pass take; moving: what a byte per position takes."""
    moved = moving * moved_bytes(memory, phase)
    share = np.mean([block.repeated for block in memory.blocks(phase)])
    return counts["full"] * (share * products + attention) + (
        counts["full"] + counts["selective"]) * moved
