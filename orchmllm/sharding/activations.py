"""Bytes that autograd keeps for the backward pass, by tensor, from the code of the models.

Everything here is per position of one phase; e is the element size of the compute dtype. `none`
keeps every tensor that some backward formula reads, `selective` the block's input and the outputs
of products and attention, `full` the block's input alone.
A frozen layer keeps what its input's gradient needs, and no inputs of products.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orchmllm.config.fsdp import CHOICES
from orchmllm.config.model import AudioConfig, LLMConfig, VisionConfig

ROTATED = 7  # reads and writes of a rotation, for each number of q or k
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


def block_bytes(phase: str, config: VisionConfig | AudioConfig | LLMConfig, e: int,
                on_cpu: bool = False) -> BlockBytes:
    """Of one block of a phase. on_cpu: attention keeps a copy of its output (the sequences'
    outputs are joined), and RMSNorm what rms_norm_bytes says."""
    if phase == "llm":
        return _llm_block(config, e, on_cpu)
    size, ffn, stats = config.hidden_size, config.intermediate_size, 4 * config.num_heads + 16
    if config.frozen:  # nothing has a gradient
        return BlockBytes(dict.fromkeys(("none", "selective", "full"), 0.0),
                          e * (2 * ffn + size), 0.0)
    # Input, norm, qkv (v is a view of it), attention; second residual, norm.
    none = (8 + on_cpu) * size + 2 * ffn
    moved = (7 + 2 * on_cpu) * size + 2 * ffn  # norms, a residual; the activation
    if phase == "vision":  # rotated q and k
        none += 2 * size
        moved += ROTATED * 2 * size
    kept = {"none": e * none + stats, "selective": e * (7 * size + ffn) + stats - 16,
            "full": e * size}
    return BlockBytes(kept, e * (2 * ffn + 2 * size), e * (ffn + size), e * moved,
                      1 - ffn / (4 * size + 2 * ffn))


def rms_norm_bytes(config: LLMConfig, e: int, on_cpu: bool) -> int:
    """Of one RMSNorm and the input of what follows it: the norm's input, on a CPU as a copy in at
    least float32; if the weights learn, the values before and after they are multiplied."""
    source = max(4, e) if on_cpu else e
    return (source + 2 * e * (not config.frozen)) * config.hidden_size


def _llm_block(config: LLMConfig, e: int, on_cpu: bool) -> BlockBytes:
    size, ffn = config.hidden_size, config.intermediate_size
    kv = size // config.num_heads * config.num_kv_heads
    learns = not config.frozen
    norms = 2 * rms_norm_bytes(config, e, on_cpu)
    attention = e * ((2 + on_cpu) * size + 2 * kv) + 4 * config.num_heads
    mlp = e * (4 if learns else 3) * ffn
    kept = {"none": norms + attention + mlp,
            "selective": e * (5 * size + 2 * kv + 2 * ffn) + 4 * config.num_heads,
            "full": e * size}
    # Norms, which a CPU computes in steps, and a residual; rotations; the activation and what it
    # multiplies.
    moved = e * ((11 + 8 * on_cpu) * size + ROTATED * (size + kv) + 5 * ffn)
    return BlockBytes(kept, e * (3 * ffn + 2 * size), e * (ffn + 2 * size), moved,
                      1 - ffn / (2 * size + 2 * kv + 3 * ffn))


def vision_root(config: VisionConfig, width: int, e: int) -> tuple[float, float, float]:
    """What is kept around the blocks: (bytes per patch, 0, per token)."""
    learns = not config.frozen
    root = learns * e * (config.geometry.row_size
                         + config.hidden_size + 2 * config.hidden_size // config.num_heads)
    # The connector's norm: input and output.
    return root + e * 2 * config.hidden_size, 0.0, e * 2 * width


def audio_root(config: AudioConfig, width: int, e: int) -> tuple[float, float, float]:
    """The same: (bytes per mel frame, per position, per token)."""
    size, learns = config.hidden_size, not config.frozen
    if config.mode == "packed":
        frame = learns * (e * (3 * config.num_mels + size) + 24)  # windows and their row numbers
        position = learns * (e * 5 * size + 24)  # windows, second convolution, last norm
    else:
        frame = learns * e * (config.num_mels + 2 * size)  # both convolutions' inputs, activation
        position = learns * e * 2 * size  # second convolution, last norm
    return frame, position, e * (2 * width + 2 * config.stack * size)
