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
# By their names, as neither library is imported here; those of TRL do not pad if `padding_free`.
PADDING_COLLATORS = {
    "DataCollatorWithPadding", "DataCollatorForTokenClassification", "DataCollatorForSeq2Seq",
    "DataCollatorForLanguageModeling", "DataCollatorForMultipleChoice",
    "DataCollatorForPreference", "DataCollatorForVisionPreference",
    "DataCollatorForVisionLanguageModeling"}


def collator_pads(collator: Any) -> bool:
    """Whether it is known to pad a batch to its longest example: a collator of transformers or TRL,
    or of a subclass."""
    known = any(c.__module__.split(".")[0] in ("transformers", "trl")
                and c.__name__ in PADDING_COLLATORS for c in type(collator).__mro__)
    return (known and not getattr(collator, "padding_free", False)
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
        if self._done or not plan.spec.balance.enabled or plan.layout.num_ranks == 1:
            return
        lengths = plan.layout.tokens_per_example[micro.rank_plan.examples]
        padded = next((v for v in _values(batch) if _is_padded(v, lengths)), None)
        if padded is None:
            return
        self._done = True
        text = (f"collate_fn pads: examples of lengths {lengths.tolist()[:8]} became a tensor of "
                f"shape {tuple(padded.shape)}, which costs their number times the longest, and the "
                "default policy evens out sums of lengths, so that steps can take longer than "
                "without it: give policy='padded', or policy='least_move' if the model computes "
                "no padding")
        if self._first >= 0:
            raise ValueError(text)
        log.warning(text)


def _values(batch: Any) -> list[Any]:
    if isinstance(batch, Mapping):
        return list(batch.values())
    if isinstance(batch, list | tuple):
        return list(batch)
    return [batch, *getattr(batch, "__dict__", {}).values()]


def _is_padded(value: Any, lengths: np.ndarray) -> bool:
    """Whether a tensor (n, T, ...) holds the n examples at the length of the longest: some more for
    special tokens and multiples of 8, not any size, as lengths may have another unit."""
    if not isinstance(value, Tensor) or value.dim() < 2 or len(value) != len(lengths) or (
            not len(lengths)):
        return False
    longest, size = int(lengths.max()), value.shape[1]
    return longest <= size <= 1.25 * longest + 8 and size * len(lengths) > 1.1 * lengths.sum()
