"""What one item costs in each phase, derived from the submodule's configuration.

A phase balances well only when its cost is right (method.md section 7): linear layers cost per
position, attention per squared item length. Coefficients are FLOPs of forward + backward, counted
as 3x the forward matmuls (activation checkpointing scales all terms of a phase alike). Configs are
those of orchmllm/models/config.py, read by attribute: plan/ does not import models.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

FORWARD_BACKWARD = 3  # backward of a matmul is two matmuls of the same size


@dataclass(frozen=True)
class CostModel:
    """cost(l) = (constant + linear * l + quadratic * l * span) // unit, exact in int64, where span
    is how many positions each position attends to: l, or less with frames or a window.

    linear, quadratic, constant: FLOP (forward + backward) per position, attended pair, item; of a
    fitted model (orchmllm.plan.fit_cost) what counts as so many. window: positions of an attention
    window; 0: none. padded: a rank pads its items to the longest, so that its cost is their number
    times that one's.
    unit: FLOP per unit of the result. The default gives kFLOP: the sum over a global batch of an
    84B model on 2560 ranks is near 2^65 FLOP but fits int64 in kFLOP, and rounding per item
    (never per coefficient) loses less than 1 kFLOP an item on the smallest model.
    """

    linear: int
    quadratic: int
    constant: int = 0
    unit: int = 1000
    window: int = 0
    padded: bool = False

    def __post_init__(self) -> None:
        for name in ("linear", "quadratic", "constant", "window"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} = {getattr(self, name)} is negative")
        if self.unit < 1:
            raise ValueError(f"unit = {self.unit} must be >= 1")

    def __call__(self, lengths: np.ndarray, frames: np.ndarray | None = None) -> np.ndarray:
        """(n,) int64 costs of items of `lengths` (n,). frames (n,): attention stays inside each of
        so many equal parts of an item (frames of a video). ValueError if one overflows int64."""
        lengths = np.asarray(lengths, np.int64)
        if len(lengths):
            index = int(lengths.argmax())
            longest = int(lengths[index])
            if self.constant + longest * (self.linear + self.quadratic * longest) >= 2**63:
                raise ValueError(f"lengths[{index}] = {longest}: its cost overflows int64")
        span = lengths if frames is None else lengths // np.maximum(frames, 1)
        if self.window:
            span = np.minimum(span, self.window)
        return (self.constant + lengths * (self.linear + self.quadratic * span)) // self.unit

    def of_ranks(self, lengths: np.ndarray, rank: np.ndarray, num_ranks: int) -> np.ndarray:
        """(num_ranks,) int64 cost of what each rank has: items of `lengths` (n,) on `rank` (n,)."""
        cost = self(lengths)
        total = np.zeros(num_ranks, np.int64)
        if not self.padded:
            np.add.at(total, rank, cost)
            return total
        np.maximum.at(total, rank, cost)
        return total * np.bincount(rank, minlength=num_ranks)

    def linear_part(self, lengths: np.ndarray) -> np.ndarray:
        """(n,) int64: constant and linear part, for batches whose attention alone is padded."""
        return replace(self, quadratic=0)(lengths)

    def quadratic_part(self, lengths: np.ndarray) -> np.ndarray:
        """(n,) int64: attention of an item of each length."""
        return replace(self, linear=0, constant=0)(lengths)


def vision_cost(config: Any, llm_hidden: int) -> CostModel:
    """Cost of one image by its patches: patch embedding, encoder, attention within the image, and
    the connector (merge_size^2 patches joined, then a 2-layer MLP)."""
    hidden, merged = config.hidden_size, config.merge_size**2
    tower = getattr(config, "family", "vit") == "qwen2_vl"  # two frames a patch, a wider connector
    embed = 3 * (2 if tower else 1) * config.patch_size**2 * hidden
    connector = (merged * hidden if tower else llm_hidden) * (merged * hidden + llm_hidden)
    return _encoder_cost(config, 2 * embed + 2 * connector / merged)


def audio_cost(config: Any, llm_hidden: int) -> CostModel:
    """Cost of one clip by its positions after the convolutions: conv front end (kernel 3, the first
    at two frames per position), encoder, attention within the clip, and the connector. Padded in
    mode `padded`; in mode `fixed` every clip has the positions of the window."""
    hidden = config.hidden_size
    conv = 2 * 3 * config.num_mels * hidden + 3 * hidden * hidden
    connector = config.stack * hidden * llm_hidden + llm_hidden * llm_hidden
    cost = _encoder_cost(config, 2 * conv + 2 * connector / config.stack)
    return replace(cost, padded=config.mode == "padded")


def _encoder_cost(config: Any, extra: float) -> CostModel:
    """Pre-norm transformer, full attention inside each item; `extra`: forward FLOP a position."""
    hidden = config.hidden_size
    layer = 2 * (4 * hidden * hidden + 2 * hidden * config.intermediate_size)
    return CostModel(
        linear=round(FORWARD_BACKWARD * (config.num_layers * layer + extra)),
        quadratic=FORWARD_BACKWARD * config.num_layers * 4 * hidden,
    )


def llm_cost(config: Any) -> CostModel:
    """Cost of one example by its total tokens: grouped-query projections, gated MLP, lm_head over
    all positions. Causal attention counts half the square, which is what a kernel that skips
    masked blocks computes on average."""
    hidden = config.hidden_size
    kv = hidden // config.num_heads * config.num_kv_heads
    layer = 2 * (2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * config.intermediate_size)
    return CostModel(
        linear=FORWARD_BACKWARD * (config.num_layers * layer + 2 * hidden * config.vocab_size),
        quadratic=FORWARD_BACKWARD * config.num_layers * 2 * hidden,
    )


def cost_model(phase: str, model_config: Any) -> CostModel:
    """Cost model of `vision`, `audio` or `llm` from a ModelConfig (.vision, .audio, .llm)."""
    if phase == "vision":
        return vision_cost(model_config.vision, model_config.llm.hidden_size)
    if phase == "audio":
        return audio_cost(model_config.audio, model_config.llm.hidden_size)
    if phase == "llm":
        return llm_cost(model_config.llm)
    raise ValueError(f"unknown phase {phase!r}; choose one of vision, audio, llm")
