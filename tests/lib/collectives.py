"""Every collective of the device of one of several simulated ranks: which, on which communicator,
of how many numbers. NCCL waits for ever where ranks differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed.tensor import debug
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from orchmllm.comm.exchange import exchange_group
from orchmllm.config.balance import BalanceConfig
from orchmllm.config.job import resolve
from orchmllm.config.recipe import FsdpConfig, TrainConfig
from orchmllm.encoders.mirrored import Mirrored
from orchmllm.models.whole_flops import plan_spec
from orchmllm.orchestrator import Orchestrator
from orchmllm.plan.layout import ENCODERS, BatchLayout
from orchmllm.plan.step import StepPlan, build_plan
from orchmllm.sharding.fsdp import reshard
from orchmllm.sharding.optimizer import clip_gradients, learning_parts, make_optimizer
from tests.lib.accelerator import accelerator
from tests.lib.drawn import model_of
from tests.lib.recipes import frozen
from tests.lib.simulated import microbatch, on_meta, shard_on
from tests.lib.synthetic import SyntheticDataset, recipe


class Collective(NamedTuple):
    """group: name of the communicator. ranks: its members. sizes: numbers of each tensor, and their
    dtype; of an all-to-all the dtype alone. sent, received: rows by member, of an all-to-all."""

    name: str
    group: str
    ranks: tuple[int, ...]
    sizes: tuple
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()


class Log(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, Mirrored) for t in types):
            return NotImplemented  # it calls what it needs of the device
        if func.namespace == "c10d":
            self.found.append(self._describe(func.__name__.split(".")[0], args))
        if func.__name__.startswith("to."):
            # Below autograd, as where Mirrored calls it, it is no copy yet, and FakeTensorMode
            # would compute it of what is no fake tensor.
            return func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _describe(name: str, args: Sequence) -> Collective:
        (group,) = (dist.ProcessGroup.unbox(a) for a in args if isinstance(a, torch.ScriptObject)
                    and "ProcessGroup" in str(a._type()))
        tensors = [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        ranks, dtype = tuple(dist.get_process_group_ranks(group)), str(tensors[0].dtype)
        if name == "alltoall_base_":
            received, sent = (tuple(a) for a in args if isinstance(a, list))
            return Collective(name, group.group_name, ranks, (dtype,), sent, received)
        return Collective(name, group.group_name, ranks, (dtype, *(x.numel() for x in tensors)))


@dataclass(frozen=True)
class Setting:
    """What decides which collectives a step makes. frozen: parts of the model that do not learn."""

    dispatch: str = "load"
    frozen: tuple[str, ...] = ()
    fsdp: FsdpConfig = FsdpConfig()


def planned(data: SyntheticDataset, num_ranks: int, dispatch: str, seed: int) -> StepPlan:
    """Images go to the last rank, audio to the first and text to those between, so that every rank
    lacks something; with seeds that leave 1 or 2 when divided by 3 media, or text, go anywhere."""
    spec = plan_spec(resolve(
        recipe(balance=BalanceConfig(dispatch=dispatch)), num_ranks, num_ranks))
    rng = np.random.default_rng(seed)
    layout = BatchLayout.concat(
        [data.layout((i + seed) % len(data)) for i in range(2 * num_ranks)], [2] * num_ranks)
    encode = {m: np.full(len(layout.segments[kind]), num_ranks - 1 if m == "vision" else 0)
              for m, kind in ENCODERS.items()}
    if seed % 3 == 1:
        encode = {m: rng.integers(0, num_ranks, len(ranks)) for m, ranks in encode.items()}
    edge = seed % 3 != 2
    llm = rng.integers(edge, num_ranks - edge, layout.num_examples)
    return build_plan(layout, encode, llm, spec)


def collectives(num_ranks: int, rank: int, setting: Setting) -> list[Collective]:
    """Those of a rank in a step of three microbatches, in a validation and in one microbatch more.
    """
    debug._clear_python_sharding_prop_cache()  # they hold meshes of the rank before
    debug._clear_fast_path_sharding_prop_cache()
    data = SyntheticDataset()
    with accelerator(num_ranks, rank) as device:
        with unset_fake_temporarily():
            group = exchange_group(device, 60.0)
            model = on_meta(frozen(*setting.frozen, model=model_of(
                vision={"depth": 1}, audio={"encoder_layers": 1})), setting.fsdp, group)
        shard_on(device, model, setting.fsdp)
        optimizer = make_optimizer(model, TrainConfig())

        def loss(seed: int) -> torch.Tensor:
            with unset_fake_temporarily():
                plan = planned(data, num_ranks, setting.dispatch, seed)
                micro = microbatch(model, data, plan, rank, setting.dispatch)
                planner = Orchestrator(
                    plan.spec, SimpleNamespace(rank=rank, world_size=num_ranks), device=device,
                    group=group, device_group=group)
            return model(planner.dispatch(micro)) / 10

        with Log() as log:
            for seed in range(3):
                loss(seed).backward()
            clip_gradients(learning_parts(model), 1.0, device)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            model.eval()
            with torch.no_grad():
                loss(3)
            reshard(model)
            model.train()
            loss(4).backward()
    return log.found


def difference(logs: Sequence[Sequence[Collective]]) -> str:
    """The first collective in which two ranks do not meet, "" if all do: on the communicators that
    both are in, in order, and in what one sends the other."""
    for a, one in enumerate(logs):
        for b, other in enumerate(logs[:a]):
            mine, theirs = ([c for c in log if {a, b} <= {*c.ranks}] for log in (one, other))
            for at, (x, y) in enumerate(zip(mine, theirs, strict=False)):
                i, j = x.ranks.index(a), x.ranks.index(b)
                moved = x.sent and (x.sent[j], x.received[j]) != (y.received[i], y.sent[i])
                if x[:4] != y[:4] or moved:
                    return f"collective {at} of ranks {b} and {a}: {y} and {x}"
            if len(mine) != len(theirs):
                return f"ranks {b} and {a} share {len(theirs)} and {len(mine)} collectives"
    return ""

