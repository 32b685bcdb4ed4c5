"""Attention that computes the products of the pairs that attend to each other, and no others, so
that torch's FlopCounterMode counts them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from orchmllm.models import packing


def use(patch) -> None:
    """In the text of whole models. patch: pytest's monkeypatch."""
    patch.setattr(packing, "packed_attention", _causal)
    patch.setattr(packing, "ALL_ATTENTION_FUNCTIONS", {"sdpa": _masked})


def _causal(q: Tensor, k: Tensor, v: Tensor, seqlens: Any, causal: bool, keys: None) -> Tensor:
    """q (R, H, D) and k, v (R, Hkv, D) -> (R, H, D)."""
    assert causal
    parts = zip(*(x.transpose(0, 1).split(seqlens.lengths, 1) for x in (q, k, v)), strict=True)
    return torch.cat([_pairs(*part, torch.ones(2 * part[0].shape[1:2]).tril().bool())
                      for part in parts], 1).transpose(0, 1)


def _masked(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor,
            scaling: float | None = None) -> tuple[Tensor, None]:
    """q (1, H, n, D), k, v (1, Hkv, n, D), mask (1, 1, n, n) -> (1, n, H, D)."""
    return _pairs(q[0], k[0], v[0], mask[0, 0], scaling).transpose(0, 1)[None], None


def _pairs(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None) -> Tensor:
    k, v = (x.repeat_interleave(len(q) // len(x), 0) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return torch.cat([(q[:, i: i + 1] @ k[:, sees].mT * scale).softmax(-1) @ v[:, sees]
                      for i, sees in enumerate(mask)], 1)
