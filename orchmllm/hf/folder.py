"""A Hugging Face folder on disk: its config.json and where each tensor lies. Only headers are read,
nothing is unpickled or downloaded, and torch is not needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Stored(NamedTuple):
    """One tensor of a safetensors file. dtype: as the format names it, one of ELEMENT_BYTES for a
    weight. begin: where its bytes start in the file."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    num_bytes: int


@dataclass(frozen=True)
class Folder:
    """config: config.json. tensors: key -> where it lies."""

    path: Path
    config: dict
    tensors: dict[str, Stored]


def open_folder(path: Path) -> Folder:
    """Raises ValueError with the cure if it is not a folder of safetensors."""
    if not path.is_dir():
        raise ValueError("no such folder: give a local copy of the model (nothing is downloaded)")
    config = read_json(path / "config.json")
    return Folder(path, config, read_headers(_files(path)))


def read_headers(files: Iterable[Path]) -> dict[str, Stored]:
    """key -> tensor, of all files. Raises ValueError naming the file that is not sound."""
    tensors: dict[str, Stored] = {}
    for file in files:
        _, found = read_header(file)
        for key, tensor in found.items():
            if key in tensors:
                raise ValueError(f"{key} is in {tensors[key].file.name} and in {file.name}")
            tensors[key] = tensor
    return tensors


def read_header(file: Path) -> tuple[dict, dict[str, Stored]]:
    """(metadata, tensors) of a safetensors file. Raises ValueError naming it if it is truncated or
    is none."""
    try:
        with file.open("rb") as f:
            size = int.from_bytes(f.read(8), "little")
            if not 2 <= size <= MAX_HEADER_BYTES:
                raise ValueError("not a safetensors file")
            header = json.loads(f.read(size))
        end = file.stat().st_size
        metadata = header.pop("__metadata__", {})
        tensors = {}
        for key, entry in header.items():
            first, last = entry["data_offsets"]
            found = Stored(file, key, entry["dtype"], tuple(entry["shape"]), 8 + size + first,
                           last - first)
            element = ELEMENT_BYTES.get(found.dtype)
            if first < 0 or min(found.shape, default=0) < 0 or (
                    element and math.prod(found.shape) * element != found.num_bytes):
                raise ValueError(f"{key} has {last - first} bytes for shape {found.shape}")
            if found.begin + found.num_bytes > end:
                raise ValueError(f"truncated: {key} ends after the file does; copy it again")
            tensors[key] = found
    except OSError as e:
        raise ValueError(f"{file}: {e.strerror or e}") from e
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError(f"{file}: not a safetensors file") from None
    except ValueError as e:
        raise ValueError(f"{file}: {e}") from None
    return metadata, tensors


def read_float64(tensor: Stored) -> np.ndarray:
    """A small tensor's values."""
    with tensor.file.open("rb") as f:
        f.seek(tensor.begin)
        data = f.read(tensor.num_bytes)
    if tensor.dtype == "BF16":  # the upper half of a float32
        values = (np.frombuffer(data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(data, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[tensor.dtype])
    return values.reshape(tensor.shape).astype(np.float64)


def read_json(path: Path) -> dict:
    """Raises ValueError naming the file if it holds no JSON object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ValueError(f"{path.name}: {e.strerror or e}: give a folder in the layout of "
                         "transformers' save_pretrained") from e
    except ValueError as e:
        raise ValueError(f"{path.name} is not JSON: {e}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path.name} is not a JSON object")
    return value


def _files(path: Path) -> list[Path]:
    """The weight files of a folder."""
    if (path / INDEX).is_file():
        weights = read_json(path / INDEX).get("weight_map")
        names = sorted(set(weights.values())) if isinstance(weights, dict) else []
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{INDEX}: {name!r} is not a file name")
        missing = [n for n in names if not (path / n).is_file()]
        if missing or not names:
            raise ValueError(f"{INDEX}: {', '.join(missing[:3]) or 'every file'} "
                             f"{'are' if len(missing) > 1 else 'is'} missing: copy the folder "
                             "completely")
        return [path / name for name in names]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ValueError(
            f"the weights are pickles ({pickles[0]}), which can execute code and are never read: "
            "convert to safetensors (load the model with transformers, then "
            "save_pretrained(FOLDER))")
    raise ValueError(f"neither {SINGLE} nor {INDEX} is in it: give a folder with weights")
