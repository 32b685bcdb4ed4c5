"""A multimodal model of transformers as it is: whole examples in one packed row, and the sum of the
loss over the positions that are learnt.

Where a plan says which rank encodes which medium, orchmllm.encoders.planned answers the model's own
calls of its encoders; else they run inside of its forward, for the media of this rank's examples.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import (
    IGNORE_INDEX,
    UNKNOWN,
    Microbatch,
    PackedExamples,
    ProcessedExample,
    SequenceLengths,
    joined,
)
from orchmllm.config.fsdp import DTYPE_BYTES
from orchmllm.config.job import Job
from orchmllm.config.model import ModelConfig
from orchmllm.models import packing
from orchmllm.models.attention import attention_backend
from orchmllm.models.families import part_of, read_config
from orchmllm.models.flops import Lengths, Work
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.plan.assign import PlanSpec
from orchmllm.plan.cost import CostModel
from orchmllm.plan.layout import ENCODERS, NO_EXAMPLES

TYPES = ("mm_token_type_ids", "token_type_ids")  # arguments that say which tokens are media
TILED = ("aya_vision", "gemma3", "idefics3", "internvl", "llava", "llava_next",
         "llava_onevision")  # images are cut into tiles of one size, each of which is encoded alone
SLOTTED = ("idefics3",)  # the media of a sequence are one row of pixel_values


class WholeModel(nn.Module):
    """hf: a model of orchmllm.models.families, in train mode, whose configuration nobody else has.
    dtype: of forward and backward. The phases' times are in `clock`. encoders: an
    orchmllm.encoders.planned.PlannedEncoders of hf, for batches that were planned."""

    encoders: Any = None

    def __init__(self, hf: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.hf, self.clock, self.dtype = hf, PhaseClock(), dtype
        text = hf.config.get_text_config(decoder=True)
        text._attn_implementation = packing.NAME
        self._num_layers = text.num_hidden_layers
        accepted = inspect.signature(hf.forward).parameters
        self._types = [name for name in TYPES if name in accepted]
        index = getattr(hf.model, "get_rope_index", None)
        self._rope_arguments = None if index is None else set(inspect.signature(index).parameters)

    @property
    def token_embedding(self) -> nn.Parameter:
        return self.hf.get_input_embeddings().weight

    def freeze(self, parts: Sequence[str]) -> None:
        """Fixes the parameters of `vision` or `llm`; the connector still learns."""
        for name, parameter in self.hf.named_parameters():
            if part_of(name) in parts:
                parameter.requires_grad_(False)

    def blocks(self) -> dict[str, nn.ModuleList]:
        """The stack of transformer blocks of vision and llm: in each the list of modules that has
        most parameters."""
        stacks: dict[str, nn.ModuleList] = {}
        for name, module in self.hf.named_modules():
            part = part_of(f"{name}.")
            if isinstance(module, nn.ModuleList) and part != "connector":
                stacks[part] = max(stacks.get(part, module), module, key=num_parameters)
        return stacks

    def join(
        self, examples: Sequence[ProcessedExample],
        media: Mapping[str, Sequence[dict[str, Tensor]]] | None = None,
        micro: Microbatch | None = None,
    ) -> PackedExamples:
        """One packed row; on the CPU. media (tensors (rows, ...) of segments), micro: of a planned
        microbatch, see PlannedEncoders.packed; examples are then those of its LLM, without the
        content of media, and for none of them the row is one token, of which nothing is learnt."""
        examples = examples or [_FILLER]
        ids = torch.cat([e.input_ids for e in examples])
        labels = torch.cat([F.pad(e.labels[1:], (0, 1), value=IGNORE_INDEX) for e in examples])
        kept = (labels != IGNORE_INDEX).nonzero()[:, 0]
        inputs = {
            "input_ids": ids[None],
            "position_ids": torch.cat([self._positions(e) for e in examples], -1),
            **dict.fromkeys(self._types, self._type_ids(ids)[None])}
        for name in dict.fromkeys(name for e in examples for name in e.media if name not in TYPES):
            parts = [e.media[name] for e in examples if name in e.media]
            slotted = self.hf.config.model_type in SLOTTED and name.startswith("pixel_")
            inputs[name] = joined(parts, 1 if slotted else 0)
        lengths = [len(e.input_ids) for e in examples]
        phases = {} if micro is None else self.encoders.packed(examples, media, micro)
        return PackedExamples(inputs, kept, labels[kept], SequenceLengths.from_lengths(lengths),
                              phases)

    def forward(self, batch: PackedExamples) -> Tensor:
        """Sum of the cross entropy over this rank's targets, a scalar. The caller divides by the
        targets of all ranks. Raises RuntimeError where packing or the model's head did not do what
        the loss relies on."""
        self.clock.switch("llm")
        inputs: dict[str, Any] = {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in batch.inputs.items()}
        ones = torch.ones_like(inputs["input_ids"])  # without it some models look for examples
        answering = nullcontext() if not batch.phases else self.encoders.answering(
            batch.phases, inputs, self.clock, self.dtype)
        with answering, packing.packed(batch.seqlens, self._num_layers):
            logits = self.hf(**inputs, attention_mask=ones, use_cache=False,
                             logits_to_keep=batch.kept).logits[0]
        if len(logits) != len(batch.kept):
            raise RuntimeError(f"{type(self.hf).__name__} returned {len(logits)} rows of logits "
                               f"for {len(batch.kept)} positions")
        loss = F.cross_entropy(logits.to(torch.promote_types(torch.float32, logits.dtype)),
                               batch.targets, reduction="sum")
        if torch.is_grad_enabled() and not loss.requires_grad:
            # The text model is frozen and no rank has media: nothing was computed that learns.
            loss = loss + 0 * sum(p.sum() for p in self._connector())
        return loss

    def _connector(self) -> list[nn.Parameter]:
        return [p for name, p in self.hf.named_parameters() if part_of(name) == "connector"]

    def _type_ids(self, ids: Tensor) -> Tensor:
        """1 at tokens of images, 2 at those of videos."""
        config = self.hf.config
        return ((ids == config.image_token_id).int()
                + 2 * (ids == getattr(config, "video_token_id", None)))

    def _positions(self, example: ProcessedExample) -> Tensor:
        """(1, n), or (4, 1, n) for a model with rotary positions of three axes: the first row is
        the place in the example."""
        flat = torch.arange(len(example.input_ids))[None]
        if self._rope_arguments is None:
            return flat
        ids = example.input_ids
        if not any(name.endswith("grid_thw") for name in example.media):
            return flat[None].repeat(4, 1, 1)
        given = {**example.media, "input_ids": ids[None],
                 "mm_token_type_ids": self._type_ids(ids)[None]}
        axes, _ = self.hf.model.get_rope_index(
            **{name: value for name, value in given.items() if name in self._rope_arguments})
        return torch.cat([flat[None], axes.long()])


_FILLER = ProcessedExample(UNKNOWN, torch.zeros(1, dtype=torch.int64),
                           torch.full((1,), IGNORE_INDEX), {}, NO_EXAMPLES)


def num_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


@lru_cache(maxsize=4)
def meta_model(folder: str) -> WholeModel:
    """The model of a folder without memory, to count and to ask for positions. Raises
    ValueError."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        return WholeModel(AutoModelForImageTextToText.from_config(read_config(Path(folder))),
                          torch.float32)


class PartFlops(NamedTuple):
    """FLOP of the forward pass of a part. position, pair: of its blocks, of a position and of two
    that attend to each other; row: of a patch before the blocks, or of a target's logits; token: of
    the connector."""

    position: int
    pair: int
    row: int
    token: int = 0


@lru_cache(maxsize=4)
def part_flops(folder: str) -> dict[str, PartFlops]:
    """vision, llm -> their FLOP. Attention in windows counts as if it had none."""
    whole, sizes = meta_model(folder), {}
    stacks, config = whole.blocks(), whole.hf.config
    text, tower = config.get_text_config(decoder=True), config.vision_config
    width = text.num_attention_heads * (getattr(text, "head_dim", None)
                                        or text.hidden_size // text.num_attention_heads)
    across = getattr(tower, "embed_dim", None) or tower.hidden_size
    for part, stack in stacks.items():
        sizes[part] = sum(p.numel() for p in stack.parameters() if p.dim() > 1)
    # A pair of positions: 2 products of 2 FLOP; half of the pairs where it is causal.
    position, pair = 2 * sizes["vision"], 4 * len(stacks["vision"]) * across
    if config.model_type in TILED:  # a position attends to those of its tile
        first = any(n.endswith(("cls_token", "class_embedding")) for n, _ in
                    whole.named_parameters())
        side = int(np.max(tower.image_size)) // int(np.max(tower.patch_size))
        position, pair = position + pair * (side**2 + first), 0
    front, connector = (sum(m.weight.numel() for m in found) for found in around(whole))
    return {"vision": PartFlops(position, pair, 2 * front, 2 * connector),
            "llm": PartFlops(2 * sizes["llm"], 2 * len(stacks["llm"]) * width,
                             2 * whole.hf.get_output_embeddings().weight.numel())}


def around(whole: WholeModel) -> tuple[list[nn.Module], list[nn.Module]]:
    """(What cuts pixels into patches, the linear layers behind the blocks of the encoder)."""
    inside = {id(m) for stack in whole.blocks().values() for m in stack.modules()}
    inside.add(id(whole.hf.get_output_embeddings()))
    found = [m for m in whole.hf.modules() if id(m) not in inside
             and isinstance(m, nn.Linear | nn.Conv2d | nn.Conv3d)]
    front = [m for m in found if m.weight.dim() > 2 and m.weight.shape[1] == 3]
    return front, [m for m in found if m not in front]


def feature_width(folder: str) -> int:
    """Numbers that the LLM gets for a token of an image, deepstack's too."""
    config = meta_model(folder).hf.config
    deep = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
    return config.get_text_config(decoder=True).hidden_size * (1 + len(deep))


def whole_work(model: ModelConfig, phase: str, lengths: Lengths, checkpointing: str) -> Work:
    """See orchmllm.models.flops.phase_work."""
    flops = part_flops(model.folder).get(phase, PartFlops(0, 0, 0))  # no family has audio
    frozen, causal = getattr(model, phase).frozen, phase == "llm"
    passes = (1 if causal else 0) if frozen else 2  # towards the input, towards the weights
    blocks, front = flops.position * lengths.positions, flops.row * lengths.rows
    attention, connector = flops.pair * lengths.positions.astype(float)**2, (
        flops.token * lengths.tokens)
    again = float(checkpointing == "full" and passes > 0)
    return Work(
        forward=np.stack([front + blocks + connector, attention]),
        # Pixels need no gradient.
        backward=np.stack([passes * (front if causal else front / 2) + passes * blocks
                           + 2 * connector, 2 * min(passes, 1) * attention]),
        recompute=again * np.stack([blocks, attention]))


def plan_whole(job: Job) -> PlanSpec:
    """What the planner has to know. Each rank reads the text that its LLM takes and the media that
    it encodes. An image costs by its patches, an example by its tokens, both from the weights of
    the blocks and the width of their attention."""
    recipe, model = job.recipe, job.recipe.model
    vision, llm = (part_flops(model.folder)[part] for part in ("vision", "llm"))
    # Forward, towards the input, towards the weights.
    passes = {"vision": 1 if model.vision.frozen else 3, "llm": 2 if model.llm.frozen else 3}
    return PlanSpec(
        costs={
            "vision": CostModel(passes["vision"] * vision.position, passes["vision"] * vision.pair),
            "audio": CostModel(1, 0),  # no family here has any
            "llm": CostModel(passes["llm"] * llm.position, 3 * llm.pair)},
        row_bytes=dict.fromkeys(ENCODERS, 0),  # media are read where they are encoded
        feature_bytes=feature_width(model.folder) * DTYPE_BYTES[recipe.fsdp.forward_dtype],
        ranks_per_node=job.ranks_per_node, fills=True,
        balance=replace(recipe.balance, dispatch="load"))


def describe_attention(folder: str, device_type: str, dtype: torch.dtype) -> str:
    """One line for the log: what computes attention, and why."""
    text = meta_model(folder).hf.config.get_text_config(decoder=True)
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return ("attention: llm, where it is causal: "
            f"{attention_backend(device_type, dtype, size).description}, with windows or images: "
            "scaled_dot_product_attention per example; vision: as transformers chooses")
