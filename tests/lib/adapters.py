"""Models of transformers with adapters, here and by peft itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from orchmllm.config.model import LoraConfig, ModelConfig

ENDS = ("lora_A.default.weight", "lora_B.default.weight")


def lora_model(folder: Path, *frozen: str, **lora) -> ModelConfig:
    model = ModelConfig(pretrained=str(folder), lora=LoraConfig(**{"rank": 3, **lora}))
    return replace(model, **{p: replace(getattr(model, p), frozen=True) for p in frozen})


def drawn(name: str, weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(len(name) + sum(map(ord, name)))
    return torch.randn(tuple(weight.shape), generator=generator, dtype=torch.float64)


def by_peft(stock: nn.Module, model: ModelConfig, weights: dict[str, Tensor]) -> nn.Module:
    """Stock transformers with peft's own adapters, of the values of `weights`, which name the
    layers."""
    import peft

    made = peft.get_peft_model(stock, peft.LoraConfig(
        r=model.lora.rank, lora_alpha=model.lora.alpha, use_rslora=model.lora.use_rslora,
        target_modules=[name.split(".lora_A")[0] for name in weights if "lora_A" in name]))
    for name, parameter in made.get_base_model().named_parameters():
        learns = name in weights
        parameter.requires_grad_(learns)
        if learns:
            parameter.data = weights[name].clone()
    return made.get_base_model()


def as_tensors(found: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """What a rank returned: it ends before its tensors could be read."""
    return {name: torch.from_numpy(value) for name, value in found.items()}
