"""balance_encoders inside loops that others wrote: one line before them, and the same weights."""

from __future__ import annotations

import os
import tempfile

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from orchmllm import balance_encoders
from tests.lib.encoder_models import FAMILIES, batch
from tests.lib.encoder_runs import gradients, reference, scenarios, worst
from tests.lib.examples import load
from tests.lib.ranks import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.slow]


class WithLabels(torch.utils.data.Dataset):
    """Every example of examples/qwen2_vl.py that has an image, so that the loop without balancing
    runs, too."""

    def __init__(self) -> None:
        pictures = load("qwen2_vl").Pictures(40)
        self.data = [x for x in (pictures[i] for i in range(40)) if x["grids"]]

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> dict:
        return self.data[i]


def environment(world) -> None:
    """What torchrun sets; the group exists already."""
    os.environ.update(RANK=str(world.rank), LOCAL_RANK=str(world.rank), MASTER_ADDR="localhost",
                      WORLD_SIZE=str(world.world_size), LOCAL_WORLD_SIZE=str(world.world_size),
                      MASTER_PORT="1", ACCELERATE_USE_CPU="true")


def hf_trainer(world, balance: bool) -> tuple[dict[str, np.ndarray], int]:
    """Weights after 3 steps of 2 microbatches, with checkpointing and evaluation between, and the
    items that moved in the last forward."""
    from transformers import Trainer, TrainingArguments

    environment(world)
    e = load("qwen2_vl")
    torch.manual_seed(0)
    model = e.tiny_model()
    handle = balance_encoders(model) if balance else None
    data = WithLabels()
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model=model, train_dataset=data, eval_dataset=data, data_collator=e.collate,
                args=TrainingArguments(
                    folder, max_steps=3, per_device_train_batch_size=3,
                    gradient_accumulation_steps=2, gradient_checkpointing=True,
                    gradient_checkpointing_kwargs={"use_reentrant": False}, eval_strategy="steps",
                    eval_steps=1, learning_rate=1e-3, use_cpu=True, report_to=[],
                    save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
                    ddp_find_unused_parameters=False)).train()
    moved = handle.last["vision"].moved if balance else 0
    return {n: p.detach().numpy() for n, p in model.named_parameters()}, moved


def test_hf_trainer():
    (plain, _), (balanced, moved) = (run_ranks(hf_trainer, 2, b)[0] for b in (False, True))
    assert moved > 0
    for name, weight in plain.items():  # Adam divides by gradients near zero
        assert np.abs(balanced[name] - weight).max() < 1e-9, name


def with_accelerate(world) -> list[float]:
    """accelerate's own FSDP2 around a model with a text-only rank."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    environment(world)
    family = FAMILIES["qwen3_vl"]
    torch.manual_seed(0)
    model = family.build()
    inputs = batch(family, model, scenarios(family)["text only"][world.rank], world.rank)
    want = reference(model, inputs)[1]
    handle = balance_encoders(model)
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
