"""Weights from Hugging Face folders into a sharded model: every rank reads its rows of every tensor
and nothing else, file after file, so that no process ever holds a full copy of anything.

The folders are checked by orchmllm.hf.sources; orchmllm.hf.export writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from orchmllm.comm.errors import AgreedError
from orchmllm.hf.folder import Stored
from orchmllm.hf.sources import WeightSource, fingerprint
from orchmllm.models.mllm import MultimodalModel
from orchmllm.sharding.init import local_rows

BLOCK_BYTES = 1 << 26  # copied (and converted) at a time


@torch.no_grad()
def load_pretrained(model: MultimodalModel, sources: Sequence[WeightSource]) -> None:
    """Copies the sources' tensors into the model's parameters, in place, converted to their dtype.

    model: whole or sharded (1-D or hybrid), with memory. Not collective: each rank reads alone.
    Raises OSError or ValueError if a file cannot be read any more."""
    parameters = dict(model.named_parameters())
    by_file: dict[Path, list[tuple[Tensor, Stored]]] = {}
    for source in sources:
        for name, stored in source.tensors.items():
            by_file.setdefault(stored.file, []).append((parameters[name], stored))
    for file, wanted in by_file.items():
        # Closed after each file: its pages, mapped while they are read, count as memory.
        with safe_open(file, framework="pt") as f:
            order = {key: k for k, key in enumerate(f.offset_keys())}
            for parameter, stored in sorted(wanted, key=lambda w: order[w[1].key]):
                _fill(parameter, f, stored)


def _fill(parameter: Tensor, file: safe_open, stored: Stored) -> None:
    """This rank's rows of one tensor."""
    local, first = local_rows(parameter)
    tensor = file.get_slice(stored.key)
    step = max(1, BLOCK_BYTES * max(stored.shape[0], 1) // max(stored.num_bytes, 1))  # rows
    for at in range(0, len(local), step):
        rows = local[at: at + step]
        rows.copy_(tensor[first + at: first + at + len(rows)])


def agreed_fingerprint(sources: Sequence[WeightSource],
                       gather: Callable[[Sequence[int]], np.ndarray]) -> int:
    """The fingerprint. gather: gives (d, n) for n numbers of each rank. Raises AgreedError on all
    ranks if they would shard different weights: nodes may each have a copy of a folder."""
    mine = fingerprint(sources)
    fingerprints = gather([mine])[:, 0]
    values, counts = np.unique(fingerprints, return_counts=True)
    if len(values) > 1:
        odd = np.flatnonzero(fingerprints != values[counts.argmax()]).tolist()
        raise AgreedError(
            f"pretrained weights: rank{'s' if len(odd) > 1 else ''} {', '.join(map(str, odd))} "
            f"read{'' if len(odd) > 1 else 's'} other weights than the rest: give every node the "
            "same copy of the folders")
    return mine
