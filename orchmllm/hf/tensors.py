"""Whole tensors of safetensors files: of a checkpoint's shard files, in which a tensor's rows lie
one file behind the other, and of the files that an export writes from them. No more than the
tensors of one file are in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from orchmllm.hf.folder import Stored, open_folder, read_header

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {short: name for name, short in DTYPES.items()}


@dataclass(frozen=True)
class FileTensor:
    """A tensor in files. key, dtype (as safetensors names it) and shape; load: reads it."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]


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
    return FileTensor(key, stored[0].dtype, shape, lambda: _rows(stored))


def _rows(chunks: Sequence[Stored]) -> Tensor:
    """All rows of a tensor. A file is opened for each part: its pages, mapped while they are read,
    count as memory."""
    import torch

    parts = []
    for chunk in chunks:
        with safe_open(chunk.file, framework="pt") as f:
            parts.append(f.get_tensor(chunk.key))
    return torch.cat(parts) if len(parts) > 1 else parts[0]


def renamed(tensor: FileTensor, key: str, shape: tuple[int, ...], dtype: str = "") -> FileTensor:
    """`tensor` under another name, in another shape of as many values, and converted to `dtype`
    unless empty. Raises ValueError if the number of values differs, and `load` if a value is too
    large for the dtype."""
    if math.prod(shape) != math.prod(tensor.shape):
        raise ValueError(f"{tensor.key} has shape {tensor.shape}, {key} needs {shape}: the "
                         "checkpoint is of another model")
    import torch

    name = TORCH_DTYPES[dtype or tensor.dtype]

    def converted() -> Tensor:
        values = tensor.load()
        out = values.to(getattr(torch, name))
        if out.isinf().any() and not values.isinf().any():
            raise ValueError(f"{tensor.key} has values that {name} does not have: export bfloat16 "
                             "or float32")
        return out.reshape(shape)

    return FileTensor(key, dtype or tensor.dtype, shape, converted)


def refuse_unequal(folder: Path, ties: Mapping[str, str]) -> None:
    """Raises ValueError where a folder has two tensors that `ties` (target -> source, of which the
    last two parts of the names count) make one, and they differ: transformers would keep both."""
    tensors = open_folder(folder)
    for names in ties.items():
        found = [[key for key in tensors if key.endswith(".".join(name.split(".")[-2:]))]
                 for name in names]
        if [len(keys) for keys in found] == [1, 1]:
            pair = [tensors[key] for [key] in found]
            first, second = (_rows([stored]) for stored in pair)
            if first.shape != second.shape or not first.equal(second.to(first.dtype)):
                raise ValueError(
                    f"{folder}: its config.json says tie_word_embeddings, but {pair[0].key} and "
                    f"{pair[1].key} differ: set it to false there (and in text_config), or delete "
                    f"{pair[0].key}")


def write_file(path: Path, tensors: Sequence[FileTensor]) -> None:
    """One safetensors file, with a bar on a terminal."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    shown = tqdm(tensors, path.name, unit=" tensors", disable=None, leave=False)
    loaded = {tensor.key: tensor.load() for tensor in shown}
    save_file(loaded, path, metadata={"format": "pt"})  # transformers asks for it
