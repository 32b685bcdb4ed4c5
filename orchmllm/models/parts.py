"""What encoders and LLM share: the connector between them, rotary positions, checks of sizes, and
initial weights.

Weights are set in place and after construction, so that a model built on the meta device can be
sharded, given memory (`to_empty`) and only then initialised (FSDP2 at scale). No module of this
package has buffers (rotary and sinusoidal tables are computed from positions), so parameters are
all there is to initialise.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.config.model import AudioConfig, LLMConfig, VisionConfig
from orchmllm.models.fused import Rotate


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


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x (R, H, Dh), computed in the wider dtype of x and tables; value i pairs
    with value i + Dh / 2. cos, sin: (R, 1, Dh), whose halves are equal. Returns x's dtype."""
    return Rotate.apply(x, cos, sin, sin.view_as(sin))  # torch.compile takes no tensor twice


def check_sizes(config: VisionConfig | AudioConfig | LLMConfig) -> None:
    """Raises ValueError for sizes that do not fit each other, as a recipe with them does."""
    for keys, cure in config.conflicts():
        raise ValueError(f"{type(config).__name__}: {keys[0]} = {getattr(config, keys[0])} {cure}")


def normal(name: str, weight: Tensor) -> None:
    """Draws from N(0, 0.02^2) by torch's global generator."""
    nn.init.normal_(weight, std=0.02)


@torch.no_grad()
def init_parameters(module: nn.Module, draw: Callable[[str, Tensor], None] = normal) -> None:
    """Has `draw` fill the weight of every linear, convolution and embedding layer, of any shape,
    sets biases to zero and calls `reset_parameters` of every other layer that owns parameters
    (norms: ones).

    draw: is given the weight's name, in the order of `module.modules()`, so equal seeds give equal
    weights.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Embedding):
            draw(f"{name}.weight", layer.weight)
            if getattr(layer, "bias", None) is not None:
                nn.init.zeros_(layer.bias)
        elif next(layer.parameters(recurse=False), None) is not None:
            layer.reset_parameters()
