"""Predictions for a whole model of transformers, without weights or pixels: its memory, and what
its image processor makes of the size of an image.

What autograd keeps of a block is measured: the block runs on the meta device, with the operator of
a fused attention kernel.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy
from transformers import PROCESSOR_MAPPING, AttentionInterface, AutoImageProcessor
from transformers.integrations import moe
from transformers.integrations.moe import ExpertsInterface

from orchmllm.batch import SequenceLengths
from orchmllm.config.job import Job
from orchmllm.data.media.shapes import of_shapes, sized
from orchmllm.models.families import part_of, read_config
from orchmllm.models.hf import around, feature_width, meta_model, num_parameters
from orchmllm.plan.geometry import SegmentLengths
from orchmllm.sharding.activations import BlockBytes
from orchmllm.sharding.fsdp import keep_products
from orchmllm.sharding.memory import Loads, MemoryModel

NAME, SHORT, LONG = "orchmllm_measured", 64, 128


def fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
          ) -> tuple[Tensor, None]:
    """What a kernel of a GPU keeps: its inputs, its output, and a number of each row and head.
    query: (1, H, R, D); key, value: (1, Hkv, R, D). Returns (1, R, H, D)."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, fused)


def _grouped(x: Tensor, weight: Tensor, offs: Tensor, *, is_transposed: bool, **_: Any) -> Tensor:
    """The product of all experts, by an operator that any dtype has without memory."""
    return torch.ops.transformers.grouped_mm_fallback(
        x, weight if is_transposed else weight.transpose(-2, -1), offs)


# transformers' own order of steps, with this product.
ExpertsInterface.register(NAME, FunctionType(
    moe.grouped_mm_experts_forward.__code__, {**vars(moe), "_grouped_linear": _grouped}))


class _Products(TorchDispatchMode):
    """Collects the outputs that selective checkpointing keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if keep_products(None, func, *args) == CheckpointPolicy.MUST_SAVE:
            self.kept += [t for t in (out if isinstance(out, tuple) else (out,))
                          if isinstance(t, Tensor)]
        return out


@lru_cache(maxsize=8)
def block_bytes(folder: str, phase: str, frozen: bool, dtype: str) -> BlockBytes:
    """Of one block of vision or llm, on average where some have experts. Two lengths are measured,
    so that what does not grow with them is left out. A block that does not learn and whose input
    has no gradient keeps nothing."""
    found = meta_model(folder)
    config = found.hf.config
    config = config.get_text_config(decoder=True) if phase == "llm" else config.vision_config
    kinds: dict[int, list[nn.Module]] = {}
    for block in found.blocks()[phase]:
        kinds.setdefault(num_parameters(block), []).append(block)
    sizes, largest = [], 0.0
    for alike in kinds.values():
        block = copy.deepcopy(alike[0]).to(getattr(torch, dtype))
        for module in block.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = module.config._experts_implementation = NAME
        block.requires_grad_(not frozen)
        short, long = (_measured(block, config, n, learns=phase == "llm" or not frozen)
                       for n in (SHORT, LONG))
        each = {name: (long[name] - short[name]) / (LONG - SHORT) for name in long}
        largest = max(largest, each["largest"])
        sizes += [each] * len(alike)
    mean = {name: sum(each[name] for each in sizes) / len(sizes) for name in sizes[0]}
    # The gradients of the largest tensor and of what it was made of; without a backward pass
    # nothing is there but for a moment.
    return BlockBytes({c: mean[c] for c in ("none", "selective", "full")}, mean["made"],
                      2 * largest)


def _measured(block: nn.Module, config: Any, n: int, learns: bool) -> dict[str, int]:
    """Bytes for n positions: what stays by each choice of checkpointing, all that is saved
    (`made`), and the largest tensor of it."""
    names = inspect.signature(block.forward).parameters
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    width = getattr(config, "embed_dim", None) or config.hidden_size
    size = getattr(config, "head_dim", None) or width // heads
    dtype, packed = next(block.parameters()).dtype, "cu_seqlens" in names
    hidden = torch.empty(*(() if packed else (1,)), n, width, device="meta", dtype=dtype,
                         requires_grad=learns)
    angles = torch.empty(*hidden.shape[:-1], size, device="meta", dtype=dtype)
    given = {"position_embeddings": (angles, angles), "attention_mask": None,
             "cu_seqlens": torch.tensor([0, n], dtype=torch.int32)}
    linear = {"seqlens": SequenceLengths.from_lengths([n])} if hasattr(block, "linear_attn") else {}
    apart = [*block.parameters(), *block.buffers(), angles]
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: saved.append(t) or t, lambda t: t), _Products() as products:
        block(hidden, **{k: v for k, v in given.items() if k in names}, **linear)
    held = _bytes(saved, apart)
    return {"none": sum(held), "full": _bytes([hidden], [])[0] * learns,
            "selective": sum(_bytes([hidden, *products.kept], apart)) * learns,
            "made": sum(held), "largest": max(held, default=0)}


def _bytes(tensors: list[Tensor], apart: list[Tensor]) -> list[int]:
    """Of the storages of the tensors, but for those of `apart`."""
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    for t in apart:
        storages.pop(t.untyped_storage()._cdata, None)
    return list(storages.values())



def parameters(folder: str) -> dict[str, int]:
    """Part of the model -> its parameters."""
    whole, counts = meta_model(folder), {}
    layers = {id(p) for stack in whole.blocks().values() for p in stack.parameters()}
    rest = {"vision": "vision front", "llm": "llm embedding and head", "connector": "connector"}
    for name, p in whole.hf.named_parameters():
        part = part_of(name)
        place = f"{part} layers" if id(p) in layers else rest[part]
        counts[place] = counts.get(place, 0) + p.numel()
    return counts


class WholeMemory(MemoryModel):
    """Of the units that are really sharded, and of blocks measured without memory."""

    @classmethod
    def of(cls, job: Job, on_cpu: bool = False) -> WholeMemory:
        model = job.recipe.model
        whole = meta_model(model.folder)
        stacks, text = whole.blocks(), whole.hf.config.get_text_config(decoder=True)
        # The folder still says that it is a whole model; widths and depths are read from the parts.
        described = replace(
            model, vision=replace(model.vision, num_layers=len(stacks["vision"])),
            llm=replace(model.llm, num_layers=len(stacks["llm"]), hidden_size=text.hidden_size,
                        vocab_size=text.vocab_size))
        return super().of(replace(job, recipe=replace(job.recipe, model=described)), on_cpu)

    def _block(self, phase: str) -> BlockBytes:
        if phase == "audio":
            return super()._block(phase)
        return block_bytes(self.model.folder, phase, getattr(self.model, phase).frozen,
                           self.fsdp.forward_dtype)

    def _batch(self, loads: Loads) -> np.ndarray:
        """Pixels in float32, and as the forward pass casts them."""
        front, _ = around(meta_model(self.model.folder))
        values = sum(m.weight[0].numel() for m in front)
        return (loads.phases["vision"].rows * float(values * (4 + self.element))
                + loads.phases["llm"].tokens * 32.0)

    def _features(self, phase: str, loads: Loads) -> np.ndarray:
        return loads.received[phase] * float(self.element * feature_width(self.model.folder))

    def _exchange(self, phase: str, loads: Loads) -> np.ndarray:
        sent = loads.phases[phase].tokens * float(
            self.element * feature_width(self.model.folder))
        return 2 * (sent + self._features(phase, loads))

    def _kept(self, phase: str, loads: Loads, choice: str) -> np.ndarray:
        """Blocks as measured; of the rest the inputs and outputs of its products."""
        lengths, e = loads.phases[phase], self.element
        layers = getattr(self.model, phase).num_layers
        blocks = layers * self._block(phase).kept[choice] * lengths.positions
        if phase == "audio":
            return blocks
        if phase == "llm":  # what the layers get, and the last norm: its input in float32
            return blocks + lengths.tokens * float(
                e * feature_width(self.model.folder) + (4 + 2 * e) * self.model.llm.hidden_size)
        front, connector = around(meta_model(self.model.folder))
        learns = not self.model.vision.frozen
        patch = learns * sum(m.weight[0].numel() + len(m.weight) for m in front)
        token = sum(sum(m.weight.shape[:2]) for m in connector)
        return blocks + float(e * patch) * lengths.rows + float(e * token) * lengths.tokens


class Pictures:
    """What the image processor of a folder makes of the size of an image, by the settings of
    preprocessor_config.json or processor_config.json alone: an image of an example by itself.
    Raises ValueError, saying what is missing."""

    def __init__(self, folder: str) -> None:
        config = read_config(Path(folder))
        merge = getattr(config.vision_config, "spatial_merge_size", None)
        ratio = getattr(config, "downsample_ratio", None)
        cure = "run `orchmllm data index RECIPE` first, so that lengths are those of its own rows"
        if merge is None and ratio is None or config.model_type == "mistral3":
            raise ValueError(f"{folder}: sizes of images cannot be drawn for {config.model_type}, "
                             f"whose tokens its whole processor decides: {cure}")
        try:
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil",
                                                           local_files_only=True)
        except (OSError, ValueError, ImportError) as error:
            raise ValueError(
                f"{folder} has no settings of an image processor that can be read "
                f"(preprocessor_config.json), which say how many patches an image has: copy them "
                f"from the model, or {cure}") from error
        self._processor = of_shapes(processor)
        self._options = getattr(PROCESSOR_MAPPING[type(config)], "images_kwargs", {})
        self._patches = merge**2 if merge else round(1 / ratio**2)  # of a token
        self._patch = int(np.max(config.vision_config.patch_size))
        self.segment_lengths = lru_cache(maxsize=100_000)(self._segment_lengths)

    def _segment_lengths(self, width: int, height: int) -> SegmentLengths:
        """Of an image of so many pixels."""
        out = self._processor([sized(height, width)], return_tensors="np", **self._options)
        if "image_grid_thw" in out:
            t, h, w = out["image_grid_thw"][0].tolist()
        else:
            tiles, _, high, wide = out["pixel_values"].shape
            t, h, w = tiles, high // self._patch, wide // self._patch
        return SegmentLengths(t * h * w, t * h * w, t * h * w // self._patches, (t, h, w))


@lru_cache(maxsize=4)
def pictures(folder: str) -> Pictures:
    return Pictures(folder)
