"""One rank's tensors: an example as it was loaded, and a batch as the model reads it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from orchmllm.plan.step import RankPlan

IGNORE_INDEX = -100


def on_device(values: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """`values` of the host on `device`, without waiting for it: through pinned memory on CUDA (the
    caching host allocator keeps it until the copy is done, and reuses it)."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


@dataclass(frozen=True)
class Example:
    """One example, or the parts of it that a rank was asked to load.

    token_ids, labels: (L,) int32 over the whole interleaved sequence, or None if the text was not
    asked for. token_ids is 0 at media positions; labels are already shifted (labels[t] is the
    token at t + 1) and IGNORE_INDEX where nothing is learnt.
    media: segment index (within the example) -> rows: images (rows, 3 * patch^2) uint8, audio
    (rows, num_mels) float32.
    """

    example_id: int
    token_ids: Tensor | None
    labels: Tensor | None
    media: dict[int, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class SequenceLengths:
    """Lengths of packed sequences, on both sides of the bus so that no step needs a sync.

    lengths: (n,) Python integers. cu_seqlens: (n + 1,) int32 on the device of the data. host: the
    same on the host, for what is compiled: numbers would be compiled in.
    """

    lengths: tuple[int, ...]
    cu_seqlens: Tensor
    host: Tensor

    @classmethod
    def from_lengths(cls, lengths: np.ndarray, device: torch.device | str = "cpu"):
        lengths = np.asarray(lengths, np.int64)
        cu = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        return cls(tuple(lengths.tolist()), on_device(cu, device), torch.from_numpy(cu))

    @property
    def max_seqlen(self) -> int:
        return max(self.lengths, default=0)

    @property
    def total(self) -> int:
        return sum(self.lengths)


@dataclass(frozen=True)
class Batch:
    """One rank's tensors for one microbatch, on the training device, and its part of the plan.

    inputs[m] (R_m, row_size): rows of the segments this rank encodes, in slot order; images uint8,
    audio float32. input_lengths[m]: their packing in rows. token_ids, labels (R_llm,) int64: the
    packed sequences of its LLM phase; text_lengths: their packing. position_ids (R_llm,) restart
    per example. scatter[m] (R_f,): where feature rows go.
    num_global_targets: labels of all ranks and microbatches of the step, the loss's denominator.
    """

    plan: RankPlan
    inputs: dict[str, Tensor]
    input_lengths: dict[str, SequenceLengths]
    token_ids: Tensor
    labels: Tensor
    text_lengths: SequenceLengths
    position_ids: Tensor
    scatter: dict[str, Tensor]
    num_global_targets: int
