"""What crosses the wire before any data does: the lengths of a global batch.

Objective: all that planning has to know of a batch, in few bytes, and none of its data.

Flow: media header -> SegmentLengths -> BatchLayout of an example -> of a rank -> gathered -> plan.

Invariants: `BatchLayout` holds the lengths of all examples of a global batch and is identical on
all ranks after the gather (OrchMLLM section 6, "a structure to record some details"). Examples are
in the order of (sampling rank, example), segments of an example in reading order. What arrives is
what was sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from orchmllm.plan.balance import core
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.plan.rearrange import ranges, sums_of

TEXT, VISION, AUDIO, MADE = range(4)  # MADE: an image that the model makes
MODALITIES = {"text": TEXT, "vision": VISION, "audio": AUDIO, "made": MADE}
ENCODERS: dict[str, int] = {"vision": VISION, "audio": AUDIO}  # fixed order of the encoder phases
GENERATOR = "generator"  # the phase after the LLM
OF_MEDIA = {**ENCODERS, GENERATOR: MADE}  # phases whose items are segments


@dataclass(frozen=True)
class BatchLayout:
    """Lengths of a global batch of n examples and s segments on d ranks, in source order
    (sampling rank, example, segment). All arrays are int64.

    example_id (n,), examples_per_rank (d,), num_targets (n,), segments_per_example (n,);
    per segment modality (s,), rows (s,), attn_len (s,), num_tokens (s,), grid (s, 3).
    """

    example_id: np.ndarray
    examples_per_rank: np.ndarray
    num_targets: np.ndarray
    segments_per_example: np.ndarray
    modality: np.ndarray
    rows: np.ndarray
    attn_len: np.ndarray
    num_tokens: np.ndarray
    grid: np.ndarray

    def __post_init__(self) -> None:
        n, s = len(self.example_id), len(self.modality)
        if int(self.examples_per_rank.sum()) != n:
            raise ValueError(f"examples_per_rank sums to {self.examples_per_rank.sum()}, not {n}")
        if int(self.segments_per_example.sum()) != s:
            raise ValueError(f"segments_per_example sums to {self.segments_per_example.sum()}, "
                             f"but there are {s} segments")

    @classmethod
    def from_table(
        cls, example_id: np.ndarray, num_targets: np.ndarray, segments_per_example: np.ndarray,
        table: np.ndarray, examples_per_rank: Sequence[int] | None = None,
    ) -> BatchLayout:
        """table: (s, 7) int64, a segment's modality, rows, attn_len, num_tokens and grid. Without
        `examples_per_rank` the examples all sit on one rank."""
        counts = [len(example_id)] if examples_per_rank is None else examples_per_rank
        return cls(example_id, np.asarray(counts, np.int64), num_targets, segments_per_example,
                   *table[:, :4].T.copy(), table[:, 4:])

    @classmethod
    def from_segments(
        cls, example_id: int, num_targets: int, segments: Sequence[tuple[int, SegmentLengths]]
    ) -> BatchLayout:
        """That of one example. segments: (modality, lengths) in reading order; num_targets: labels
        left after shift and truncation."""
        table = np.array([(m, s.rows, s.attn_len, s.num_tokens, *s.grid) for m, s in segments],
                         np.int64).reshape(len(segments), 7)
        return cls.from_table(*np.array([[example_id], [num_targets], [len(segments)]], np.int64),
                              table)

    @classmethod
    def concat(
        cls, parts: Sequence[BatchLayout], examples_per_rank: Sequence[int] | None = None
    ) -> BatchLayout:
        """The examples of `parts` one after the other, and so their ranks; examples_per_rank: they
        are on other ranks, which hold so many each."""
        joined = {f.name: np.concatenate([getattr(part, f.name) for part in (NO_EXAMPLES, *parts)])
                  for f in fields(cls)}
        if examples_per_rank is not None:
            joined["examples_per_rank"] = np.asarray(examples_per_rank, np.int64)
        return cls(**joined)

    @cached_property
    def num_examples(self) -> int:
        return len(self.example_id)

    @cached_property
    def num_ranks(self) -> int:
        return len(self.examples_per_rank)

    @cached_property
    def rank_of_example(self) -> np.ndarray:
        """(n,) sampling rank of each example."""
        return np.repeat(np.arange(self.num_ranks), self.examples_per_rank)

    @cached_property
    def example_of_segment(self) -> np.ndarray:
        """(s,) position in the batch (not the dataset index) of each segment's example."""
        return np.repeat(np.arange(self.num_examples), self.segments_per_example)

    @cached_property
    def segment_start(self) -> np.ndarray:
        """(n + 1,) first segment of each example."""
        return np.concatenate([[0], np.cumsum(self.segments_per_example)])

    @cached_property
    def tokens_per_example(self) -> np.ndarray:
        """(n,) length of the whole interleaved sequence, media tokens included."""
        return sums_of(self.num_tokens, self.segments_per_example)

    def item_lengths(self, phase: str) -> np.ndarray:
        """Length of each item of a phase (segments, or the LLM's examples) in source order, as its
        cost model takes it."""
        if phase == "llm":
            return self.tokens_per_example
        return self.attn_len[self.segments[OF_MEDIA[phase]]]

    def item_owner(self, phase: str) -> np.ndarray:
        """Example of each item of a phase, as item_lengths orders them."""
        if phase == "llm":
            return np.arange(self.num_examples)
        return self.example_of_segment[self.segments[OF_MEDIA[phase]]]

    @cached_property
    def segments(self) -> list[np.ndarray]:
        """By modality, the indices of its segments, in source order."""
        return [np.flatnonzero(self.modality == m) for m in MODALITIES.values()]

    @cached_property
    def items_per_example(self) -> list[np.ndarray]:
        """By modality, (n,) segments of it in each example."""
        return [sums_of((self.modality == m).astype(np.int64), self.segments_per_example)
                for m in MODALITIES.values()]

    @cached_property
    def conditions(self) -> np.ndarray:
        """(k,) tokens of each image that is made and of what is before it in its example, in source
        order: positions of the LLM whose states it is made from."""
        made = self.segments[MADE]
        before = np.concatenate([[0], np.cumsum(self.num_tokens)])
        return before[made + 1] - before[self.segment_start[self.example_of_segment[made]]]

    def in_order(self, num_microbatches: int) -> np.ndarray:
        """(n,) microbatch of each example, where every rank's share is cut in order."""
        sizes = self.examples_per_rank
        slot = np.arange(self.num_examples) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return slot * num_microbatches // sizes[self.rank_of_example]

    def places(self, segments: np.ndarray) -> np.ndarray:
        """(k, 2) [position of the example in the batch, segment within it] of k segments."""
        example = self.example_of_segment[segments]
        return np.stack([example, segments - self.segment_start[example]], axis=1)

    def select(self, keep: np.ndarray) -> BatchLayout:
        """The examples where `keep` (n,) bool is true, on the same ranks."""
        counts = np.bincount(self.rank_of_example[keep], minlength=self.num_ranks)
        return self.taken(np.flatnonzero(keep), counts)

    def taken(self, index: np.ndarray, examples_per_rank: np.ndarray) -> BatchLayout:
        """The examples `index` (n,), in that order, on ranks that hold so many each."""
        per_segment = ranges(self.segment_start[index], self.segments_per_example[index])
        parts = {f.name: getattr(self, f.name)[
            index if f.name in ("example_id", "num_targets", "segments_per_example")
            else per_segment] for f in fields(self) if f.name != "examples_per_rank"}
        return BatchLayout(**parts, examples_per_rank=np.asarray(examples_per_rank, np.int64))

    def split_ranks(self, size: int) -> Iterator[BatchLayout]:
        """Consecutive groups of `size` ranks, each as a batch of its own."""
        ends = np.concatenate([[0], np.cumsum(self.examples_per_rank)])
        for first in range(0, self.num_ranks, size):
            e0, e1 = ends[first], ends[min(first + size, self.num_ranks)]
            yield self.taken(np.arange(e0, e1), self.examples_per_rank[first: first + size])

    def to_payload(self) -> np.ndarray:
        """(words,) int64: this layout as it travels; how many examples and segments it has travels
        in the gather's header. Dataset indices take a word each, lengths half a word, or a word
        where one of this rank's needs that."""
        segments = np.column_stack(
            [self.modality, self.rows, self.attn_len, self.num_tokens, self.grid])
        lengths = np.concatenate([self.num_targets, self.segments_per_example, segments.ravel()])
        if lengths.max(initial=0) < 2**31:
            even = np.append(lengths, np.zeros(len(lengths) % 2, np.int64))
            lengths = even.astype(np.int32).view(np.int64)
        return np.concatenate([self.example_id, lengths])

    @classmethod
    def from_payloads(
        cls, payloads: np.ndarray, num_words: np.ndarray, num_examples: np.ndarray,
        num_segments: np.ndarray,
    ) -> BatchLayout:
        """Inverse of `to_payload` for those of d ranks. payloads: (d, at least as many) int64;
        num_words, num_examples, num_segments: (d,)."""
        counts = np.stack([num_words, num_examples, num_segments])
        example_id, num_targets, segments_per_example, columns, grid = core().read_payloads(
            payloads, *counts)
        return cls(example_id, counts[1], num_targets, segments_per_example, *columns, grid)


NO_EXAMPLES = BatchLayout(*np.zeros((8, 0), np.int64), np.zeros((0, 3), np.int64))  # and no ranks
