"""The memory of a whole model of transformers, predicted without weights: its shards, and what
autograd was counted to keep of its parts on tensors without memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from orchmllm.config.job import Job
from orchmllm.models.whole_flops import PartCounts, feature_width, part_counts
from orchmllm.plan.layout import ENCODERS
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

    def _batch(self, loads: Loads) -> np.ndarray:
        """Pixels and frames in float32, and as the forward pass casts them."""
        out = loads.phases["llm"].tokens * 32.0
        for part in self._counts.keys() & ENCODERS.keys():
            out = out + loads.phases[part].rows * float(
                self._counts[part].row_values * (4 + self.element))
        return out

    def _features(self, phase: str, loads: Loads) -> np.ndarray:
        return loads.received[phase] * float(self.element * feature_width(self.model))

    def _exchange(self, phase: str, loads: Loads) -> np.ndarray:
        sent = loads.phases[phase].tokens * float(self.element * feature_width(self.model))
        return 2 * (sent + self._features(phase, loads))

    def _around(self, phase: str, loads: Loads) -> np.ndarray:
        lengths = loads.phases[phase]
        if phase not in self._counts:
            return np.zeros(len(lengths.rows))
        found = self._counts[phase]
        kept = found.kept_row * lengths.rows + found.kept_position * lengths.positions
        if phase == "llm":  # and what the layers get
            kept = kept + lengths.tokens * float(self.element * feature_width(self.model))
        return kept
