"""Tiny models of transformers, whole examples for them, and stock transformers as the reference:
one example after the other, without packing."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import IGNORE_INDEX, ProcessedExample
from orchmllm.models.families import FAMILIES as ADMITTED  # noqa: F401
from orchmllm.plan.geometry import SegmentLengths, text_lengths
from orchmllm.plan.layout import TEXT as TEXT_SEGMENT
from orchmllm.plan.layout import VISION, BatchLayout
from tests.lib.encoder_models import FAMILIES, IMAGE, Family, Item, batch

TEXT = ("input_ids", "attention_mask", "labels", "mm_token_type_ids", "token_type_ids")
EXACT = 1e-10  # of the largest gradient; float64
# Stock code that computes a part in float32.
LOOSE = dict.fromkeys(
    ("aya_vision", "gemma3", "glm4v", "glm4v_moe", "qwen3_5", "qwen3_5_moe"), 1e-7)


def family_of(name: str) -> Family:
    return FAMILIES[name]


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return FAMILIES[name].build()


def sample(name: str, model: nn.Module, items: Sequence[Item], seed: int) -> dict[str, Any]:
    """Arguments of stock forward for one example."""
    return batch(FAMILIES[name], model, list(items), seed)


def as_example(i: int, inputs: dict[str, Any]) -> ProcessedExample:
    """The same for the trainer."""
    count = inputs["input_ids"].shape[1]
    media = {k: v for k, v in inputs.items() if k not in TEXT}
    images = int((inputs["input_ids"] == IMAGE).sum())
    lengths = BatchLayout.from_segments(i, int((shifted(inputs) != IGNORE_INDEX).sum()), [
        (TEXT_SEGMENT, text_lengths(count - images)),
        *[(VISION, SegmentLengths(4 * images, 4 * images, images, (1, 2, 2 * images)))] * (
            images > 0)])
    return ProcessedExample(i, inputs["input_ids"][0], inputs["labels"][0], media, lengths)


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




class WholeDataset:
    """Example i of a family, with media or without."""

    def __init__(self, name: str, model: nn.Module, size: int) -> None:
        kind = next(iter(FAMILIES[name].make))
        g = torch.Generator().manual_seed(1)
        self.inputs = []
        for i in range(size):
            count = int(torch.randint(0, 4, (), generator=g)) if i % 4 else 0
            items = [Item(kind, int(n)) for n in torch.randint(0, 6, (count,), generator=g)]
            self.inputs.append(sample(name, model, items, 50 + i))

    def __len__(self) -> int:
        return len(self.inputs)

    def split(self, num_validation: int) -> tuple[range, range]:
        kept = len(self) - num_validation
        return range(kept), range(kept, len(self))

    def fingerprint(self) -> dict:
        return {"rows": len(self)}

    def describe(self, i: int, segment: int) -> dict:
        return {"source": "made", "row": i + 1, "data_file": "made", "file": f"{i}"}

    def layout(self, i: int) -> BatchLayout:
        return self.load(i).lengths

    def load(self, i: int, on_error=None) -> ProcessedExample:
        return as_example(i, self.inputs[i])
