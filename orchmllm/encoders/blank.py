"""Media without content, of any size that an encoder takes, so that what it computes is counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.encoders.items import Cropped, Masked, Packed, Slots, Tiles
from orchmllm.encoders.results import flatten
from orchmllm.encoders.sharing import run_encoder
from orchmllm.encoders.spec import Encoder

FRAMES = 2  # of sound that become a position


@dataclass(frozen=True)
class BlankMedia:
    """What an encoder of `owner` is given. phase: vision or audio."""

    phase: str
    owner: nn.Module
    encoder: Encoder

    @cached_property
    def tower(self) -> nn.Module:
        """The largest module that encodes."""
        return max((tower for _, tower in self.encoder.tower_modules(self.owner)),
                   key=lambda tower: sum(p.numel() for p in tower.parameters()))

    @cached_property
    def _weight(self) -> Tensor:
        """Of the first layer, (D, channels, ...)."""
        return next(m.weight for m in self.tower.modules() if isinstance(
            m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d))

    @property
    def row_bytes(self) -> int:
        """Of a patch of pixels, which are bytes, without copies of its frame, or of a frame of
        sound in float32."""
        if self.phase == "audio":
            return 4 * self._weight.shape[1]
        return self._weight[0].numel() // (self._weight.shape[2] if self._weight.dim() == 5 else 1)

    @property
    def row_values(self) -> int:
        """Numbers that the encoder gets of a row."""
        return self._weight.shape[1] if self.phase == "audio" else self._weight[0].numel()

    @property
    def tile(self) -> tuple[int, int] | None:
        """Rows and columns of positions of an item, where all have the same; None: any."""
        if isinstance(self.encoder.layout, Packed | Cropped | Masked):
            return None
        config = self.tower.config
        if self.phase == "audio":
            return 1, config.max_source_positions
        given = getattr(self.owner.config, "image_size", None)  # of a composed model
        size = np.broadcast_to(given or config.image_size, 2)
        sides = size // np.broadcast_to(config.patch_size, 2)
        return tuple(sides.tolist())

    def run(self, t: int, h: int, w: int, dtype: torch.dtype) -> tuple[Tensor, int]:
        """(features (R, D) of t tiles or frames of h x w positions, positions that were encoded):
        one item or, where items have one size, t of them."""
        meta, values = self._items(t, h, w)
        values = tuple(v.to(dtype) if v.is_floating_point() else v for v in values)
        arguments = self.encoder.layout.build(meta, values)
        result = run_encoder(self.encoder, self.owner, next(iter(self.encoder.calls)), arguments)
        features = flatten(self.encoder, self.owner, result, meta, placeholder=False)
        tiles = int(meta[:, 2].sum()) if isinstance(self.encoder.layout, Tiles) else t
        return features.rows, tiles * h * w

    def _items(self, t: int, h: int, w: int) -> tuple[np.ndarray, tuple[Tensor, ...]]:
        layout, weight = self.encoder.layout, self._weight
        none = torch.empty(0, 3, dtype=torch.int64)  # what is said of items is in this dtype
        if isinstance(layout, Masked):
            return np.array([[FRAMES * w]]), (torch.ones(FRAMES * w, weight.shape[1]), none[:, 0])
        if isinstance(layout, Packed):
            return np.array([[t, h, w]]), (torch.ones(t * h * w, weight[0].numel()), none)
        if self.phase == "audio":
            mask = torch.ones(t, FRAMES * w, dtype=torch.int64)
            values = torch.ones(t, weight.shape[1], FRAMES * w), *[mask] * (
                len(layout.arguments) - 1)
            return np.full((t, int(bool(layout.length))), FRAMES * w), values
        patch = np.broadcast_to(self.tower.config.patch_size, 2)
        high, wide = (patch * (h, w)).tolist()
        if isinstance(layout, Cropped):
            return np.array([[high, wide, patch[0]]] * t), (
                torch.ones(t * h * w, weight.shape[1], *patch), none[:, :2])
        if isinstance(layout, Tiles):
            tiles = layout.count(self.owner, [high, wide])
            return np.array([[high, wide, tiles]] * t), (
                torch.ones(t * tiles, weight.shape[1], high, wide), none[:, :2])
        values = torch.ones(t, weight.shape[1], high, wide)
        if isinstance(layout, Slots):
            return np.zeros((t, 0), np.int64), (values, torch.ones(t, high, wide, dtype=torch.bool))
        return np.zeros((t, 0), np.int64), (values, *[None] * (len(layout.arguments) - 1))
