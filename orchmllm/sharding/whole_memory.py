"""The memory of a whole model of transformers, predicted without weights: its shards, and blocks
that run on the meta device with the operator of a fused attention kernel, so that autograd says
what it keeps of them."""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy
from transformers import AttentionInterface

from orchmllm.batch import SequenceLengths
from orchmllm.config.job import Job
from orchmllm.models.hf import meta_model, num_parameters
from orchmllm.models.whole_flops import around, feature_width, part_flops, width_of
from orchmllm.plan.layout import ENCODERS
from orchmllm.sharding.activations import BlockBytes
from orchmllm.sharding.blocks import keep_products
from orchmllm.sharding.memory import Loads, MemoryModel

NAME, SHORT, LONG = "orchmllm_measured", 64, 128


def fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_: Any, **options: Any
          ) -> tuple[Tensor, None]:
    """What a kernel of a GPU keeps: its inputs, its output, and a number of each row and head.
    query: (1, H, R, D); key, value: (1, Hkv, R, D). Returns (1, R, H, D)."""
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
    return out.transpose(1, 2), None


AttentionInterface.register(NAME, fused)


class Products(TorchDispatchMode):
    """Collects the outputs that selective checkpointing keeps, the products' FLOP, and the bytes
    that all other operators read and write. The product of all experts, which only bfloat16 has
    without memory, has its shape in any dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.flop = self.moved = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            x, weight = args[:2]
            out = x.new_empty(len(x), weight.shape[-1])
        else:
            out = func(*args, **(kwargs or {}))
        read, made = ([t for t in tree_leaves(x) if isinstance(t, Tensor)] for x in (
            (args, kwargs), out))
        if keep_products(None, func, *args) == CheckpointPolicy.MUST_SAVE:
            self.kept += made
            if "attention" not in str(func):
                rows = args[1] if "addmm" in str(func) else args[0]
                self.flop += 2 * made[0].numel() * rows.shape[-1]
        elif func._schema.is_mutable or not {_storage(t) for t in made} & {
                _storage(t) for t in read}:  # not a view
            self.moved += sum(t.nbytes for t in made + read)
        return out


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


@lru_cache(maxsize=8)
def block_bytes(folder: str, phase: str, frozen: bool, dtype: str) -> list[BlockBytes]:
    """Of the blocks of vision, audio or llm in their order. Two lengths are measured, so that what
    does not grow with them is left out. A block that does not learn and whose input has no gradient
    keeps nothing."""
    found = meta_model(folder)
    config = found.hf.config
    config = config.get_text_config(decoder=True) if phase == "llm" else getattr(
        config, f"{phase}_config")
    stack, sizes = found.blocks()[phase], {}
    for kind, one in {num_parameters(block): block for block in stack}.items():
        block = copy.deepcopy(one).to(getattr(torch, dtype))
        for module in block.modules():
            if hasattr(module, "config"):
                module.config._attn_implementation = NAME
                module.config._experts_implementation = "grouped_mm"
        block.requires_grad_(not frozen)
        short, long = (_measured(block, config, n, learns=phase == "llm" or not frozen)
                       for n in (SHORT, LONG))
        each = {name: (long[name] - short[name]) / (LONG - SHORT) for name in long}
        # The gradients of the largest tensor and of what it was made of; without a backward pass
        # nothing is there but for a moment.
        sizes[kind] = BlockBytes(each, each["none"], 2 * each["largest"], each["moved"],
                                 each["repeated"] / each["flop"])
    return [sizes[num_parameters(block)] for block in stack]


def _measured(block: nn.Module, config: Any, n: int, learns: bool) -> dict[str, int]:
    """Bytes for n positions: what stays by each choice of checkpointing, the largest tensor of all
    that is saved, and what is `moved` until the last of it is there. FLOP of products: all, and
    those that are `repeated` until then."""
    names = inspect.signature(block.forward).parameters
    heads = getattr(config, "num_attention_heads", None) or config.num_heads
    width = width_of(config)
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
    until = {"moved": 0, "repeated": 0}

    def save(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        until.update(moved=products.moved, repeated=products.flop)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda t: t), Products() as products:
        block(hidden, **{k: v for k, v in given.items() if k in names}, **linear)
    held = _bytes(saved, apart)
    return {"none": sum(held), "full": _bytes([hidden], [])[0] * learns,
            "selective": sum(_bytes([hidden, *products.kept], apart)) * learns,
            "largest": max(held, default=0), "flop": products.flop, **until}


def _bytes(tensors: list[Tensor], apart: list[Tensor]) -> list[int]:
    """Of the storages of the tensors, but for those of `apart`."""
    storages = {_storage(t): t.untyped_storage().nbytes() for t in tensors}
    for t in apart:
        storages.pop(_storage(t), None)
    return list(storages.values())


class WholeMemory(MemoryModel):
    """Of the units that are really sharded, and of blocks measured without memory."""

    @classmethod
    def of(cls, job: Job, on_cpu: bool = False) -> WholeMemory:
        model = job.recipe.model
        whole = meta_model(model.folder)
        stacks, text = whole.blocks(), whole.hf.config.get_text_config(decoder=True)
        # The folder still says that it is a whole model; widths and depths are read from the parts.
        configs = {part: text if part == "llm" else getattr(whole.hf.config, f"{part}_config")
                   for part in stacks}
        parts = {part: replace(getattr(model, part), num_layers=len(stack),
                               hidden_size=width_of(configs[part]))
                 for part, stack in stacks.items()}
        parts["llm"] = replace(parts["llm"], vocab_size=text.vocab_size)
        described = replace(model, **parts)
        return super().of(replace(job, recipe=replace(job.recipe, model=described)), on_cpu)

    def _blocks(self, phase: str) -> list[BlockBytes]:
        if phase not in part_flops(self.model.folder):
            return super()._blocks(phase)
        return block_bytes(self.model.folder, phase, getattr(self.model, phase).frozen,
                           self.fsdp.forward_dtype)

    def _batch(self, loads: Loads) -> np.ndarray:
        """Pixels and frames in float32, and as the forward pass casts them."""
        out = loads.phases["llm"].tokens * 32.0
        for part in part_flops(self.model.folder).keys() & ENCODERS.keys():
            front, _ = around(meta_model(self.model.folder), part)
            values = front[0].in_channels if part == "audio" else sum(
                m.weight[0].numel() for m in front)
            out = out + loads.phases[part].rows * float(values * (4 + self.element))
        return out

    def _features(self, phase: str, loads: Loads) -> np.ndarray:
        return loads.received[phase] * float(self.element * feature_width(self.model.folder))

    def _exchange(self, phase: str, loads: Loads) -> np.ndarray:
        sent = loads.phases[phase].tokens * float(
            self.element * feature_width(self.model.folder))
        return 2 * (sent + self._features(phase, loads))

    def _around(self, phase: str, loads: Loads) -> np.ndarray:
        """The inputs and outputs of products."""
        lengths, e = loads.phases[phase], self.element
        if phase not in part_flops(self.model.folder):
            return np.zeros(len(lengths.rows))
        if phase == "llm":  # what the layers get, and the last norm: its input in float32
            return lengths.tokens * float(
                e * feature_width(self.model.folder) + (4 + 2 * e) * self.model.llm.hidden_size)
        front, connector = around(meta_model(self.model.folder), phase)
        patch = self.model.learns(phase) * sum(_front_values(m) for m in front)
        token = self.model.features_learn(phase) * sum(
            sum(m.weight.shape[:2]) for m in connector)
        return float(e * patch) * lengths.rows + float(e * token) * lengths.tokens


def _front_values(module: nn.Module) -> int:
    """Inputs and outputs for a patch or a frame of what is before the blocks."""
    if isinstance(module, nn.Conv1d):
        return module.in_channels + module.out_channels // module.stride[0]
    return module.weight[0].numel() + len(module.weight)
