"""What an example costs a model by its length: FLOPs counted on a copy that holds no numbers."""

from __future__ import annotations

import copy
import logging
from collections import Counter
from itertools import chain

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_leaves

from orchmllm.counts import masks
from orchmllm.counts.counted import Counted, Seen, fitted
from orchmllm.plan.cost import CostModel

log = logging.getLogger("orchmllm.loader")
LENGTHS = (64, 128, 192, 320)  # the cost is fitted to three and has to predict the last


def cost_of(model: nn.Module) -> CostModel:
    """The cost of an example of so many tokens, in FLOP: give it to BalancedDataLoader as `phases`;
    balance_trainer does so itself.

    The FLOPs of four lengths are counted on a copy of the model that holds no numbers: of
    transformers' models, also where they are sharded or have adapters, one made from their
    configuration. Routed experts count as often as a token uses them, causal attention half of its
    square, a sliding window as far as it reaches (beside layers without one as if every position
    saw all of it), the gradients of frozen weights not. The text of a vision-language model is
    counted, its encoders are not (see balance_encoders).
    Raises ValueError, with the reason, where the cost cannot be known so: for a model that needs
    more than `input_ids` of shape (1, length), as one with an encoder and a decoder does, one that
    reads numbers, and one whose FLOPs are not quadratic in the length."""
    model = getattr(model, "get_base_model", lambda: model)()  # of an adapter
    try:
        products, pairs = _count(_hollow(model).eval())
    except Exception as error:  # whatever the model's own code raises
        raise ValueError(f"the FLOPs of {type(model).__name__} cannot be counted by its "
                         f"input_ids alone: {error!r}; give phases=CostModel(...)") from error
    if not any(products):
        raise ValueError(f"{type(model).__name__} has no product whose FLOPs can be counted; give "
                         "phases=CostModel(...)")
    _, linear, quadratic = fitted(LENGTHS, products)
    spans: Counter[int] = Counter({0: quadratic} if quadratic else {})
    for seen, flop in pairs.items():  # a causal position sees half as many
        spans[2 * seen.reach] += flop / (2 if seen.causal else 1)
    window = next(iter(spans)) if len(spans) == 1 else 0
    linear += sum(flop * span for span, flop in spans.items() if span != window)
    return CostModel(round(linear), round(spans[window]), window=window)


def known_cost(model: nn.Module) -> CostModel | None:
    """cost_of(model); None, with a line in the log, where it cannot be known."""
    try:
        return cost_of(model)
    except ValueError as error:
        log.info("an example costs its length: %s", error)
        return None


def _hollow(model: nn.Module) -> nn.Module:
    """A copy whose tensors have shapes alone. Raises what copying raises."""
    made = next((c for c in type(model).__mro__ if hasattr(c, "from_pretrained")
                 and not issubclass(c, FSDPModule)), None)
    if made is None:
        tensors = chain(model.parameters(), model.buffers())
        return copy.deepcopy(model, {id(t): _without_numbers(t) for t in tensors})
    config = copy.deepcopy(model.config)
    config._attn_implementation, config.use_cache = masks.NAME, False
    config._experts_implementation = "batched_mm"  # those that a token uses
    with torch.device("meta"):
        out = made(config)
    learns = {name.replace(".base_layer.", "."): p.requires_grad
              for name, p in model.named_parameters()}
    for name, p in out.named_parameters():
        p.requires_grad_(learns.get(name, True))
    return out


def _without_numbers(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, nn.Parameter):
        return tensor.to("meta") if tensor.is_floating_point() else tensor
    return nn.Parameter(tensor.detach().to("meta"), tensor.requires_grad)


def _count(model: nn.Module) -> tuple[list[int], Counter[Seen]]:
    """(FLOP of products for each of LENGTHS, FLOP of a pair by what attention sees), of the forward
    and the backward pass."""
    blocks = max((m for m in model.modules() if isinstance(m, nn.ModuleList)), default=[],
                 key=lambda m: sum(p.numel() for p in m.parameters()))

    def run(n: int) -> None:
        out = tree_leaves(model(input_ids=torch.zeros(1, n, dtype=torch.long, device="meta")))
        learnt = [t for t in out if isinstance(t, Tensor) and t.requires_grad]
        if learnt:
            torch.autograd.backward(learnt, [torch.empty_like(t) for t in learnt])

    reaches = None
    if len(blocks):
        blocks[0].register_forward_pre_hook(masks.with_gradient, with_kwargs=True)
        config = getattr(model, "config", None)
        reaches = masks.reaches_of(
            blocks[0], run, getattr(config, "max_position_embeddings", None) or masks.ROW)
    products, pairs = [], Counter()
    for n in LENGTHS:
        with Counted(dict(enumerate(blocks)), reaches) as found:
            run(n)
        works = found.stages.values()
        products.append(sum(work.forward + work.backward for work in works))
        pairs = sum((Counter({seen._replace(length=0): flop for seen, flop in each.items()})
                     for work in works for each in (work.pairs, work.backward_pairs)), Counter())
    return products, pairs
