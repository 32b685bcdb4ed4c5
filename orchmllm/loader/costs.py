"""What an example costs a model by its length: FLOPs counted on a copy that holds no numbers."""

from __future__ import annotations

import copy
import logging
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.plan.cost import CostModel

log = logging.getLogger("orchmllm.loader")
FORWARD_BACKWARD = 3  # the backward pass of a product is two products of the same size
LENGTHS = (64, 128, 256)  # the cost is fitted to the last two and has to predict the first


def cost_of(model: nn.Module) -> CostModel:
    """The cost of an example of so many tokens, in FLOP: give it to BalancedDataLoader as `phases`;
    balance_trainer does so itself.

    The FLOPs of three lengths are counted on a copy of the model that holds no numbers: of
    transformers' models, also where they are sharded or have adapters, one made from their
    configuration. Routed experts count as often as a token uses them, causal attention half of its
    square, a sliding window as far as it reaches (beside layers without one as if every position
    saw all of it), the gradients of frozen weights not. The text of a vision-language model is
    counted, its encoders are not (see balance_encoders).
    Raises ValueError, with the reason, where the cost cannot be known so: for a model that needs
    more than `input_ids` of shape (1, length), as one with an encoder and a decoder does, one that
    reads numbers, and one whose FLOPs are not quadratic in the length."""
    model = getattr(model, "get_base_model", lambda: model)()  # of an adapter
    with FakeTensorMode() as mode, torch.no_grad():
        try:
            hollow = _hollow(model, mode).eval()
            counts = [_count(hollow, length) for length in LENGTHS]
        except Exception as error:  # whatever the model's own code raises
            raise ValueError(f"the FLOPs of {type(model).__name__} cannot be counted by its "
                             f"input_ids alone: {error!r}; give phases=CostModel(...)") from error
    if not counts[-1].get("Global"):
        raise ValueError(f"{type(model).__name__} has no product whose FLOPs can be counted; give "
                         "phases=CostModel(...)")
    linear, quadratic = _fit(counts, "Global")
    layers = []  # (FLOP per pair of positions, pairs of a position; 0: all)
    for name, module in hollow.named_modules():
        name = f"{type(hollow).__name__}.{name}"
        if hasattr(module, "is_causal") and counts[-1].get(name):
            _, pairs = _fit(counts, name)
            quadratic, share = quadratic - pairs, 2 if module.is_causal else 1
            layers.append((pairs / share, share * _window(module, getattr(hollow, "config", None))))
    window = layers[0][1] if len({w for _, w in layers}) == 1 else 0
    linear += sum(pairs * w for pairs, w in layers if w != window)
    quadratic += sum(pairs for pairs, w in layers if w == window)
    learnt = sum(p.numel() for p in model.parameters() if p.requires_grad) / sum(
        p.numel() for p in model.parameters())
    return CostModel(round((FORWARD_BACKWARD - 1 + learnt) * linear),
                     round(FORWARD_BACKWARD * quadratic), window=window)


def known_cost(model: nn.Module) -> CostModel | None:
    """cost_of(model); None, with a line in the log, where it cannot be known."""
    try:
        return cost_of(model)
    except ValueError as error:
        log.info("an example costs its length: %s", error)
        return None


def _hollow(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose tensors have shapes alone. Raises what copying raises."""
    made = next((c for c in type(model).__mro__ if hasattr(c, "from_pretrained")
                 and not issubclass(c, FSDPModule)), None)
    if made is None:
        tensors = chain(model.parameters(), model.buffers())
        return copy.deepcopy(model, {id(t): mode.from_tensor(t) for t in tensors})
    config = copy.deepcopy(model.config)
    config._attn_implementation = "eager"  # whose products are counted
    config._experts_implementation = "batched_mm"  # those that a token uses
    return made(config)


def _count(model: nn.Module, length: int) -> dict[str, int]:
    """FLOP of a forward pass, by the name of each module."""
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, length, dtype=torch.long))
    return {name: sum(of.values()) for name, of in counter.get_flop_counts().items()}


def _fit(counts: list[dict[str, int]], name: str) -> tuple[float, float]:
    """FLOP of a module per position and per squared position. Raises ValueError if it has other
    ones."""
    first, one, two = (count[name] / n for count, n in zip(counts, LENGTHS, strict=True))
    quadratic = (two - one) / (LENGTHS[2] - LENGTHS[1])
    linear = one - quadratic * LENGTHS[1]
    if abs(linear + quadratic * LENGTHS[0] - first) > 0.02 * first or min(linear, quadratic) < 0:
        raise ValueError(f"{name}: its FLOPs, {[c[name] for c in counts]} for {LENGTHS} positions, "
                         "are not linear and quadratic in the length; give phases=CostModel(...)")
    return linear, quadratic


def _window(module: nn.Module, config: Any) -> int:
    """Positions that a layer's attention reaches back; 0: all."""
    if hasattr(module, "sliding_window"):
        return module.sliding_window or 0
    of_all = getattr(config, "layer_types", None) is None
    return of_all and getattr(config, "sliding_window", None) or 0
