"""The connector between a tower and the LLM."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Connector(nn.Module):
    """LayerNorm -> Linear -> GELU -> Linear on groups of `group` neighbouring encoder positions.
    It is the last part of an encoder phase, so that features travel to their LLM rank already
    downsampled and in the LLM's width.

    in_size: width of one position; the MLP sees group * in_size values and has out_size between
    its layers.
    """

    def __init__(self, in_size: int, group: int, out_size: int) -> None:
        super().__init__()
        self.in_features = group * in_size
        self.norm = nn.LayerNorm(self.in_features)
        self.fc1 = nn.Linear(self.in_features, out_size)
        self.fc2 = nn.Linear(out_size, out_size)

    def forward(self, x: Tensor) -> Tensor:
        """x: (N * group, in_size), the positions of a group next to each other -> (N, out_size)."""
        x = x.reshape(-1, self.in_features)  # (N, group * in_size)
        return self.fc2(F.gelu(self.fc1(self.norm(x))))
