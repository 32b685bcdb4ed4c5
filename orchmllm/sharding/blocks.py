"""Transformer blocks that are computed again in the backward pass, each as it is told: also while a
run goes on, because what a block recomputes changes no result and no collective."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial, wraps

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orchmllm.config.fsdp import phase_counts
from orchmllm.models.whole_model import WholeModel


def keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Keeps what costs FLOPs: outputs of matrix products and of attention kernels."""
    name = str(op)
    product = name.startswith(("aten.mm", "aten.addmm", "aten.bmm", "aten._grouped_mm",
                               "transformers.grouped_mm")) or (
        "attention" in name or "varlen" in name)
    backward = "backward" in name
    return (CheckpointPolicy.MUST_SAVE if product and not backward
            else CheckpointPolicy.PREFER_RECOMPUTE)


OPTIONS = {  # of torch's checkpoint
    "full": {}, "selective": {
        "context_fn": partial(create_selective_checkpoint_contexts, keep_products)}}


class Recomputing:
    """Comes before the class of a block. recomputes: none, selective or full."""

    recomputes = "none"


@cache
def _recomputing(cls: type) -> type:
    @wraps(cls.forward)  # also by its arguments it is known what a block is given
    def forward(self, *args: object, **kwargs: object) -> object:
        if self.recomputes == "none":
            return cls.forward(self, *args, **kwargs)
        return checkpoint(partial(cls.forward, self), *args, use_reentrant=False,
                          preserve_rng_state=False, **OPTIONS[self.recomputes], **kwargs)

    return type(cls.__name__, (Recomputing, cls), {"forward": forward})


def recompute(model: WholeModel, choice: Mapping[str, str]) -> None:
    """Tells the blocks of all phases what they recompute from now on: the first ones of a phase
    everything, the last ones nothing. choice: phase -> see orchmllm.config.fsdp.layer_counts.
    Raises ValueError for `auto`, which orchmllm.sharding.fits has to decide before, and for more
    layers than there are."""
    for phase, stack in model.blocks().items():
        counts = phase_counts(phase, choice[phase], len(stack))
        kinds = [kind for kind in ("full", "selective", "none") for _ in range(counts[kind])]
        for block, kind in zip(stack, kinds, strict=True):
            if kind != "none" and not isinstance(block, Recomputing):
                block.__class__ = _recomputing(type(block))
            block.recomputes = kind
