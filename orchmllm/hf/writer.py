"""Safetensors files of a folder, written one after the other: no more than the tensors of one file
are in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from orchmllm.hf.folder import INDEX, SINGLE
from orchmllm.hf.sharded import FileTensor

if TYPE_CHECKING:
    from torch import Tensor

DTYPES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
TORCH_DTYPES = {short: name for name, short in DTYPES.items()}


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


def write_file(path: Path, tensors: Sequence[FileTensor]) -> None:
    """One safetensors file, with a bar on a terminal."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    shown = tqdm(tensors, path.name, unit=" tensors", disable=None, leave=False)
    loaded = {tensor.key: tensor.load() for tensor in shown}
    save_file(loaded, path, metadata={"format": "pt"})  # transformers asks for it


def write_folder(folder: Path, tensors: Sequence[FileTensor], max_file_bytes: int) -> int:
    """model.safetensors, or several files and their index where it would be larger than
    max_file_bytes; returns the number of files."""
    files: list[list[FileTensor]] = [[]]
    for tensor in tensors:
        if files[-1] and sum(t.num_bytes for t in files[-1]) + tensor.num_bytes > max_file_bytes:
            files.append([])
        files[-1].append(tensor)
    if len(files) == 1:
        write_file(folder / SINGLE, files[0])
        return 1
    names = [f"model-{k:05d}-of-{len(files):05d}.safetensors" for k in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write_file(folder / name, part)
    weights = {t.key: name for name, part in zip(names, files, strict=True) for t in part}
    total = sum(t.num_bytes for t in tensors)
    (folder / INDEX).write_text(json.dumps(
        {"metadata": {"total_size": total}, "weight_map": weights}, indent=1), encoding="utf-8")
    return len(files)
