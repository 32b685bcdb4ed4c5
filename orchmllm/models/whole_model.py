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
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from orchmllm.batch import (
    IGNORE_INDEX,
    IN_ONE_ROW,
    TYPES,
    UNKNOWN,
    Microbatch,
    PackedExamples,
    ProcessedExample,
    SequenceLengths,
    joined,
    on_device,
)
from orchmllm.config.model import ModelConfig
from orchmllm.encoders.infer import infer_encoders
from orchmllm.encoders.mirrored import Mirrored, compute_on_host
from orchmllm.models import packing, structure, towers
from orchmllm.models.attention import attention_backend
from orchmllm.models.families import model_class, read_config
from orchmllm.models.fused import fuse
from orchmllm.models.generate import generated
from orchmllm.models.loss import answers_with_loss
from orchmllm.models.made import MadeItems
from orchmllm.models.phase_clock import PhaseClock
from orchmllm.models.shared import SharedExamples
from orchmllm.plan.layout import GENERATOR, NO_EXAMPLES


class WholeModel(nn.Module):
    """hf: a model of orchmllm.models.families, in train mode, whose configuration nobody else has.
    dtype: of forward and backward. The phases' times are in `clock`. encoders: an
    orchmllm.encoders.planned.PlannedEncoders of hf, for batches that were planned; node_group: the
    ranks that may share examples. seed: of what is drawn for images that are made; device_group:
    the ranks that move their conditions. loss_chunk_rows: see orchmllm.models.loss.LossHead.
    num_layers: of the text model, each of which has to keep the examples of a row apart."""

    encoders: Any = None
    loss_chunk_rows = 0
    seed = 0
    device_group: dist.ProcessGroup | None = None
    node_group: dist.ProcessGroup | None = None

    def __init__(self, hf: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.hf, self.clock, self.dtype = hf, PhaseClock(), dtype
        self._places = structure.places(hf)  # wrappers that come later change classes and names
        self._text = text = hf.config.get_text_config(decoder=True)
        self._stock_attention = text._attn_implementation
        text._attn_implementation = packing.NAME
        towers.use_packed_attention(self.blocks())
        compute_on_host(hf)
        fuse(hf)
        self.num_layers = text.num_hidden_layers
        accepted = inspect.signature(hf.forward).parameters
        self._keeps = "logits_to_keep" in accepted
        self._types = [name for name in TYPES if name in accepted]
        self._index = next((m.get_rope_index for m in hf.modules()
                            if hasattr(m, "get_rope_index")), None)
        self._index_takes = self._index and [*inspect.signature(self._index).parameters]
        self.mixers = [m for m in hf.modules() if type(m).__name__.endswith("GatedDeltaNet")]
        for mixer in self.mixers:
            packing.keep_apart(mixer)

    def check_shares(self) -> None:
        """Raises ValueError for a model whose examples ranks cannot share."""
        why = ""
        if self.mixers:
            why = (f"{type(self.mixers[0]).__mro__[2].__name__} takes a state from position to "
                   "position, so that ranks would wait for each other")
        elif any(encoder.padded for encoder in infer_encoders(self.hf)[1]):
            why = f"{type(self.hf).__name__} reads lengths of whole media beside their features"
        elif self.generator is not None:
            why = "an image is made from the states of all that is before it"
        if why:
            raise ValueError(f"balance.llm.max_shares: {why}: set it to 1")

    def part_of(self, name: str) -> str:
        """The part that a parameter or a module of `hf` belongs to: vision, audio, connector, llm
        or generator. name: such as model.visual.merger.norm.weight."""
        return structure.part_of(self._places, name)

    @property
    def generator(self) -> nn.Module | None:
        """The part that makes images, see orchmllm.composition.generator."""
        return getattr(self.hf, GENERATOR, None)

    @property
    def num_losses(self) -> int:
        """See forward."""
        return 1 + (self.generator is not None)

    def blocks(self) -> dict[str, nn.ModuleList]:
        """The stack of transformer blocks of each part that the model has: in each the list of
        modules that has most parameters."""
        stacks: dict[str, nn.ModuleList] = {}
        for name, module in self.hf.named_modules():
            part = self.part_of(f"{name}.")
            if isinstance(module, nn.ModuleList) and part != "connector":
                stacks[part] = max(stacks.get(part, module), module, key=lambda stack: sum(
                    p.numel() for p in stack.parameters()))
        return stacks

    def join(
        self, examples: Sequence[ProcessedExample], media: Mapping[str, Any] | None = None,
        micro: Microbatch | None = None, step: int = 0,
    ) -> PackedExamples:
        """One packed row; on the CPU. media, micro: of a planned microbatch, see
        PlannedEncoders.packed; examples are then those of its LLM, without the content of media,
        and for none of them the row is one token, of which nothing is learnt. step: its number, by
        which noise is drawn."""
        is_filled, examples, shared = not examples, examples or [_FILLER], None
        mine = None if micro is None else micro.rank_plan
        row = [(k, slice(0, len(e.input_ids))) for k, e in enumerate(examples)]
        if mine is not None and not is_filled:
            at = np.searchsorted(mine.examples, mine.row[:, 0]).tolist()
            row = [(k, slice(start, start + n))
                   for k, (_, start, n) in zip(at, mine.row.tolist(), strict=True)]
        positions = [self._positions(e) for e in examples]
        next_ids = [F.pad(e.labels[1:], (0, 1), value=IGNORE_INDEX) for e in examples]
        ids = torch.cat([examples[k].input_ids[run] for k, run in row])
        labels = torch.cat([next_ids[k][run] for k, run in row])
        kept, types = (labels != IGNORE_INDEX).nonzero()[:, 0], [ids]
        lengths = [run.stop - run.start for _, run in row]
        if mine is not None and mine.shared is not None:
            plan = replace(mine.shared, places=(None,)) if is_filled else mine.shared
            shared = SharedExamples.of(plan, tuple(lengths), self.node_group)
            types += [examples[k].input_ids for k in np.searchsorted(
                mine.examples, plan.texts).tolist()]  # masks look them up
        inputs = {
            "input_ids": ids[None],
            "position_ids": torch.cat([positions[k][..., run] for k, run in row], -1),
            **{name: self._type_ids(torch.cat(types))[None] for name in self._types}}
        for name in dict.fromkeys(name for e in examples for name in e.media if name not in TYPES):
            parts = [e.media[name] for e in examples if name in e.media]
            slotted = any(IN_ONE_ROW in e.media for e in examples) and name.startswith("pixel_")
            inputs[name] = joined(parts, int(slotted))
        phases, made = {}, None
        if micro is not None:
            phases = self.encoders.packed(examples, media, micro)
            if GENERATOR in media:
                made = MadeItems.of(media[GENERATOR], micro, self.seed, step)
        return PackedExamples(inputs, kept, labels[kept], SequenceLengths.from_lengths(lengths),
                              phases, shared, made)

    def forward(self, batch: PackedExamples, asked: Mapping[str, Any] | None = None
                ) -> Tensor | list[int]:
        """Sum of the cross entropy over this rank's targets, a scalar; of a model that makes images
        (2,), the second is Generator.forward's. The caller divides by the targets, and the rows of
        images, of all ranks. Raises RuntimeError where packing or the model's head did not do what
        the loss relies on.

        asked: options of transformers' generate, for a row of one example: the token ids that
        follow it, instead. It is a forward because a sharded model gathers its root for one."""
        self.clock.switch("llm")
        inputs: dict[str, Any] = {
            name: value.to(self.dtype) if value.is_floating_point() else value
            for name, value in batch.inputs.items()}
        put = Mirrored if asked is None else on_device
        inputs |= {name: put(value, batch.kept.device) for name, value in batch.read.items()}
        answering = nullcontext() if not batch.phases else self.encoders.answering(
            batch.phases, inputs, self.clock, self.dtype)
        if asked is not None:
            with answering:
                return self._generated(inputs, asked)
        if self.mixers:
            inputs["seqlens"] = batch.seqlens
        losing = nullcontext()
        if 0 < self.loss_chunk_rows < len(batch.kept):
            losing = answers_with_loss(self.hf.get_output_embeddings(), batch.targets,
                                       self.loss_chunk_rows)
        with answering, packing.packed(
                batch.seqlens, self.num_layers, batch.shared), losing as made:
            out = self.outputs(inputs, batch.kept, None if batch.made is None else batch.made.at)
        loss = self._summed(out.logits, batch.targets, made)
        if self.generator is not None:
            loss = torch.stack([loss, loss.new_zeros(()) if batch.made is None else batch.made.loss(
                self.generator, out.hidden_states[0], self.device_group, self.clock).to(loss)])
        if torch.is_grad_enabled() and not loss.requires_grad:
            loss.requires_grad_()  # the text model is frozen, and no rank has media
        return loss

    def outputs(self, inputs: Mapping[str, Any], kept: Tensor, states_of: Tensor | None = None
                ) -> Any:
        """What the model returns, with logits (1, k, V) of the positions kept (k,) of a row.
        states_of: see ComposedForConditionalGeneration."""
        inputs, keeping = dict(inputs), packing.positions(self.hf.get_output_embeddings(), kept)
        if self._keeps:
            inputs["logits_to_keep"], keeping = kept, nullcontext()
        if states_of is not None:
            inputs["states_of"] = states_of
        ones = torch.ones_like(inputs["input_ids"])  # without it some models look for examples
        with keeping:
            return self.hf(**inputs, attention_mask=ones, use_cache=False)

    def _generated(self, inputs: dict[str, Any], asked: Mapping[str, Any]) -> list[int]:
        """With the attention and the positions of transformers: one example is not packed. Blocks
        that are compiled would be compiled again for it. The clock sees each pass for a token, also
        those that other ranks need, as progress."""
        del inputs["position_ids"]
        self._text._attn_implementation = self._stock_attention
        try:
            with (self.hf.register_forward_pre_hook(lambda *_: self.clock.switch("llm")),
                  torch.compiler.set_stance("force_eager")):
                return generated(self.hf, inputs, **asked)
        finally:
            self._text._attn_implementation = packing.NAME

    def _summed(self, logits: Tensor, targets: Tensor, made: list[Tensor] | None) -> Tensor:
        """The loss of logits (1, k, V); made: or what the head answered instead of them."""
        name = type(self.hf).__name__
        if made is not None:
            if not any(logits is loss for loss in made):
                raise RuntimeError(f"{name} changes what its head computes, so that its loss "
                                   "cannot be made in chunks: set fsdp.loss_chunk_rows to 0")
            return logits.sum()  # of one number: a view would let FSDP2 warn
        if len(logits[0]) != len(targets):
            raise RuntimeError(f"{name} returned {len(logits[0])} rows of logits for "
                               f"{len(targets)} positions")
        return F.cross_entropy(logits[0].to(torch.promote_types(torch.float32, logits.dtype)),
                               targets, reduction="sum")

    def _type_ids(self, ids: Tensor) -> Tensor:
        """1 at tokens of images, 2 at those of videos."""
        config = self.hf.config
        return ((ids == config.image_token_id).int()
                + 2 * (ids == getattr(config, "video_token_id", None)))

    def _positions(self, example: ProcessedExample) -> Tensor:
        """(1, n), or (4, 1, n) for a model with rotary positions of three axes: the first row is
        the place in the example. Raises ValueError where the model's own code has none."""
        flat = torch.arange(len(example.input_ids))[None]
        if self._index is None:
            return flat
        ids = example.input_ids
        given = {name: value for name, value in example.media.items() if name.endswith("grid_thw")}
        if not given:
            return flat[None].repeat(4, 1, 1)
        given = {**example.media, "input_ids": ids[None],
                 "attention_mask": torch.ones_like(ids)[None],
                 "mm_token_type_ids": self._type_ids(ids)[None]}
        if "feature_attention_mask" in example.media:
            given["audio_seqlens"] = example.media["feature_attention_mask"].sum(-1)
        try:
            axes, _ = self._index(**{n: given[n] for n in self._index_takes if n in given})
        except Exception as error:  # whatever the model's own code raises
            raise ValueError(
                f"example {example.example_id} has no positions by {type(self.hf).__name__} itself "
                f"({error}): some models need what follows a medium, which "
                "data.max_example_tokens may have cut") from error
        return torch.cat([flat[None], axes.long()])


_FILLER = ProcessedExample(UNKNOWN, torch.zeros(1, dtype=torch.int64),
                           torch.full((1,), IGNORE_INDEX), {}, NO_EXAMPLES)


@lru_cache(maxsize=4)
def meta_model(folder: str) -> WholeModel:
    """The model of a folder without memory, to count and to ask for positions. Raises
    ValueError."""
    config = read_config(Path(folder))
    with torch.device("meta"):
        return WholeModel(model_class(config)._from_config(config), torch.float32)


def attention_kernels(model: ModelConfig, device_type: str, dtype: torch.dtype) -> dict[str, str]:
    """Part -> what computes its attention, and why: of the LLM where it is causal, of an encoder
    where its media are packed."""
    whole = meta_model(model.folder)
    text = whole.hf.config.get_text_config(decoder=True)
    sizes = {part: size for part, stack in whole.blocks().items() if part != "llm" for size in [
        next((m.head_dim for m in stack[0].modules() if hasattr(m, "head_dim")), 0)] if size}
    sizes["llm"] = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {part: attention_backend(device_type, dtype, size).description
            for part, size in sizes.items()}


def describe_attention(model: ModelConfig, device_type: str, dtype: torch.dtype) -> str:
    """Lines for the log: what computes attention, and why."""
    kernels = attention_kernels(model, device_type, dtype)
    return ("attention of causal texts and of packed media (else scaled_dot_product_attention):"
            + "".join(f"\n  {part}: {kernel}" for part, kernel in kernels.items()))
