"""What a recipe's `pretrained` folders give: for each parameter the tensor it starts from. All
checks are made here, on headers alone: before ranks are started and before any collective."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchmllm.config.checkpoint_shapes import KEYS, MODEL_TYPES, part_config
from orchmllm.config.model import ModelConfig
from orchmllm.hf.folder import (
    ELEMENT_BYTES,
    Folder,
    Stored,
    open_folder,
    read_float64,
    read_headers,
)
from orchmllm.models.names import PARTS, Named, named
from orchmllm.models.spec import spec_of

# Where a larger model's folder keeps an encoder; the first that has it counts.
PREFIXES = {"vision": ("",), "audio": ("", "encoder.", "model.encoder.")}
POSITIONS = "embed_positions.weight"  # Whisper's, computed here instead of stored
SAMPLE_BYTES = 4096  # of a tensor, in its fingerprint
MAX_POSITION_ERROR = 0.01  # sinusoids rounded to bfloat16 are within 0.004

# key of config.json -> the value that can be computed, which is transformers' default, too
FIXED: dict[str, dict[str, Any]] = {
    "vision": {},
    "audio": {"activation_function": "gelu", "scale_embedding": False},
    "llm": {"hidden_act": "silu", "use_sliding_window": False, "rope_type": "default"},
}
OTHER_MODELS = ("; other models train in a loop of your own or in a Trainer, with "
                'BalancedDataLoader or balance_trainer, and balance_encoders ("Which model, which '
                'way" in docs/loader.md)')


class PretrainedError(ValueError):
    """Weights that cannot be used; the message lists every problem."""


@dataclass(frozen=True)
class WeightSource:
    """One folder (or connectors.safetensors). tensors: name of the parameter -> where its values
    are. notes: what else the log should say."""

    part: str
    path: Path
    tensors: Mapping[str, Stored]
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        count = len({t.file for t in self.tensors.values()})
        files = "1 file" if count == 1 else f"{count} files"
        key = {"connectors": "model.connectors", "model": "model.pretrained"}.get(
            self.part, f"model.{self.part}.pretrained")
        head = f"{key}: {len(self.tensors)} tensors from {self.path} ({files})"
        return "; ".join((head, *self.notes))


def find_sources(model: ModelConfig) -> list[WeightSource]:
    """All that the recipe names. Raises PretrainedError listing every problem: a folder that is
    missing or holds pickles, a configuration that is not the recipe's, tensors that are missing or
    have another shape."""
    return spec_of(model).weights(model)


def of_parts(model: ModelConfig) -> list[WeightSource]:
    """Those that parts and connectors of this project start from. Raises PretrainedError, see
    find_sources."""
    sources, problems = [], []
    for part in (*PARTS, "connectors"):
        path = model.connectors if part == "connectors" else getattr(model, part).pretrained
        if path:
            find = _connectors if part == "connectors" else _part
            found = find(part, model, Path(path).expanduser())
            (problems.extend if isinstance(found, list) else sources.append)(found)
    if problems:
        raise PretrainedError(
            f"pretrained weights cannot be used: {len(problems)} problem"
            f"{'s' if len(problems) > 1 else ''}\n  " + "\n  ".join(problems)
            + "\n  (set the recipe's values to the checkpoint's, or give another folder)")
    return sources


def fingerprint(sources: Sequence[WeightSource]) -> int:
    """48 bits that differ for other tensors, and for other revisions of a model: of each tensor a
    sample of its bytes counts."""
    import torch
    from safetensors import safe_open

    digest = hashlib.blake2b(digest_size=6)
    for source in sources:
        for name, stored in sorted(source.tensors.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
            rows = stored.shape[0]
            count = max(1, SAMPLE_BYTES * rows // max(stored.num_bytes, 1))
            with safe_open(stored.file, framework="pt") as f:
                sample = f.get_slice(stored.key)[max(0, rows - count) // 2: (rows + count + 1) // 2]
            digest.update(sample.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest(), "little")


def _part(part: str, model: ModelConfig, path: Path) -> WeightSource | list[str]:
    """What a part starts from, or why it cannot."""
    given = f"model.{part}.pretrained = {str(path)!r}"
    try:
        folder = open_folder(path)
    except (OSError, ValueError) as e:
        return [f"{given}: {e}"]
    try:
        wrong = list(mismatches(part, model, folder))
    except (TypeError, ValueError, AttributeError) as e:
        return [f"{given}: config.json is malformed: {e}"]
    if wrong:
        return wrong
    key_of = _layout(part, model, folder)
    wanted, notes = _wanted(part, model, folder, key_of)
    wrong = list(_tensor_problems(given, wanted, folder.tensors,
                                  "the folder of a whole model of this class"))
    if part == "audio":
        wrong += _position_problems(given, folder, key_of)
    return wrong or WeightSource(part, path, {n.name: folder.tensors[n.hf] for n in wanted}, notes)


def mismatches(part: str, model: ModelConfig, folder: Folder) -> Iterator[str]:
    """Every way in which a folder's configuration is not the recipe's."""
    where = f"model.{part}"
    given = f"{where}.pretrained = {str(folder.path)!r}"
    model_type = folder.config.get("model_type")
    if model_type not in MODEL_TYPES[part]:
        yield (f"{given}: config.json has model_type {model_type!r}, expected "
               f"{' or '.join(map(repr, MODEL_TYPES[part]))}{OTHER_MODELS}")
        return
    config = part_config(folder.config)
    section = getattr(model, part)
    for ours, theirs in KEYS[part].items():
        want, value = getattr(section, ours), config.get(theirs)
        if value is None:
            yield f"{given}: config.json lacks {theirs}"
        elif value != want:
            yield f"{where}.{ours}: recipe {want}, checkpoint {value}"
    for key, needed in FIXED[part].items():
        value = config.get(key, needed)
        if value != needed:
            yield (f"{given}: config.json has {key} {value!r}; only {needed!r} can be computed"
                   f"{OTHER_MODELS}")


def _layout(part: str, model: ModelConfig, folder: Folder) -> Callable[[str], str]:
    """The folder's key of a tensor of the part's own class."""
    if part == "llm":  # saved by Qwen2Model instead of Qwen2ForCausalLM
        bare = "embed_tokens.weight" in folder.tensors
        return lambda key: key.removeprefix("model.") if bare else key
    first = named(part, model)[0].hf
    prefix = next((p for p in PREFIXES[part] if p + first in folder.tensors), "")
    return lambda key: prefix + key


def _wanted(part: str, model: ModelConfig, folder: Folder,
            key_of: Callable[[str], str]) -> tuple[list[Named], tuple[str, ...]]:
    """(our name, key in the folder, shape) of what is read, and notes on what is not."""
    wanted = [n._replace(hf=key_of(n.hf)) for n in named(part, model)]
    notes: tuple[str, ...] = ()
    if part == "llm" and folder.config.get("tie_word_embeddings"):
        table = key_of("model.embed_tokens.weight")
        wanted = [n._replace(hf=table) if n.name == "llm.hf.lm_head.weight" else n for n in wanted]
        notes = ("tied embeddings: lm_head starts as a copy of embed_tokens and learns apart",)
    unused = len(set(folder.tensors) - {n.hf for n in wanted})
    return wanted, (*notes, *([f"{unused} of its tensors belong to other parts"] if unused else []))


def _tensor_problems(given: str, wanted: list[Named], tensors: Mapping[str, Stored],
                     cure: str) -> Iterator[str]:
    missing = [n.hf for n in wanted if n.hf not in tensors]
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        yield f"{given}: lacks {', '.join(missing[:3])}{more}: give {cure}"
    for n in wanted:
        if n.hf not in tensors:
            continue
        found = tensors[n.hf]
        if found.shape != n.shape:
            yield f"{given}: {n.hf} has shape {found.shape}, expected {n.shape}"
        if found.dtype not in ELEMENT_BYTES:
            yield (f"{given}: {n.hf} is {found.dtype}, but only {', '.join(ELEMENT_BYTES)} can be "
                   "used: give weights that are not quantised")


def _position_problems(given: str, folder: Folder, key_of: Callable[[str], str]) -> Iterator[str]:
    """Positions are computed, so a folder's own have to be Whisper's sinusoids."""
    table = folder.tensors.get(key_of(POSITIONS))
    if table is None or len(table.shape) != 2 or table.dtype not in ELEMENT_BYTES:
        return
    count, size = table.shape
    step = np.log(10_000) / (size // 2 - 1)
    angle = np.arange(count)[:, None] * np.exp(-step * np.arange(size // 2))
    error = np.abs(read_float64(table) - np.concatenate([np.sin(angle), np.cos(angle)], 1)).max()
    if not error <= MAX_POSITION_ERROR:
        yield (f"{given}: {POSITIONS} differs from Whisper's sinusoids by {error:.2g}: learnt "
               "positions cannot be used")


def _connectors(part: str, model: ModelConfig, path: Path) -> WeightSource | list[str]:
    given = f"model.connectors = {str(path)!r}"
    if not path.is_file():
        return [f"{given}: no such file: give connectors.safetensors of an export"]
    try:
        tensors = read_headers([path])
    except ValueError as e:
        return [f"model.connectors: {e}"]
    wanted = named(part, model)
    wrong = list(_tensor_problems(given, wanted, tensors,
                                  "that of an export of the same model"))
    return wrong or WeightSource(part, path, {n.name: tensors[n.hf] for n in wanted})
