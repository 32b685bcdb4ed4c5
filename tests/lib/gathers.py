"""Every all-gather of parameters that FSDP2 starts, in order: of which unit, among how many ranks,
and whether in the backward pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather


class Gather(NamedTuple):
    """unit: its name in the model, `root` for the model itself. ranks: of the group."""

    unit: str
    backward: bool
    ranks: int


class _Logged(DefaultAllGather):
    def __init__(self, unit: str, log: list[Gather]) -> None:
        self.unit, self.log = unit, log

    def __call__(self, *args, group, **kwargs):
        backward = torch._C._current_graph_task_id() != -1
        self.log.append(Gather(self.unit, backward, dist.get_world_size(group)))
        return super().__call__(*args, group=group, **kwargs)


def log_gathers(model: nn.Module) -> list[Gather]:
    """The list to which every all-gather of a sharded model is added from now on."""
    log: list[Gather] = []
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            unit = name.removeprefix("hf.").removeprefix("model.") or "root"
            module.set_custom_all_gather(_Logged(unit, log))
    return log
