"""Tiny models of transformers, whole examples for them, and stock transformers as the reference:
one example after the other, without packing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX, Example
from orchmllm.models.families import FAMILIES as ADMITTED
from tests.lib.encoder_models import FAMILIES, Family, Item, batch

TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
EXACT = 1e-10  # of the largest gradient; float64
# Stock code that computes a part in float32.
LOOSE = dict.fromkeys(("aya_vision", "cohere2_vision", "gemma3"), 1e-7)


def family_of(name: str) -> Family:
    return FAMILIES[name]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name].build()


def sample(name: str, model: nn.Module, items: Sequence[Item], seed: int) -> dict[str, Any]:
    """Arguments of stock forward for one example."""
    return batch(FAMILIES[name], model, list(items), seed)


def as_example(i: int, inputs: dict[str, Any]) -> Example:
    """The same for the trainer."""
    return Example(i, inputs["input_ids"][0], shifted(inputs),
                   {k: v for k, v in inputs.items() if k not in TEXT})


def shifted(inputs: dict[str, Any]) -> Tensor:
    return F.pad(inputs["labels"][0, 1:], (0, 1), value=IGNORE_INDEX)


def stock_loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
    """Sum of the loss of one example, in the attention that the model was built with."""
    logits = model(**{k: v for k, v in inputs.items() if k != "labels"}, use_cache=False).logits[0]
    return F.cross_entropy(logits, shifted(inputs), ignore_index=IGNORE_INDEX, reduction="sum")


def stock(model: nn.Module, examples: Sequence[dict[str, Any]]) -> tuple[float, dict[str, Tensor]]:
    """Sum of the loss, and its gradient by parameter."""
    plain = copy.deepcopy(model)
    plain.zero_grad()
    loss = sum(stock_loss(plain, inputs) for inputs in examples)
    loss.backward()
    return float(loss.detach()), gradients(plain)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Zeros where a parameter has none."""
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in model.named_parameters()}


def difference(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest, over the largest gradient."""
    assert found.keys() == wanted.keys()
    size = max(float(g.abs().max()) for g in wanted.values())
    return max(float((found[n] - wanted[n]).abs().max()) for n in wanted) / size


__all__ = ["ADMITTED", "EXACT", "LOOSE", "Item", "as_example", "build", "difference", "family_of",
           "gradients", "sample", "shifted", "stock", "stock_loss"]
