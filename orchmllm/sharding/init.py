"""Initial weights of a sharded model, without a full copy of anything.

Row r of a weight comes from a counter-based generator keyed by (seed, name of the weight, r), so
every rank draws just its rows, and the model is the same on any number of ranks and any device.
About 150 million values a second on one core: 84 B parameters over 256 ranks take seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from orchmllm.models.adapters import WEIGHTS
from orchmllm.models.mllm import MultimodalModel
from orchmllm.models.parts import init_parameters


def seed_weights(model: MultimodalModel, seed: int, skip: Container[str] = ()) -> None:
    """Gives every parameter its initial value, in place: N(0, std^2) for weights of linear,
    convolution and embedding layers, zero biases, norms' own. model: whole or sharded, with
    memory. skip: plain names of weights that will be read from a file, so need not be drawn."""
    def draw(name: str, weight: Tensor) -> None:
        if name not in skip:
            std = model.llm.head_std if weight is model.llm.lm_head.weight else 0.02
            _draw(weight, std, seed, name)

    init_parameters(model, draw)


@torch.no_grad()
def seed_adapters(hf: nn.Module, seed: int) -> None:
    """Gives all adapters (orchmllm.models.adapters) their initial values, in place: A is drawn
    evenly from +-1/sqrt(in), as peft draws it, and B is 0."""
    for name, weight in hf.named_parameters():
        if name.endswith(WEIGHTS[0]):
            _draw(weight, weight.shape[1]**-0.5, seed, name, evenly=True)
        elif name.endswith(WEIGHTS[1]):
            weight.zero_()


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """(this rank's rows, the number of the first) of a parameter that is whole, or sharded by
    rows; the rows may be none."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements)
    assert tuple(shape[1:]) == tuple(parameter.shape[1:]), "sharded by more than rows"
    return parameter.to_local(), offset[0]


def _draw(weight: Tensor, scale: float, seed: int, name: str, evenly: bool = False) -> None:
    """This rank's rows of a weight, each from a generator of its own: N(0, scale^2), or evenly from
    +-scale."""
    local, first = local_rows(weight)
    width = int(np.prod(weight.shape[1:]))
    key = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(),
                         "little")
    step = max(1, 2**22 // max(width, 1))  # 16 MiB at a time
    for at in range(0, len(local), step):
        part = local[at: at + step]
        rows = np.empty((len(part), width), np.float32)
        for k in range(len(rows)):
            generator = np.random.Generator(np.random.Philox(key=[key, first + at + k]))
            if evenly:
                rows[k] = 2 * generator.random(width, np.float32) - 1
            else:
                generator.standard_normal(out=rows[k], dtype=np.float32)
        part.copy_(torch.from_numpy(rows).mul_(scale).view(part.shape))
