"""Packed native-resolution vision transformer: every image keeps its own patch grid, all images of
a rank are one sequence of rows, and attention stays inside an image.

Flow: (R, 3 * patch^2) pixels -> patch embedding -> pre-norm blocks with 2-D rotary positions ->
norm -> connector, which merges merge_size x merge_size patches into one LLM position.

Row order ("merge-group order"): per image and frame, groups in raster order over
(h / merge_size, w / merge_size), and raster order over (merge_size, merge_size) inside a group, so
that merging is a reshape.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import SequenceLengths, on_device
from orchmllm.config.model import VisionConfig
from orchmllm.models.attention import packed_attention
from orchmllm.models.parts import Connector, check_sizes, init_parameters, rotate

ROPE_THETA = 10_000.0


def patch_positions(grid: np.ndarray, merge_size: int) -> np.ndarray:
    """(row, column) of each patch of n images, in merge-group order.

    grid: (n, 3) int64, t, h, w in patches, h and w multiples of merge_size (ValueError if not).
    Returns (sum of t * h * w, 2) int64; frames of one image repeat the same positions.
    """
    grid = np.asarray(grid, np.int64).reshape(-1, 3)
    if (grid[:, 1:] % merge_size).any():
        raise ValueError(f"grid {grid.tolist()}: h and w must be multiples of {merge_size}")
    rows = grid.prod(axis=1)  # (n,)
    frame_size, width = np.repeat(np.stack([grid[:, 1] * grid[:, 2], grid[:, 2]]), rows, 1)  # (R,)
    start = np.repeat(np.cumsum(rows) - rows, rows)
    index = (np.arange(len(start)) - start) % frame_size  # inside the frame
    group, inner = np.divmod(index, merge_size**2)
    group_row, group_col = np.divmod(group, width // merge_size)
    inner_row, inner_col = np.divmod(inner, merge_size)
    return np.stack([group_row * merge_size + inner_row, group_col * merge_size + inner_col], 1)


def rotary_2d(positions: Tensor, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine, (R, 1, head_dim) each, of positions (R, 2) int64: the first half of the
    frequencies turns with the row, the second with the column. Computed in at least float32."""
    compute = torch.promote_types(torch.float32, dtype)
    exponent = torch.arange(0, head_dim // 2, 2, dtype=compute, device=positions.device)
    inv_freq = 1.0 / ROPE_THETA ** (exponent / (head_dim // 2))  # (head_dim / 4,)
    angle = (positions.to(compute).unsqueeze(-1) * inv_freq).flatten(1)  # (R, head_dim / 2)
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return angle.cos().to(dtype), angle.sin().to(dtype)


class VisionBlock(nn.Module):
    """Pre-norm transformer block on packed rows."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.num_heads = config.num_heads
        self.norm1 = nn.LayerNorm(size, eps=1e-6)
        self.qkv = nn.Linear(size, 3 * size)
        self.proj = nn.Linear(size, size)
        self.norm2 = nn.LayerNorm(size, eps=1e-6)
        self.fc1 = nn.Linear(size, config.intermediate_size)
        self.fc2 = nn.Linear(config.intermediate_size, size)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], seqlens: SequenceLengths
    ) -> Tensor:
        """x: (R, C) -> (R, C)."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # (R, H, Dh) each
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        x = x + self.proj(packed_attention(q, k, v, seqlens, causal=False).flatten(1))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class VisionEncoder(nn.Module):
    """Vision encoder and its connector; `blocks` are the units that are sharded and checkpointed.

    out_size: the LLM's width. Raises ValueError for sizes that do not fit each other.
    """

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        check_sizes(config)
        self.config = config
        self.patch_embed = nn.Linear(config.geometry.row_size, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.connector = Connector(config.hidden_size, config.merge_size**2, out_size)
        init_parameters(self)

    def forward(self, pixels: Tensor, grid: np.ndarray, seqlens: SequenceLengths) -> Tensor:
        """Embeddings of all images of this rank; runs with R = 0 and is then still attached to
        every parameter.

        pixels: (R, 3 * patch^2) uint8, or floating point already normalised.
        grid: (n, 3) int64, t, h, w in patches. seqlens: patches per image, attention's extent.
        Returns (R / merge_size^2, out_size). Raises ValueError if grid does not give R patches.
        """
        positions = patch_positions(grid, self.config.merge_size)
        if not len(positions) == seqlens.total == len(pixels):
            raise ValueError(
                f"{len(pixels)} rows of pixels, but grid gives {len(positions)} patches and "
                f"seqlens {seqlens.total}"
            )
        dtype = self.patch_embed.weight.dtype
        if pixels.dtype == torch.uint8:
            # In float32 first: a bfloat16 division would round before the shift by one does.
            pixels = pixels.to(torch.promote_types(torch.float32, dtype)) / 127.5 - 1.0
        x = self.patch_embed(pixels.to(dtype))  # (R, C)
        head_dim = self.config.hidden_size // self.config.num_heads
        rotary = rotary_2d(on_device(positions, x.device), head_dim, dtype)
        for block in self.blocks:
            x = block(x, rotary, seqlens)
        return self.connector(self.norm(x))
