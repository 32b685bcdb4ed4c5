"""Initial weights of a sharded model, without a full copy of anything.

Row r of a weight comes from a counter-based generator keyed by (seed, name of the weight, r), so
every rank draws just its rows, and the model is the same on any number of ranks and any device. How
its numbers are spread is said by the model's own class.

About 150 million values a second on one core: 84 B parameters over 256 ranks take seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.initialization import TORCH_INIT_FUNCTIONS
from transformers.utils import logging

from orchmllm.models.adapters import WEIGHTS


@torch.no_grad()
def seed_adapters(hf: nn.Module, seed: int) -> None:
    """Gives all adapters (orchmllm.models.adapters) their initial values, in place: A is drawn
    evenly from +-1/sqrt(in), as peft draws it, and B is 0."""
    for name, weight in hf.named_parameters():
        if name.endswith(WEIGHTS[0]):
            _draw(weight, weight.shape[1]**-0.5, seed, name, evenly=True)
        elif name.endswith(WEIGHTS[1]):
            weight.zero_()


@contextmanager
def drawn_by_rows(cls: type[nn.Module], seed: int) -> Iterator[None]:
    """Within it models of a class of transformers whose weights are sharded are given their initial
    values as their own code has them: what that draws at random is drawn by rows. No warning names
    the weights that no file has."""
    initialize, told = cls.initialize_weights, logging.get_verbosity()
    truncated = TORCH_INIT_FUNCTIONS["trunc_normal_"]

    def by_rows(hf: nn.Module) -> None:
        with _ByRows(hf, seed) as mode:
            TORCH_INIT_FUNCTIONS["trunc_normal_"] = mode.truncated
            initialize(hf)

    cls.initialize_weights = by_rows
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(told)
        TORCH_INIT_FUNCTIONS["trunc_normal_"] = truncated
        del cls.initialize_weights


class _ByRows(TorchDispatchMode):
    """Computes what fills the parameters of hf in place on this rank's rows alone. Random numbers
    for a tensor that is no parameter are named by how many such tensors there were before, which is
    the same on all ranks."""

    def __init__(self, hf: nn.Module, seed: int) -> None:
        super().__init__()
        self.seed, self.others = seed, 0
        self.names = {id(p): name for name, p in hf.named_parameters()}

    def truncated(self, tensor: Tensor, mean: float = 0.0, std: float = 1.0, a: float = -2.0,
                  b: float = 2.0, generator: None = None) -> Tensor:
        """torch's own asks all ranks whether a number is outside of [a, b]."""
        return self._filled(tensor, mean, std, within=((a - mean) / std, (b - mean) / std))

    def _filled(self, tensor: Tensor, mean: float, scale: float, **how: Any) -> Tensor:
        name = self.names.get(id(tensor), f"tensor {self.others}")
        self.others += id(tensor) not in self.names
        _draw(tensor, scale, self.seed, name, **how)
        local_rows(tensor)[0].add_(mean)
        return tensor

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensor, *values = args or (None,)
        if func is torch.ops.aten.normal_.default:
            return self._filled(tensor, *(values or (0.0, 1.0)))
        if func is torch.ops.aten.uniform_.default:
            low, high = values or (0.0, 1.0)
            return self._filled(tensor, (low + high) / 2, (high - low) / 2, evenly=True)
        if not isinstance(tensor, DTensor):
            return func(*args, **(kwargs or {}))
        rows, start = local_rows(tensor)
        if func is torch.ops.aten.select.int and values[0] == 0:  # of a row that is padding
            at = values[1] % len(tensor) - start
            return rows[at] if 0 <= at < len(rows) else rows[:0]
        if not func._schema.is_mutable:
            return func(*args, **(kwargs or {}))
        func(rows, *(value[start: start + len(rows)] if isinstance(value, Tensor) and value.dim()
                     else value for value in values), **(kwargs or {}))
        return tensor


def local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """(this rank's rows, the number of the first) of a parameter that is whole, or sharded by
    rows; the rows may be none."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements)
    assert tuple(shape[1:]) == tuple(parameter.shape[1:]), "sharded by more than rows"
    return parameter.to_local(), offset[0]


def _draw(weight: Tensor, scale: float, seed: int, name: str, evenly: bool = False,
          within: tuple[float, float] | None = None) -> None:
    """This rank's rows of a weight, each from a generator of its own: N(0, scale^2), or evenly from
    +-scale. within: bounds of the normal numbers, before they are scaled."""
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
                while within and (out := (rows[k] < within[0]) | (rows[k] > within[1])).any():
                    rows[k, out] = generator.standard_normal(out.sum(), np.float32)
        part.copy_(torch.from_numpy(rows).mul_(scale).view(part.shape))
