"""The memory of a whole model of transformers, predicted without weights: its shards, and what
autograd was counted to keep of its parts on tensors without memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchmllm.config.job import Job
from orchmllm.models.whole_flops import PartCounts, feature_width, part_counts
from orchmllm.sharding.activations import BlockBytes
from orchmllm.sharding.memory import Loads, MemoryModel


class WholeMemory(MemoryModel):
    """Of the units that are really sharded, and of parts measured without memory."""

    @classmethod
    def of(cls, job: Job, on_cpu: bool = False) -> WholeMemory:
        model = job.recipe.model
        # The folder still says that it is a whole model; widths and depths are those counted.
        counts = part_counts(model, job.recipe.fsdp.forward_dtype)
        parts = {part: replace(getattr(model, part), num_layers=len(found.blocks),
                               hidden_size=found.width) for part, found in counts.items()}
        parts["llm"] = replace(parts["llm"], vocab_size=counts["llm"].outputs)
        described = replace(model, **parts)
        return super().of(replace(job, recipe=replace(job.recipe, model=described)), on_cpu)

    @property
    def _counts(self) -> dict[str, PartCounts]:
        return part_counts(self.model, self.fsdp.forward_dtype)

    def _blocks(self, phase: str) -> list[BlockBytes]:
        if phase not in self._counts:
            return super()._blocks(phase)
        # The gradients of the largest tensor and of what it was made of; without a backward pass
        # nothing is there but for a moment.
        return [BlockBytes({"none": block.none, "selective": block.selective, "full": block.full},
                           block.none, 2 * block.largest, block.moved, block.repeated)
                for block in self._counts[phase].blocks]

    def _row_bytes(self, phase: str) -> int:
        """In float32, and as the forward pass casts it."""
        found = self._counts.get(phase)
        return found.row_values * (4 + self.element) if found else 0

    @property
    def _feature_bytes(self) -> float:
        return float(self.element * feature_width(self.model))

    def _around(self, phase: str, loads: Loads) -> np.ndarray:
        lengths = loads.phases[phase]
        if phase not in self._counts:
            return np.zeros(len(lengths.rows))
        found = self._counts[phase]
        kept = found.kept_row * lengths.rows + found.kept_position * lengths.positions
        if phase == "llm":  # and what the layers get
            kept = kept + lengths.tokens * self._feature_bytes
        return kept
