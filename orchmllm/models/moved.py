"""What the parts of a model read and write outside of matrix products and attention: norms,
activations, rotations, conversions and the loss. These kernels take as long as their bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache

import numpy as np

from orchmllm.config.model import ModelConfig
from orchmllm.counts.kept import kept
from orchmllm.models.spec import spec_of

Line = np.ndarray  # (2, n): bytes of the forward and of the backward pass, by what they grow with


def moved_by_parts(model: ModelConfig, dtype: str) -> dict[str, Line]:
    """See moved_by."""
    def count() -> dict:
        from orchmllm.models.counting_parts import count_parts  # with torch

        return count_parts(model, dtype)

    return {phase: np.array([[once, 0.0, position] for once, position in both])
            for phase, both in kept(["moved", asdict(model), dtype], count).items()}


@lru_cache(maxsize=64)
def moved_by(model: ModelConfig, dtype: str) -> Mapping[str, Line]:
    """Phase that the model has -> (2, 3) bytes: once, of a row (patches, frames, targets) and of a
    position. Without the head and its loss, and with nothing recomputed. dtype: of forward and
    backward. Raises ValueError where they cannot be counted."""
    return spec_of(model).moved(model, dtype)


@lru_cache(maxsize=64)
def moved_by_head(model: ModelConfig, dtype: str, chunk_rows: int) -> Line:
    """(2, 2) bytes of the head's loss: once, and of a row of logits. chunk_rows: of the loss."""
    shape = [model.llm.hidden_size, model.llm.vocab_size, chunk_rows, dtype,
             not (model.llm.frozen or model.lora.rank)]

    def count() -> list:
        from orchmllm.models.counting_parts import count_head

        return count_head(*shape)

    return np.array(kept(["head", *shape], count))
