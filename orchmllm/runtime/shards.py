"""The files of a checkpoint's tensors: what a rank writes of them, and how they are read on any
number of ranks. They have the format of torch's HuggingFaceStorageWriter.

No rank hears of what another one writes or reads. torch.distributed.checkpoint would gather that on
rank 0 and plan it there in Python: for all tensors of all ranks, beside the training of the rank
that all others wait for."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

SAFETENSORS = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
    torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8"}


def local_parts(tensors: Mapping[str, Tensor], first: bool) -> dict[str, Tensor]:
    """This rank's part of each tensor (of any shape), which shares its memory, without parts that
    are empty where the tensor is not. first: of the ranks that save it is the first one, which
    alone saves tensors that are not sharded."""
    parts = {name: (x.to_local() if isinstance(x, DTensor) else x).detach()
             for name, x in tensors.items() if first or isinstance(x, DTensor)}
    return {name: part for name, part in parts.items()
            if part.numel() or not tensors[name].numel()}


def write_shard(folder: Path, number: int, tensors: Mapping[str, Tensor],
                parts: Mapping[str, Tensor]) -> Path:
    """Writes `parts`, as `local_parts` gives them, of `tensors` of any shapes, which are looked at
    for their places alone, and returns the file's path. number: of this file, from 1."""
    path = _path(folder, number)
    write_safetensors(path, parts, {
        "DCP_SHARDING_INFO": json.dumps(
            {name: {"saved_offsets": _offsets(tensors[name])} for name in parts}),
        "DCP_VERSION": "1.0", "format": "pt"})
    return path


def _path(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05d}-model-00001-of-00001.safetensors"


def _offsets(tensor: Tensor) -> list[int]:
    """Where this rank's part begins in the whole tensor, by dimension."""
    if not isinstance(tensor, DTensor):
        return [0] * tensor.dim()
    return list(compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements)[1])


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
    """A file in the safetensors format of tensors of any shape; at most one is copied at a time.
    Raises KeyError for a dtype that no checkpoint has."""
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header, end = {"__metadata__": metadata}, 0
    for name, x in ordered:  # the larger elements first, so that all are aligned
        header[name] = {"dtype": SAFETENSORS[x.dtype], "shape": list(x.shape),
                        "data_offsets": [end, end + x.nbytes]}
        end += x.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for _, x in ordered:
            f.write(x.cpu().contiguous().flatten().view(torch.uint8).numpy())


def fill(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors (of any shapes, by their names there) in place from the files of a folder,
    whatever the number of ranks that saved them. A rank opens the files that have its parts if each
    file has one chunk of a tensor, as FSDP2 cuts it. What is not found so torch looks for, which
    reads the headers of all files. Raises RuntimeError where a tensor is missing, and ValueError
    where this rank's part of it has another shape."""
    parts, found = local_parts(tensors, first=True), {}
    num_files = max(1, len([*folder.glob("shard-*.safetensors")]))
    files = {k for name in parts for k in _files(tensors[name], parts[name], num_files)}
    for number in sorted(files):
        with safe_open(_path(folder, number), "pt") as file:
            there = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in parts.keys() & there.keys():
                saved, begins = file.get_slice(name), there[name]["saved_offsets"]
                if (begins, saved.get_shape()) == _chunk(tensors[name], number, num_files):
                    found[name] = found.get(name, 0) + _copy(
                        saved, begins, tensors[name], parts[name])
    rest = {name: tensors[name] for name, part in parts.items() if found.get(name) != part.numel()}
    if not rest:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp.load(rest, no_dist=True, storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as e:  # a BaseException around what was raised
            raise next(iter(e.failures.values()))[0] from e


def _dim(tensor: Tensor) -> int | None:
    """The dimension in which a tensor is cut; None of one that is whole."""
    placements = tensor.placements if isinstance(tensor, DTensor) else ()
    return next((p.dim for p in placements if p.is_shard()), None)


def _chunk(tensor: Tensor, number: int, num_files: int) -> tuple[list[int], list[int]]:
    """(where the part of a file begins in the whole tensor, its shape)."""
    begins, shape = [0] * tensor.dim(), list(tensor.shape)
    if (dim := _dim(tensor)) is not None:
        length = -(-shape[dim] // num_files)
        begins[dim] = min((number - 1) * length, shape[dim])
        shape[dim] = min(length, shape[dim] - begins[dim])
    return begins, shape


def _files(tensor: Tensor, part: Tensor, num_files: int) -> range:
    """The numbers of the files that have a part of what this rank has."""
    dim = _dim(tensor)
    if dim is None or not part.numel():
        return range(1, 2)
    first, length = _offsets(tensor)[dim], -(-tensor.shape[dim] // num_files)
    return range(1 + first // length, 2 + (first + part.shape[dim] - 1) // length)


def _copy(saved: Any, begins: list[int], tensor: Tensor, part: Tensor) -> int:
    """Copies what a saved part has of this rank's and returns how many numbers these are."""
    if (dim := _dim(tensor)) is None:
        part.copy_(saved[...])
        return part.numel()
    here, there = _offsets(tensor)[dim], begins[dim]
    first, end = max(here, there), min(here + part.shape[dim], there + saved.get_shape()[dim])
    if first >= end:
        return 0
    rows = part.narrow(dim, first - here, end - first)
    rows.copy_(saved[(slice(None),) * dim + (slice(first - there, end - there),)])
    return rows.numel()
