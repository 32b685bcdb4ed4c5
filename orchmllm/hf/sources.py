"""What the folder of a model gives: for each parameter the tensor it starts from. All checks are
made here, on headers alone: before ranks are started and before any collective."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from orchmllm.config.model import ModelConfig
from orchmllm.hf.folder import ELEMENT_BYTES, Stored, links_of, open_folder
from orchmllm.models.families import read_config
from orchmllm.plan.layout import OF_MEDIA

SAMPLE_BYTES = 4096  # of a tensor, in its fingerprint


class PretrainedError(ValueError):
    """Weights that cannot be used; the message lists every problem."""


@dataclass(frozen=True)
class WeightSource:
    """One folder. tensors: name of the parameter -> where its values are."""

    path: Path
    tensors: Mapping[str, Stored]

    def describe(self) -> str:
        count = len({t.file for t in self.tensors.values()})
        files = "1 file" if count == 1 else f"{count} files"
        return f"model.pretrained: {len(self.tensors)} tensors from {self.path} ({files})"


def find_sources(model: ModelConfig) -> list[WeightSource]:
    """The weights that transformers reads; none of model.config. Raises PretrainedError for a
    folder that is missing or cannot be trained exactly, or if nothing would learn."""
    path = Path(model.folder)
    try:
        config = read_config(path)
        for part in OF_MEDIA:
            if getattr(model, part).frozen and not hasattr(config, f"{part}_config"):
                raise ValueError(f"model.{part}.frozen has no effect with a {config.model_type}, "
                                 "which has no such part: leave it out")
        parts = [*(p for p in OF_MEDIA if hasattr(config, f"{p}_config")), "llm"]
        if not any(map(model.learns, (*parts, "connector"))):
            raise ValueError(f"nothing would learn: a {config.model_type} has {', '.join(parts)} "
                             "and connectors, and all of them are frozen: set one to false")
        from orchmllm.models.whole_model import meta_model  # with torch

        meta_model(model.folder)  # its parts have to be understood
        if not model.pretrained:
            return []
        if model.lora.rank:
            from orchmllm.models.adapters import check_adapters  # with torch

            # A folder of orchmllm compose has the weights of its parts alone.
            check_adapters(model, tuple(links_of(path)) or ("",))
        return [WeightSource(path, {  # buffers may be integers, which nobody reads
            name: stored for name, stored in open_folder(path).items()
            if stored.dtype in ELEMENT_BYTES and stored.shape})]
    except ValueError as e:
        key = "model.pretrained" if model.pretrained else "model.config"
        raise PretrainedError(f"{key}: {e}") from e


def fingerprint(sources: Sequence[WeightSource]) -> int:
    """48 bits that differ for other tensors, and for other revisions of a model: of each tensor a
    sample of its bytes counts."""
    import torch
    from safetensors import safe_open

    digest = hashlib.blake2b(digest_size=6)
    for source in sources:
        samples = {}
        by_file = sorted(source.tensors.items(), key=lambda item: item[1].file)
        for file, tensors in groupby(by_file, key=lambda item: item[1].file):
            with safe_open(file, framework="pt") as f:  # once: all ranks do this at one time
                for name, stored in tensors:
                    rows = stored.shape[0]
                    count = max(1, SAMPLE_BYTES * rows // max(stored.num_bytes, 1))
                    sample = f.get_slice(stored.key)[
                        max(0, rows - count) // 2: (rows + count + 1) // 2]
                    samples[name] = sample.contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, stored in sorted(source.tensors.items()):
            digest.update(f"{name} {stored.dtype} {stored.shape}".encode())
            digest.update(samples[name].tobytes())
    return int.from_bytes(digest.digest(), "little")
