"""A checkpoint's shard files as whole tensors: a tensor's rows lie in several files, one behind the
other."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from orchmllm.hf.folder import ELEMENT_BYTES, Stored, read_header

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class FileTensor:
    """A tensor in files. key, dtype (as safetensors names it) and shape; load: reads it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def read_sharded(folder: Path) -> dict[str, FileTensor]:
    """key -> tensor of a checkpoint's safetensors files, as torch's Hugging Face storage writes
    them. Raises ValueError naming the file or tensor that is not sound."""
    chunks: dict[str, list[tuple[int, Stored]]] = {}
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder}: no safetensors in it: give a checkpoint of a run "
                         "(run.dir/checkpoints/step_...)")
    for file in files:
        metadata, tensors = read_header(file)
        places = json.loads(metadata.get("DCP_SHARDING_INFO", "{}"))
        for key, stored in tensors.items():
            offsets = places.get(key, {}).get("saved_offsets") or [0] * len(stored.shape)
            if any(offsets[1:]):
                raise ValueError(f"{file}: {key} is sharded by more than rows ({offsets})")
            chunks.setdefault(key, []).append((offsets[0] if offsets else 0, stored))
    return {key: _joined(key, found) for key, found in chunks.items()}


def _joined(key: str, chunks: list[tuple[int, Stored]]) -> FileTensor:
    chunks = sorted((c for c in chunks if c[1].num_bytes), key=lambda c: c[0]) or chunks[:1]
    row = 0
    for first, stored in chunks:
        if first != row or stored.shape[1:] != chunks[0][1].shape[1:] or (
                stored.dtype != chunks[0][1].dtype):
            raise ValueError(f"{stored.file}: {key} has rows from {first} on where row {row} is "
                             "next: the checkpoint is not complete")
        row += stored.shape[0] if stored.shape else 1
    stored = [chunk for _, chunk in chunks]
    shape = (row, *stored[0].shape[1:]) if stored[0].shape else ()
    return FileTensor(key, stored[0].dtype, shape, partial(_rows, stored))


def _rows(chunks: Sequence[Stored]) -> Tensor:
    """All rows of a tensor. A file is opened for each part: its pages, mapped while they are read,
    count as memory."""
    import torch

    parts = []
    for chunk in chunks:
        with safe_open(chunk.file, framework="pt") as f:
            parts.append(f.get_tensor(chunk.key))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
