"""A model of transformers with our units, mesh and precision, read by transformers' own loader.

from_pretrained can load into a sharded model: it builds the model without memory, hands it to
`maybe_distribute_model`, and reads this rank's rows of what comes back, with its conversions of
names, its ties and its buffers. That method is answered here. It is no public interface: versions
of transformers that were not tried are not used (orchmllm.models.families).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from orchmllm.config.model import ModelConfig
from orchmllm.config.recipe import FsdpConfig
from orchmllm.hf.folder import links_of
from orchmllm.hf.tensors import refuse_unequal
from orchmllm.models import adapters
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.layout import ENCODERS, GENERATOR
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.compiled import compile_whole
from orchmllm.sharding.fsdp import compute_dtype, shard_all
from orchmllm.sharding.gathers import ShardUnit, of_encoder
from orchmllm.sharding.initial_values import drawn_by_rows, seed_adapters


def load_whole(
    folder: Path, model: ModelConfig, config: FsdpConfig, device: torch.device,
    checkpointing: Mapping[str, str], ranks_per_node: int = 1, seed: int = 0,
    before_collectives: Callable[[], None] = lambda: None,
) -> WholeModel:
    """The sharded model of a folder, in train mode: with its weights, or, if it is model.config,
    with those that its class draws; collective over all ranks. Raises ValueError if weights are
    missing or have another shape. checkpointing: see orchmllm.sharding.blocks.recompute.
    ranks_per_node: see orchmllm.sharding.gathers. seed: of what is drawn. before_collectives:
    called when the model is known, before groups are made."""
    from transformers.distributed import DistributedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()  # one of each rank
    made: list[WholeModel] = []
    fixed: set[str] = set()
    layers: dict[str, nn.Module] = {}

    def distribute(hf: nn.Module) -> None:
        hf.tie_weights()  # else FSDP2 would keep two copies of such a row, one of which gets old
        table, head = hf.get_input_embeddings(), hf.get_output_embeddings()
        if not model.config and head is not None and head.weight is table.weight:
            refuse_unequal(folder, hf._tied_weights_keys or {})
        whole = WholeModel(hf, compute_dtype(config))
        whole.loss_chunk_rows = config.loss_chunk_rows
        if model.lora.rank:
            layers.update(adapters.inject(whole, model))
        freeze(whole, model)
        fixed.update(name for name, p in hf.named_parameters() if not p.requires_grad)
        recompute(whole, checkpointing)
        if config.compile:
            compile_whole(whole, device)
        before_collectives()
        shard_all(whole, ordered(whole, config), config, device, ranks_per_node)
        adapters.take_out(hf, layers)
        made.append(whole)

    settings = read_config(folder)
    settings._experts_implementation = experts_by(compute_dtype(config))
    cls = model_class(settings)
    place = None if config.cpu_offload else device
    options = {"dtype": getattr(torch, config.param_dtype), "local_files_only": True,
               "distributed_config": DistributedConfig(fsdp_size=1), "config": settings}
    with _distributed_by(cls, distribute, place), _converted_by_rows(place):
        if model.config:
            with drawn_by_rows(cls, seed):
                cls.from_pretrained(None, state_dict={}, **options)
        else:
            _read(cls, folder, seed, options)
    adapters.put_back(made[0].hf, layers, torch.device("cpu") if config.cpu_offload else device)
    seed_adapters(made[0].hf, seed)
    whole = made[0].train()
    if whole.generator is not None:
        whole.generator.load_codec(folder, device, compute_dtype(config))
    for name, parameter in whole.hf.named_parameters():  # what was loaded is made anew
        parameter.requires_grad_(name not in fixed)
    return whole


def _read(cls: type, folder: Path, seed: int, options: Mapping[str, Any]) -> None:
    """Of a composed model that was not trained yet, the connectors are drawn. Raises ValueError if
    weights are missing or have another shape."""
    parts = tuple(links_of(folder))
    with drawn_by_rows(cls, seed) if parts else nullcontext():
        _, told = cls.from_pretrained(folder, use_safetensors=True, output_loading_info=True,
                                      **options)
    wrong = [name for kind in ("missing_keys", "mismatched_keys") for name in told[kind]
             if str(name).startswith(parts or "")]
    if wrong:
        raise ValueError(f"{folder}: {len(wrong)} weights are missing or have another shape "
                         f"({', '.join(map(str, sorted(wrong)[:3]))}): copy the folder completely")


def experts_by(dtype: torch.dtype) -> str | None:
    """What computes the experts of a layer, by transformers' names: one product of the tokens of
    all experts, which has no float64, or one expert after the other."""
    return "eager" if dtype == torch.float64 else None


def freeze(whole: WholeModel, model: ModelConfig) -> None:
    """Fixes the parts that the recipe says; with adapters, all that they are beside."""
    for name, parameter in whole.hf.named_parameters():
        if model.lora.rank:
            parameter.requires_grad_(adapters.learns(whole, name, model))
        elif not model.learns(whole.part_of(name)):  # what its class fixes stays fixed
            parameter.requires_grad_(False)


def ordered(whole: WholeModel, config: FsdpConfig) -> tuple[list[ShardUnit], list[ShardUnit]]:
    """The units in the order of the forward pass and in that of the backward pass: the blocks,
    and the embedding and the head where they are not one. The root has the rest of the model, a
    tower's own weights too: transformers finds what it records by the names of classes, which
    fully_shard changes."""
    stacks = whole.blocks()
    tower = [of_encoder(block, config.reshard(part)) for part in ENCODERS if part in stacks
             for block in stacks[part]]
    layers = [ShardUnit(layer, config.reshard("llm")) for layer in stacks["llm"]]
    made = [ShardUnit(block, config.reshard(GENERATOR)) for block in stacks.get(GENERATOR, ())]
    root = ShardUnit(whole, "none")
    table, head = whole.hf.get_input_embeddings(), whole.hf.get_output_embeddings()
    ends = ([], []) if head.weight is table.weight else (
        [ShardUnit(table, "full", backward=False)], [ShardUnit(head, "none")])
    return ([root, *tower, *ends[0], *layers, *ends[1], *made],
            [*reversed(made), *ends[1], root, *reversed(layers), *ends[0], *reversed(tower)])


@contextmanager
def _distributed_by(cls: type, distribute: Callable[[nn.Module], None],
                    device: torch.device | None) -> Iterator[None]:
    """Within it cls.from_pretrained gives its model without memory to `distribute`, and puts what
    it reads on `device`."""
    def handed(cls: type, model: nn.Module, *_: object) -> nn.Module:
        distribute(model)
        return model

    cls.maybe_distribute_model = classmethod(handed)
    cls.prepare_distribute_model = classmethod(lambda cls, config, device_map, **_: (
        config, device, None))
    try:
        yield
    finally:
        del cls.maybe_distribute_model, cls.prepare_distribute_model


class _Rows:
    """A sharded model, the parameters of which are their rows on this rank."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        return self.model.get_parameter(name).to_local()


@contextmanager
def _converted_by_rows(device: torch.device | None) -> Iterator[None]:
    """Within it from_pretrained converts weights by the sizes of this rank's rows. By itself it
    compares what it has read with all rows, and so transposes what `save_pretrained` wrote of
    Qwen3-VL-MoE; and it cannot stack the experts of a rank that has none of them."""
    from transformers.core_model_loading import MergeModulelist, WeightConverter  # new in 5.0

    convert = WeightConverter.convert

    def by_rows(self: WeightConverter, name: str, model: nn.Module, **keys: Any) -> dict:
        rows = _Rows(model)
        if any(isinstance(operation, MergeModulelist) for operation in self.operations) and (
                not len(own := rows.get_parameter(name))):
            return {name: torch.empty_like(own, device=device or "cpu")}
        return convert(self, name, model=rows, **keys)

    WeightConverter.convert = by_rows
    try:
        yield
    finally:
        WeightConverter.convert = convert
