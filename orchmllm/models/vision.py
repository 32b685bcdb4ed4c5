"""Packed native-resolution vision transformer: every image keeps its own patch grid, all images of
a rank are one sequence of rows, and attention stays inside an image.

Flow: (R, 3 * patch^2) pixels -> patch embedding -> pre-norm blocks with 2-D rotary positions ->
norm -> connector, which merges merge_size x merge_size patches into one LLM position.

Two families share it. `vit` is ours; `qwen2_vl` is transformers' Qwen2VisionTransformer with the
same weights: quick GELU, patches of two (equal) frames embedded without bias, CLIP's pixel
normalisation, and its merger (LayerNorm of each position, MLP of a group's width) as norm and
connector.

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
from orchmllm.config.model import CLIP_MEAN, CLIP_STD, VisionConfig
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


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x), of any shape."""
    return x * torch.sigmoid(1.702 * x)


def normalise(pixels: Tensor, family: str) -> Tensor:
    """Pixels (R, 3 * patch^2) of 0..255, (channel, y, x), floating point -> the family's inputs:
    [-1, 1], or CLIP's normalisation."""
    if family == "vit":
        return pixels / 127.5 - 1.0
    # By channel, with numbers of Python: a tensor of three means would wait for the device.
    channels = (pixels / 255.0).unflatten(1, (3, -1)).unbind(1)
    return torch.cat([(x - mean) / std for x, mean, std
                      in zip(channels, CLIP_MEAN, CLIP_STD, strict=True)], dim=1)


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
        self.activation = F.gelu if config.family == "vit" else quick_gelu

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], seqlens: SequenceLengths
    ) -> Tensor:
        """x: (R, C) -> (R, C)."""
        qkv = self.qkv(self.norm1(x))
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).unbind(1)  # (R, H, Dh) each
        q, k = rotate(q, *rotary), rotate(k, *rotary)
        x = x + self.proj(packed_attention(q, k, v, seqlens, causal=False).flatten(1))
        return x + self.fc2(self.activation(self.fc1(self.norm2(x))))


class VisionEncoder(nn.Module):
    """Vision encoder and its connector; `blocks` are the units that are sharded and checkpointed.

    out_size: the LLM's width. Raises ValueError for sizes that do not fit each other.
    """

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        check_sizes(config)
        self.config = config
        own = config.family == "vit"
        self.patch_embed = nn.Linear(config.geometry.row_size * config.temporal_patch_size,
                                     config.hidden_size, bias=own)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        self.connector = Connector(config.hidden_size, config.merge_size**2, out_size,
                                   hidden=config.connector_hidden(out_size), norm=own)
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
            pixels = normalise(pixels.to(torch.promote_types(torch.float32, dtype)),
                               self.config.family)
        x = pixels.to(dtype)
        if self.config.family == "qwen2_vl":  # every frame of a patch is the image
            frames = self.config.temporal_patch_size
            x = x.unflatten(1, (3, 1, -1)).expand(-1, -1, frames, -1)  # channel, frame, (y, x)
            x = x.flatten(1)
        x = self.patch_embed(x)  # (R, C)
        head_dim = self.config.hidden_size // self.config.num_heads
        # Qwen2-VL rotates in float32 whatever its weights are.
        exact = dtype if self.config.family == "vit" else torch.promote_types(torch.float32, dtype)
        rotary = rotary_2d(on_device(positions, x.device), head_dim, exact)
        for block in self.blocks:
            x = block(x, rotary, seqlens)
        return self.connector(self.norm(x))
