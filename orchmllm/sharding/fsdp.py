"""FSDP2 (ZeRO-3) around the model: one root, nested units, gradients summed, never averaged.

A step's loss is a sum over all ranks divided by the global number of targets, so the reduction has
to SUM: gradient divide factor 1, and sums forced because gloo has no pre-multiplied sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.tensor import DTensor

from orchmllm.config.recipe import FsdpConfig
from orchmllm.config.train import OPTIMIZER_STATE
from orchmllm.models.whole_model import WholeModel
from orchmllm.sharding.gathers import ShardUnit, shard_units


def compute_dtype(config: FsdpConfig) -> torch.dtype:
    """Of forward and backward."""
    return getattr(torch, config.forward_dtype)


def make_mesh(shard_size: int, device_type: str) -> DeviceMesh:
    """1-D mesh over all ranks (shard_size 0 or the world), else the 2-D (replicate, shard) mesh of
    hybrid sharding. shard_size: divides the world (orchmllm.config.job.check_world)."""
    world = dist.get_world_size()
    if shard_size in (0, world):
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    mesh = init_device_mesh(device_type, (world // shard_size, shard_size),
                            mesh_dim_names=("replicate", "shard"))
    options = dist.group.WORLD._get_backend(torch.device(device_type)).options
    if options is not None:  # a backend may have no timeout
        for group in mesh.get_all_groups():  # to which torch gives one of its own
            dist.distributed_c10d._set_pg_timeout(options._timeout, group)
    return mesh


def shard_all(model: nn.Module, orders: tuple[list[ShardUnit], list[ShardUnit]], config: FsdpConfig,
              device: torch.device, ranks_per_node: int) -> None:
    """fully_shard on all units of a model, with gradients that are summed. orders: see
    shard_units."""
    shard_units(orders, config, ranks_per_node, {
        "mesh": make_mesh(config.shard_size, device.type),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=getattr(torch, config.compute_dtype) if config.compute_dtype else None,
            reduce_dtype=getattr(torch, config.sum_dtype),
            # The default would cast fp32 positions and mel frames to bf16 on the way in.
            cast_forward_inputs=False,
        ),
        "offload_policy": (CPUOffloadPolicy(pin_memory=device.type == "cuda")
                           if config.cpu_offload else OffloadPolicy()),
    })
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters. After a forward pass without gradients with
    fsdp.reshard_after_forward=false every unit is still gathered: what `model.parameters()` gives
    then are full copies in the compute dtype, which no optimizer knows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def evaluating(model: WholeModel) -> Iterator[None]:
    """Within it the model computes without gradients; then it trains as before."""
    model.eval()
    with torch.no_grad():
        yield
    reshard(model)
    model.train()
    model.clock.switch("data")


def state_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, *, fixed: bool = True
                  ) -> dict[str, Tensor]:
    """What has to be saved: parameters as model.NAME, the optimizer's state as exp_avg.NAME
    and so on (zeros where it has not run yet). The tensors are the live ones. fixed: also
    parameters that do not learn.

    Raises ValueError for a parameter that is gathered, or that learns and is not the optimizer's.
    """
    owned = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = dict(model.named_parameters())
    sharded = any(isinstance(p, DTensor) for p in parameters.values())
    out = {}
    for name, p in parameters.items():
        if (p.requires_grad and id(p) not in owned) or isinstance(p, DTensor) != sharded:
            raise ValueError(
                f"parameter {name} ({p.dtype}, {tuple(p.shape)}) is not the one that the optimizer "
                "updates: its unit is still gathered after a forward pass; call "
                "orchmllm.sharding.fsdp.reshard(model) before saving")
        if fixed or p.requires_grad:
            out[f"model.{name}"] = p.detach()
        if not p.requires_grad:
            continue
        if not optimizer.state.get(p):
            optimizer.state[p] = {
                # AdamW's fused kernel reads it on the device.
                "step": torch.zeros((), dtype=torch.float32, device=p.device),
                **{key: torch.zeros_like(p) for key in OPTIMIZER_STATE}}
        for key in OPTIMIZER_STATE:
            out[f"{key}.{name}"] = optimizer.state[p][key].detach()
    return out
