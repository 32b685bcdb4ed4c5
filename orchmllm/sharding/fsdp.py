"""FSDP2 (ZeRO-3) around the model: one root, nested units, gradients summed, never averaged.

A step's loss is a sum over all ranks divided by the global number of targets, so the reduction has
to SUM: gradient divide factor 1, and sums forced because gloo has no pre-multiplied sum.

Order: build (on meta with fsdp.meta_init) -> activation checkpointing per phase -> compile ->
fully_shard -> memory and weights of this rank's shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from orchmllm.config import FsdpConfig
from orchmllm.hf.sources import WeightSource
from orchmllm.models.config import ModelConfig
from orchmllm.models.mllm import MultimodalModel
from orchmllm.sharding.check import check_shards
from orchmllm.sharding.init import seed_weights
from orchmllm.sharding.pretrained import load_pretrained


def compute_dtype(config: FsdpConfig) -> torch.dtype:
    """Of forward and backward."""
    return getattr(torch, config.compute_dtype or config.param_dtype)


def make_mesh(shard_size: int, device_type: str) -> DeviceMesh:
    """1-D mesh over all ranks (shard_size 0 or the world), else the 2-D (replicate, shard) mesh of
    hybrid sharding. Raises ValueError if shard_size does not divide the world."""
    world = dist.get_world_size()
    check_shards(shard_size, world)
    if shard_size in (0, world):
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world // shard_size, shard_size),
                            mesh_dim_names=("replicate", "shard"))


def stacks(model: MultimodalModel) -> dict[str, nn.ModuleList]:
    """Transformer blocks by phase: the units of sharding, checkpointing and compiling."""
    return {"vision": model.vision.blocks, "audio": model.audio.blocks, "llm": model.llm.layers}


def blocks_of(model: MultimodalModel) -> list[nn.Module]:
    """The blocks of all phases, in the order of the forward pass."""
    return [block for stack in stacks(model).values() for block in stack]


def build_model(model: ModelConfig, config: FsdpConfig, device: torch.device, seed: int,
                checkpointing: Mapping[str, str] | None = None,
                sources: Sequence[WeightSource] = ()) -> MultimodalModel:
    """The sharded model with its initial weights; collective over all ranks.

    Without fsdp.meta_init every rank builds a full copy from torch's global generator; with it, or
    with sources (pretrained weights, `orchmllm.hf.sources`), no rank ever holds more than its
    shards. checkpointing: see `shard`."""
    if not config.meta_init and not sources:
        torch.manual_seed(seed)
        return shard(MultimodalModel(model), config, device, checkpointing)
    with torch.device("meta"):
        built = MultimodalModel(model)
    built = shard(built, config, device, checkpointing)
    built.to_empty(device=device)
    seed_weights(built, seed, skip={name for source in sources for name in source.tensors})
    load_pretrained(built, sources)
    return built


def shard(model: MultimodalModel, config: FsdpConfig, device: torch.device,
          checkpointing: Mapping[str, str] | None = None) -> MultimodalModel:
    """Applies activation checkpointing, compile and fully_shard in place; collective over all
    ranks. A model on meta stays there.

    checkpointing: phase -> none, selective or full, instead of the recipe's. Raises ValueError for
    `auto`, which orchmllm.estimate.memory.choose_checkpointing has to decide before."""
    on_meta = next(model.parameters()).is_meta
    model.to(device=None if on_meta else device, dtype=getattr(torch, config.param_dtype))
    model.llm.loss_chunk_rows = config.loss_chunk_rows
    for phase, stack in stacks(model).items():
        choice = (checkpointing or {}).get(phase) or config.checkpointing(phase)
        for index in range(len(stack)):
            stack[index] = _checkpointed(stack[index], choice)
            if config.compile:
                stack[index].compile(dynamic=True)
    options = {
        "mesh": make_mesh(config.shard_size, device.type),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.compute_dtype) if config.compute_dtype else None,
            reduce_dtype=getattr(torch, config.param_dtype) if config.compute_dtype else None,
            # The default would cast fp32 positions and mel frames to bf16 on the way in.
            cast_forward_inputs=False,
        ),
    }
    for unit in (*blocks_of(model), model.vision, model.audio, model.llm.embed_tokens,
                 model.llm.lm_head):
        fully_shard(unit, reshard_after_forward=config.reshard_after_forward, **options)
    fully_shard(model, reshard_after_forward=config.reshard_after_forward, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    if config.prefetch:
        _set_prefetch(model, config.prefetch)
    return model


def _set_prefetch(model: MultimodalModel, ahead: int) -> None:
    """Every unit gathers the next `ahead` units while it computes, across the phases' borders too:
    the first LLM layers arrive while the last audio block runs."""
    order = [model.vision, *model.vision.blocks, model.audio, *model.audio.blocks,
             model.llm.embed_tokens, *model.llm.layers, model.llm.lm_head]
    for index, unit in enumerate(order):
        unit.set_modules_to_forward_prefetch(order[index + 1: index + 1 + ahead])
    # Backward ends with what ran first; an encoder's root unit, run around its blocks, comes twice.
    reverse = [model.llm.lm_head, *reversed(model.llm.layers), *reversed(model.audio.blocks),
               *reversed(model.vision.blocks)]
    for index, unit in enumerate(reverse):
        unit.set_modules_to_backward_prefetch(reverse[index + 1: index + 1 + ahead])


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters. After a forward pass without gradients with
    fsdp.reshard_after_forward=false every unit is still gathered: what `model.parameters()` gives
    then are full copies in the compute dtype, which no optimizer knows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """What has to be saved: parameters as model.NAME, Adam's moments as exp_avg.NAME and
    exp_avg_sq.NAME (zeros where the optimizer has not run yet). The tensors are the live ones.

    Raises ValueError for a parameter that is gathered, or that learns and is not the optimizer's.
    """
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    out = {}
    for name, p in parameters.items():
        name = name.replace("_checkpoint_wrapped_module.", "")
        if (p.requires_grad and id(p) not in owned) or isinstance(p, DTensor) != sharded:
            raise ValueError(
                f"parameter {name} ({p.dtype}, {tuple(p.shape)}) is not the one that the optimizer "
                "updates: its unit is still gathered after a forward pass; call "
                "orchmllm.sharding.fsdp.reshard(model) before saving")
        out[f"model.{name}"] = p.detach()
        if not p.requires_grad:
            continue
        if not optimizer.state.get(p):
            optimizer.state[p] = {
                "step": torch.zeros((), dtype=torch.float32),
                "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        for key in ("exp_avg", "exp_avg_sq"):
            out[f"{key}.{name}"] = optimizer.state[p][key].detach()
    return out


def _checkpointed(block: nn.Module, choice: str) -> nn.Module:
    if choice == "none":
        return block
    if choice not in ("selective", "full"):
        raise ValueError(f"fsdp.activation_checkpointing {choice!r}: decide before sharding")
    context = {"context_fn": _selective_contexts} if choice == "selective" else {}
    return checkpoint_wrapper(block, checkpoint_impl=CheckpointImpl.NO_REENTRANT,
                              preserve_rng_state=False, **context)


def _selective_contexts():
    return create_selective_checkpoint_contexts(_keep_products)


def _keep_products(ctx, op, *args, **kwargs) -> CheckpointPolicy:
    """Keeps what costs FLOPs: outputs of matrix products and of attention kernels."""
    name = str(op)
    product = name.startswith(("aten.mm", "aten.addmm", "aten.bmm")) or (
        "attention" in name or "varlen" in name or "flash_attn" in name)
    backward = "backward" in name
    return (CheckpointPolicy.MUST_SAVE if product and not backward
            else CheckpointPolicy.PREFER_RECOMPUTE)
