"""From encoder features to LLM embeddings: the last part of an encoder phase, so that features
travel to their LLM rank already downsampled and in the LLM's width."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Connector(nn.Module):
    """LayerNorm -> Linear -> GELU -> Linear on groups of `group` neighbouring encoder positions.

    in_size: width of one position; the MLP sees group * in_size values and has `hidden` values
    (default: out_size) between its layers. norm: False leaves out the LayerNorm, for encoders
    that normalise each position.
    """

    def __init__(self, in_size: int, group: int, out_size: int, *, hidden: int | None = None,
                 norm: bool = True) -> None:
        super().__init__()
        self.in_features = group * in_size
        hidden = hidden or out_size
        self.norm = nn.LayerNorm(self.in_features) if norm else nn.Identity()
        self.fc1 = nn.Linear(self.in_features, hidden)
        self.fc2 = nn.Linear(hidden, out_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N * group, in_size), the positions of a group next to each other -> (N, out_size)."""
        x = x.reshape(-1, self.in_features)  # (N, group * in_size)
        return self.fc2(F.gelu(self.fc1(self.norm(x))))
