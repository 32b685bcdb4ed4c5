"""Attention of the towers of a model of transformers: one call a block for all media of a rank.

transformers hands the borders of packed media to an attention whose name has "flash" in it; for any
other it calls attention once for each image and reads the borders in every block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from orchmllm.batch import SequenceLengths
from orchmllm.models.families import part_of
from orchmllm.models.packing import attend
from orchmllm.plan.layout import ENCODERS

NAME = "orchmllm_flash_tower"


def use_packed_attention(hf: nn.Module) -> None:
    """Lets the towers of a model that attend by `sdpa` attend by `attention_of_tower`."""
    for name, module in hf.named_modules():
        config = getattr(module, "config", None)
        if part_of(f"{name}.") in ENCODERS and getattr(
                config, "_attn_implementation", None) == "sdpa":
            config._attn_implementation = NAME


def attention_of_tower(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, cu_seq_lens_q: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (n, H, R, D); key, value: (n, Hkv, R, D). Returns (n, R, H, D). cu_seq_lens_q (k + 1,)
    int: borders of the media in a row, with n = 1; without them it is transformers' `sdpa`. Raises
    RuntimeError for what it cannot compute exactly."""
    if cu_seq_lens_q is None:
        return ALL_ATTENTION_FUNCTIONS["sdpa"](
            module, query, key, value, attention_mask, scaling=scaling, dropout=dropout, **kwargs)
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if dropout or causal or attention_mask is not None or kwargs.get(
            "cu_seq_lens_k", cu_seq_lens_q) is not cu_seq_lens_q:
        raise RuntimeError(f"{type(module).__name__} attends with dropout, a mask or to other "
                           "media than its own, which packing does not know")
    return attend(query, key, value, _lengths(cu_seq_lens_q, query.device), scaling,
                  causal=False), None


@torch.compiler.disable
def _lengths(borders: Tensor, device: torch.device) -> SequenceLengths:
    """Of borders (k + 1,), which all blocks of a forward share. Waits for the device once, where
    transformers made them there."""
    if not hasattr(borders, "seqlens"):
        borders.seqlens = SequenceLengths.from_lengths(np.diff(borders.tolist()), device)
    return borders.seqlens


AttentionInterface.register(NAME, attention_of_tower)
AttentionMaskInterface.register(NAME, sdpa_mask)
