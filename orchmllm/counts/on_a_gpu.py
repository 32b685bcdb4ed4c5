"""On tensors without memory what runs on a GPU: torch decomposes on `meta` what is one kernel
there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def _rms_norm(x: Tensor, shape: list[int], weight: Tensor | None, eps: float | None):
    wide = torch.promote_types(torch.float32, x.dtype)
    return torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=wide)


@contextmanager
def fused(key: str = "Meta") -> Iterator[None]:
    """Within it RMSNorm is the one operator that a GPU has for it. key: `Meta`, of tensors on
    `meta`; with `CPU` beside it, of fake tensors of a CPU."""
    library = torch._C._dispatch_library("IMPL", "aten", key, __file__, 0)
    library.impl("_fused_rms_norm", key, _rms_norm)
    try:
        yield
    finally:
        library.reset()
