"""balance_encoders inside loops that others wrote: one line before them, and the same weights."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from orchmllm import balance_encoders
from tests.lib.clients import as_torchrun
from tests.lib.encoder_models import FAMILIES, batch
from tests.lib.encoder_runs import gradients, reference, scenarios, worst
from tests.lib.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


def with_accelerate(world) -> list[float]:
    """accelerate's own FSDP2 around a model with a text-only rank."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    family = FAMILIES["qwen3_vl"]
    torch.manual_seed(0)
    model = family.build()
    inputs = batch(family, model, scenarios(family)["text only"][world.rank], world.rank)
    want = reference(model, inputs)[1]
    handle = balance_encoders(model)
    with as_torchrun(world):
        accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Qwen3VLTextDecoderLayer", "Qwen3VLVisionBlock"]))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.backward(model(**inputs, use_cache=False).loss)
    return [worst(gradients(model), want), handle.last["vision"].moved]


def test_accelerate_with_fsdp2():
    for difference, moved in run_ranks(with_accelerate, 3):
        assert difference < 1e-13 and moved > 0


def compiled(world, wrap: str) -> list[float]:
    """Three steps of torch.compile(model), with a text-only rank in the second."""
    family = FAMILIES["qwen2_vl"]
    torch.manual_seed(0)
    model = family.build()
    steps = []
    for seed, scenario in enumerate(("uneven", "text only", "uneven")):
        inputs = batch(family, model, scenarios(family)[scenario][world.rank], 3 * seed)
        steps.append((inputs, reference(model, inputs)[1]))
    balance_encoders(model)
    if wrap == "ddp":
        model = DistributedDataParallel(model, find_unused_parameters=True)
    else:
        fully_shard(model)
    run, out = torch.compile(model, backend="eager"), []
    for inputs, want in steps:
        model.zero_grad()
        run(**inputs, use_cache=False).loss.backward()
        out.append(worst(gradients(model), want))
    dist.barrier()
    return out


@pytest.mark.parametrize("wrap", ["ddp", "fsdp2"])
def test_compiled(wrap):
    assert max(run_ranks(compiled, 2, wrap)[0]) < 1e-15
