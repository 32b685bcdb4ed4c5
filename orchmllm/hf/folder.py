"""A Hugging Face folder on disk: where each tensor lies. Only headers are read,
nothing is unpickled or downloaded, and torch is not needed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
VAE = "vae"  # folder of the VAE in that of a model that makes images
DIFFUSERS = "diffusion_pytorch_"  # stands before these names in a folder of diffusers
# Of a composed model that has no weights of its own: how the names of its tensors begin -> [folder,
# how they begin there].
PARTS = "parts.json"


class Stored(NamedTuple):
    """One tensor of a safetensors file. dtype: as the format names it, one of ELEMENT_BYTES for a
    weight."""

    file: Path
    key: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ELEMENT_BYTES[self.dtype]


def open_folder(path: Path) -> dict[str, Stored]:
    """key -> where the tensor lies. Raises ValueError with the cure if it is not a folder of
    safetensors with a config.json."""
    if not path.is_dir():
        raise ValueError("no such folder: give a local copy of the model (nothing is downloaded)")
    read_json(path / "config.json")
    return _of_parts(path) or read_headers(_files(path))


def links_of(path: Path) -> dict[str, list[str]]:
    """What PARTS says; nothing where there is none, or the folder got weights of its own: a
    save_pretrained leaves PARTS there."""
    own = any((path / name).is_file() for name in (SINGLE, INDEX))
    return read_json(path / PARTS) if (path / PARTS).is_file() and not own else {}


def _of_parts(path: Path) -> dict[str, Stored]:
    """The tensors of a composed model, in the folders of its parts."""
    tensors = {}
    for name, (folder, there) in links_of(path).items():
        try:
            found = read_headers(_files(path / folder))
        except (OSError, ValueError) as e:
            raise ValueError(f"{PARTS} names {folder}: {e}: put the part there again") from e
        tensors |= {name + key.removeprefix(there): stored for key, stored in found.items()
                    if key.startswith(there)}
    return tensors


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
    """(metadata, tensors in the order of the file) of a safetensors file. Raises ValueError naming
    it if it is truncated or is none."""
    try:
        with safe_open(file, framework="numpy") as f:
            slices = {key: f.get_slice(key) for key in f.offset_keys()}
            return f.metadata() or {}, {
                key: Stored(file, key, s.get_dtype(), tuple(s.get_shape()))
                for key, s in slices.items()}
    except (OSError, SafetensorError) as e:
        raise ValueError(f"{file}: truncated, or not a safetensors file: copy it again ({e})"
                         ) from e


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
    prefix = DIFFUSERS * any(path.glob(f"{DIFFUSERS}model*"))
    single, index = prefix + SINGLE, prefix + INDEX
    if (path / index).is_file():
        weights = read_json(path / index).get("weight_map")
        names = sorted(set(weights.values())) if isinstance(weights, dict) else []
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{index}: {name!r} is not a file name")
        missing = [n for n in names if not (path / n).is_file()]
        if missing or not names:
            raise ValueError(f"{index}: {', '.join(missing[:3]) or 'every file'} "
                             f"{'are' if len(missing) > 1 else 'is'} missing: copy the folder "
                             "completely")
        return [path / name for name in names]
    if (path / single).is_file():
        return [path / single]
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
    if pickles:
        raise ValueError(
            f"the weights are pickles ({pickles[0]}), which can execute code and are never read: "
            "convert to safetensors (load the model with transformers, then "
            "save_pretrained(FOLDER))")
    raise ValueError(f"neither {SINGLE} nor {INDEX} is in it: give a folder with weights")
