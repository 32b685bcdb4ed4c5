"""Initial weights, in place and after construction, so that a model built on the meta device can
be sharded, given memory (`to_empty`) and only then initialised (FSDP2 at scale).

No module of this package has buffers (rotary and sinusoidal tables are computed from positions),
so parameters are all there is to initialise.
"""

from __future__ import annotations

import torch
from torch import nn


@torch.no_grad()
def init_parameters(
    module: nn.Module, generator: torch.Generator | None = None, std: float = 0.02
) -> None:
    """Draws weights of linear, convolution and embedding layers from N(0, std^2), sets biases to
    zero and calls `reset_parameters` of every other layer that owns parameters (norms: ones).

    generator: on the parameters' device; None uses the global one. The order of draws is that of
    `module.modules()`, so equal seeds give equal weights.
    """
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Embedding):
            nn.init.normal_(layer.weight, std=std, generator=generator)
            if getattr(layer, "bias", None) is not None:
                nn.init.zeros_(layer.bias)
        elif next(layer.parameters(recurse=False), None) is not None:
            layer.reset_parameters()
