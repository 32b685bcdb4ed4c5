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


def fill(folder: Path, tensors: Mapping[str, Tensor], number: int) -> None:
    """Fills tensors (of any shapes, by their names there) in place from the files of a folder,
    whatever the number of ranks that saved them. number: of the file that this rank would write;
    where that and the first one have its parts no other is opened, as torch reads the headers of
    all. Raises RuntimeError where one is missing, and ValueError where this rank's part of it has
    another shape."""
    parts = local_parts(tensors, first=True)
    for path in filter(Path.is_file, {_path(folder, number), _path(folder, 1)}):
        with safe_open(path, "pt") as file:
            there = json.loads((file.metadata() or {}).get("DCP_SHARDING_INFO", "{}"))
            for name in parts.keys() & there.keys():
                if there[name]["saved_offsets"] == _offsets(tensors[name]) and (
                        file.get_slice(name).get_shape() == list(parts[name].shape)):
                    parts.pop(name).copy_(file.get_tensor(name))
    if not parts:
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        try:
            dcp.load({name: tensors[name] for name in parts}, no_dist=True,
                     storage_reader=HuggingFaceStorageReader(str(folder)))
        except CheckpointException as e:  # a BaseException around what was raised
            raise next(iter(e.failures.values()))[0] from e
