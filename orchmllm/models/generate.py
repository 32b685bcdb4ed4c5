"""Answers of a model of transformers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def generated(hf: nn.Module, inputs: Mapping[str, Any], **options: Any) -> list[int]:
    """The token ids that a model of transformers writes after input_ids (1, n). inputs: what a
    processor makes of one example, by the argument of the model. options: of its generate."""
    ids = inputs["input_ids"]
    out = hf.generate(**{"attention_mask": torch.ones_like(ids), **inputs}, **options)
    return out[0, ids.shape[1]:].tolist()
