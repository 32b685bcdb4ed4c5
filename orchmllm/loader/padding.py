"""Whether collate pads: then a batch costs its number of examples times the longest, and a plan
that evens out the sums of lengths can make steps longer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from orchmllm.batch import Microbatch

log = logging.getLogger("orchmllm.loader")
_PADDING = {f"DataCollator{name}" for name in (  # of transformers and TRL
    "WithPadding", "ForTokenClassification", "ForSeq2Seq", "ForLanguageModeling", "ForPreference",
    "ForMultipleChoice", "ForVisionPreference", "ForVisionLanguageModeling")}


def collator_pads(collator: Any) -> bool:
    """Whether it is known to pad a batch to its longest example."""
    return (any(c.__name__ in _PADDING for c in type(collator).__mro__)
            and not getattr(collator, "padding_free", False)
            and getattr(collator, "padding", True) in (True, "longest"))


class PaddingWatch:
    """Compares the sizes of batches with the lengths that were planned, until one shows padding.
    Padding in the `first` batches, those of the first step, is an error, which all ranks raise
    before anything was trained; later it is a warning, as on ranks whose first batches held one
    example or equal lengths. first: 0 if nothing is compared, because the user chose a policy."""

    def __init__(self, first: int) -> None:
        self._first, self._done = first, not first

    def see(self, micro: Microbatch, batch: Any) -> None:
        """Raises ValueError."""
        self._first -= 1
        plan = micro.plan
        lengths = plan.layout.tokens_per_example[micro.rank_plan.examples]
        values = batch.values() if isinstance(batch, Mapping) else (
            batch if isinstance(batch, list | tuple) else [batch])
        padded = [v.shape for v in values if isinstance(v, Tensor) and _is_padded(v.shape, lengths)]
        if self._done or not padded or not plan.spec.balance.enabled or plan.layout.num_ranks == 1:
            return
        self._done = True
        text = (f"collate_fn pads: examples of lengths {lengths.tolist()[:8]} became a tensor of "
                f"shape {tuple(padded[0])}, which costs their number times the longest, and the "
                "default policy evens out sums of lengths, so that steps can take longer than "
                "without it: give policy='padded', or policy='least_move' if the model computes "
                "no padding")
        if self._first >= 0:
            raise ValueError(text)
        log.warning(text)


def _is_padded(shape: tuple[int, ...], lengths: np.ndarray) -> bool:
    """Whether a tensor (n, T, ...) holds n examples at the length of the longest: some more for
    special tokens and multiples of 8, not any size, as lengths may have another unit."""
    longest = int(lengths.max(initial=0))
    return (len(shape) > 1 and shape[0] == len(lengths) and longest <= shape[1] <= (
        1.25 * longest + 8) and shape[0] * shape[1] > 1.1 * lengths.sum())
