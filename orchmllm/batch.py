"""One rank's tensors: an example as it was loaded, a batch as the model reads it, and between them
the record of a step on its way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from orchmllm.plan.layout import TEXT, BatchLayout
from orchmllm.plan.step import RankPlan, StepPlan

IGNORE_INDEX = -100
TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments that say which tokens are media
IN_ONE_ROW = "pixel_attention_mask"  # beside pixels that are one row of all media of an example
UNKNOWN = -1  # a number that a rank does not know
UNCOUNTED = (UNKNOWN, UNKNOWN)
PACKED, PADDED = 1, 2  # what a collated batch costs: the sum of its lengths, or n times the longest


def on_device(values: np.ndarray | Tensor, device: torch.device | str) -> Tensor:
    """`values` of the host on `device`, without waiting for it: through pinned memory on CUDA (the
    caching host allocator keeps it until the copy is done, and reuses it)."""
    tensor = torch.from_numpy(values) if isinstance(values, np.ndarray) else values
    device = torch.device(device)
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def on_this_device(work: Callable[..., None]) -> Callable[..., None]:
    """`work` for a new thread, which then has the current GPU of the thread that calls this. The
    current GPU is a thread's own, and a new thread would make a context on the first one."""
    if not torch.cuda.is_initialized():
        return work
    device = torch.cuda.current_device()

    def run(*args: Any) -> None:
        torch.cuda.set_device(device)
        work(*args)

    return run


@dataclass(frozen=True)
class ProcessedExample:
    """An example as a processor of transformers makes it, or the parts of it that a rank was asked
    to load.

    input_ids: (n,) int64. labels: (n,) int64, IGNORE_INDEX where nothing is learnt, not shifted.
    Both are None if the text was not asked for.
    media: the processor's other tensors by the name of the model's argument, with the shapes that
    it gives a batch of this one example (pixel_values, image_grid_thw, mm_token_type_ids (1, n),
    ...); of the parts of an example those that the text model reads. lengths: as planned.
    parts: segment index (within the example) -> the tensors of this medium alone, by the name of
    the model's argument, with the shapes of a batch of this one medium; of a medium that another
    rank decodes, what that rank loads it from. arguments: segment index of each medium -> the name
    of the argument that holds its content.
    """

    example_id: int
    input_ids: Tensor | None
    labels: Tensor | None
    media: dict[str, Tensor]
    lengths: BatchLayout
    parts: dict[int, Any] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=dict)


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
class PackedExamples:
    """A rank's whole examples of one microbatch, for a model of transformers.

    inputs: arguments of its forward by name: input_ids (1, R), position_ids and the media, one
    example after the other; those that are `read` stay on the host. kept (k,) int64: positions of
    the row whose next token is learnt, ascending; targets (k,) int64: those tokens. seqlens:
    lengths of the examples in the row.
    phases: encoder phase -> an orchmllm.encoders.planned.EncodedItems, what this rank encodes of
    it, for a model whose encoders are planned; without an entry the media are in `inputs`, or no
    rank has any. shared: an orchmllm.models.shared.SharedExamples where a rank of this node shares
    an example with others; the row then has pieces of examples, and seqlens are theirs. made: an
    orchmllm.models.made.MadeItems where any rank makes images.
    """

    inputs: dict[str, Tensor]
    kept: Tensor
    targets: Tensor
    seqlens: SequenceLengths
    phases: dict[str, Any] = field(default_factory=dict)
    shared: Any = None
    made: Any = None

    @property
    def read(self) -> dict[str, Tensor]:
        """Inputs whose values a forward reads: token ids, and what says how media divide. Not the
        positions and kinds of tokens, which go to blocks and masks."""
        return {name: value for name, value in self.inputs.items()
                if not (value.is_floating_point() or name in ("position_ids", *TYPES))}

    def to(self, device: torch.device) -> PackedExamples:
        """The same on the training device."""
        read = self.read
        there = replace(self, inputs={n: v for n, v in self.inputs.items() if n not in read}).moved(
            partial(on_device, device=device))
        return replace(
            there, inputs=there.inputs | read, made=self.made and self.made.to(device),
            seqlens=SequenceLengths.from_lengths(np.array(self.seqlens.lengths), device))

    def exchanged(self, group: Any) -> PackedExamples:
        """With the media that come from other ranks of a process group; collective."""
        return replace(self, made=self.made and self.made.exchanged(group), phases={
            name: items.exchanged(group) for name, items in self.phases.items()})

    def moved(self, move: Callable[[Tensor], Tensor]) -> PackedExamples:
        """With `move` of every tensor but the lengths."""
        return replace(
            self, inputs={name: move(value) for name, value in self.inputs.items()},
            kept=move(self.kept), targets=move(self.targets),
            shared=self.shared and self.shared.moved(move),
            made=self.made and self.made.moved(move),
            phases={name: items.moved(move) for name, items in self.phases.items()})

    def without_labels(self, lost: np.ndarray) -> PackedExamples:
        """On the host: nothing is learnt of the sequences where `lost` (n,) bool is true."""
        example = np.searchsorted(self.seqlens.host[1:].numpy(), self.kept.numpy(), side="right")
        stays = torch.from_numpy(~lost[example])
        return replace(self, kept=self.kept[stays], targets=self.targets[stays])


def joined(parts: Sequence[Tensor], dim: int) -> Tensor:
    """The tensors of several examples, (n, ...) each, one after the other along `dim`; the other
    dimensions are filled with zeros to the largest, which models cut away by the sizes that they
    are given."""
    sizes = [max(sizes) for sizes in zip(*(part.shape for part in parts), strict=True)]
    padded = []
    for part in parts:
        missing = [0 if d == dim else sizes[d] - part.shape[d] for d in range(part.dim())]
        padded.append(F.pad(part, [n for m in reversed(missing) for n in (0, m)])
                      if any(missing) else part)
    return torch.cat(padded, dim)


@dataclass(frozen=True)
class FailedSegment:
    """A segment whose medium could not be decoded; its rows are zeros, its example's labels are
    ignored. example: position in the global batch of the step. modality: the medium's; TEXT
    where the row failed as a whole."""

    example: int
    segment: int
    reason: str
    modality: int = TEXT


@dataclass
class Microbatch:
    """One microbatch: as planned, then with what was loaded. plan, and rank_plan, this rank's part;
    positions (n,): of its examples in the step's batch.

    content: the trainer's PackedExamples, on the CPU; ignored: positions (in the microbatch's
    layout) of examples without labels. Of a loader of whole examples: content is what collate_fn
    returned, num_targets its labels (see commit), geometry whether it is padded
    (PADDED, PACKED, or 0 where it does not show), seen: its longest example and the positions that
    this one has in it, labels_shape that of "labels".
    """

    plan: StepPlan
    rank_plan: RankPlan
    content: Any = None
    ignored: Sequence[int] = ()
    positions: np.ndarray | None = None
    num_targets: tuple[int, int] = UNCOUNTED
    geometry: int = 0
    seen: tuple[int, int] = (0, 0)
    labels_shape: tuple[int, ...] | None = None


@dataclass
class Step:
    """One optimizer step of k microbatches: as planned, then loaded, then agreed on.

    layout: of its global batch. num_global_targets: labels of all ranks and microbatches (failed
    examples excluded), None if some rank could not count its own; num_made_rows: of the images
    that are made, failed examples excluded; num_shifted_targets: of a
    model that shifts the labels itself (loaders of whole examples). failed: media that could not
    be decoded, of this rank until COMMIT, then of all. plan_s: seconds spent in agreements and
    planning. wait_s: seconds the caller waited. slowest: (seconds, dataset index) of the example
    that took this rank longest to load. state: of a stream of examples after the step;
    known: what a loader then knows of its batches.
    error: why it cannot be loaded. phases: figures of the plans (orchmllm.plan.step.phase_figures),
    of the trainer's steps. useful_flop: of the global batch, where the loader counts it
    (models.whole_flops.step_flops). geometry: of the batches of all ranks: PADDED if one of them
    is, else PACKED if one is that, else 0; seen (ranks, 2): that of the batch with the longest
    example of each.
    as_sampled: whether it is not balanced, to be compared with steps that are
    (balance.measure_every); kept_balanced: why it is balanced although it should not have been.
    loop: (index of an earlier step, microseconds that the slowest rank's loop took for it, or
    UNKNOWN as for the first ones).
    """

    index: int
    layout: BatchLayout
    micro: list[Microbatch] = field(default_factory=list)
    num_global_targets: int | None = None
    num_made_rows: int = 0
    num_shifted_targets: int | None = None
    failed: list[FailedSegment] = field(default_factory=list)
    geometry: int = 0
    seen: np.ndarray | None = None
    plan_s: float = 0.0
    wait_s: float = 0.0
    slowest: tuple[float, int] = (0.0, -1)
    state: Any = None
    known: dict[str, Any] = field(default_factory=dict)
    error: Exception | None = None
    as_sampled: bool = False
    kept_balanced: str = ""
    loop: tuple[int, int] = (0, UNKNOWN)
    phases: dict[str, dict[str, float]] = field(default_factory=dict)
    useful_flop: float = 0.0

    @cached_property
    def plans(self) -> list[StepPlan]:
        return [m.plan for m in self.micro]

    @property
    def example_ids(self) -> np.ndarray:
        """(n,) dataset indices of the global batch."""
        return self.layout.example_id

    @property
    def example_ids_of_rank(self) -> list[int]:
        """Dataset indices of what this rank's LLM processes."""
        return [i for m in self.micro for i in m.rank_plan.example_ids.tolist()]
