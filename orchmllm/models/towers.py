"""Attention of the towers of a model of transformers: one call a block for all media of a rank.

transformers hands the borders of packed media to an attention whose name has "flash" in it; for any
other it calls attention once for each image and reads the borders in every block.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from transformers import AttentionInterface

from orchmllm.batch import SequenceLengths
from orchmllm.encoders.mirrored import Mirrored
from orchmllm.models.attention_op import has_kernel
from orchmllm.models.packing import attend
from orchmllm.plan.layout import ENCODERS

NAME = "orchmllm_flash_tower"


def use_packed_attention(stacks: Mapping[str, nn.ModuleList]) -> None:
    """Lets the blocks of towers that are told the borders of packed media, and attend by `sdpa`,
    attend by `attention_of_tower`. stacks: of all parts, see WholeModel.blocks."""
    for part in ENCODERS.keys() & stacks.keys():
        if "cu_seqlens" not in inspect.signature(stacks[part][0].forward).parameters:
            continue
        for module in stacks[part].modules():
            config = getattr(module, "config", None)
            if getattr(config, "_attn_implementation", None) == "sdpa":
                config._attn_implementation = NAME


def attention_of_tower(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None, cu_seq_lens_k: Tensor | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:
    """query: (1, H, R, D); key, value: (1, Hkv, R, D); cu_seq_lens_q, which is also cu_seq_lens_k:
    (k + 1,) int, borders of the media. Returns (1, R, H, D). Raises RuntimeError where media would
    see each other, and for what it cannot compute exactly."""
    if cu_seq_lens_q is None or cu_seq_lens_k is not cu_seq_lens_q:
        raise RuntimeError(f"{type(module).__name__} does not say where its media end: they would "
                           "see each other")
    if dropout or is_causal is not False or attention_mask is not None:
        raise RuntimeError(f"{type(module).__name__} attends with dropout, a mask or in one "
                           "direction, which packed media do not know")
    seqlens = _lengths(cu_seq_lens_q, query.device)
    if is_compiling() and not has_kernel(query.device, query.dtype, query.shape[-1]):
        return _between_graphs(query, key, value, seqlens, scaling), None
    return attend(query, key, value, seqlens, scaling, causal=False), None


def _lengths(borders: Tensor, device: torch.device) -> SequenceLengths:
    """Of borders (k + 1,), which all blocks of a forward share."""
    if not hasattr(borders, "seqlens"):
        _read(borders, device)
    return borders.seqlens


@torch.compiler.disable
def _between_graphs(query: Tensor, key: Tensor, value: Tensor, seqlens: SequenceLengths,
                    scaling: float | None) -> Tensor:
    return attend(query, key, value, seqlens, scaling, causal=False)


def on_host(integers: Mirrored) -> Tensor:
    """The same for torch.compile, which does not know what a tensor mirrors: borders (k + 1,) as a
    tensor of the host, with what blocks ask of them, and others as one of the device."""
    if integers.dim() != 1:
        return integers.there
    integers.host.seqlens = _lengths(integers, integers.device)
    return integers.host


@torch.compiler.disable
def _read(borders: Tensor, device: torch.device) -> None:
    """Waits for the device once, where transformers made them there."""
    borders.seqlens = SequenceLengths.from_lengths(np.diff(borders.tolist()), device)


AttentionInterface.register(NAME, attention_of_tower)
