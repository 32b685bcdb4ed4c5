"""What the kit runs on a device, on the stand-in for one: no operator mixes host and device or
waits for the data, and the figures of the device's memory are asked of its own module."""

from __future__ import annotations

from contextlib import nullcontext, suppress
from unittest.mock import patch

import pytest
import torch
from torch._subclasses.fake_tensor import unset_fake_temporarily

from orchmllm import orchestrator
from orchmllm.sharding import fsdp
from scripts.gpu import gradients, steps
from tests.lib.accelerator import NAME, accelerator
from tests.lib.no_sync import Mixes, NoSync
from tests.lib.ranks import run_ranks


def on_host(values, device):
    return torch.as_tensor(values)


def backward(world, planted: bool) -> list[type]:
    """What was noted in the kit's step of `gradients` by dtype, as it runs on a GPU but for the
    compiler: under a watch it traces nothing. planted: the batch stays on the host."""
    noted: list[Exception] = []
    # Tensors there have no memory, so no initial values.
    with accelerator(1, 0) as device, patch.object(fsdp, "seed_weights", lambda *_, **how: None):
        with unset_fake_temporarily():
            spec, micro = gradients.microbatch(gradients.TINY)
        for kind in ("float32", "bfloat16"):
            built = gradients.build(device, gradients.TINY, gradients.KINDS[kind][0])
            moved = patch.object(orchestrator, "on_device", on_host) if planted else nullcontext()
            with NoSync(device.type, noted), moved, suppress(RuntimeError if planted else ()):
                gradients.backward(built, device, spec, micro)
            assert planted or {p.grad.device.type for p in built.parameters()} == {NAME}
    return [type(error) for error in noted]


@pytest.mark.slow
@pytest.mark.dist
def test_the_steps_of_the_kit_neither_mix_devices_nor_wait():
    assert run_ranks(backward, 1, False) == [[]]
    assert run_ranks(backward, 1, True)[0][0] is Mixes


def memory(world) -> dict:
    with accelerator(1, 0) as device:
        module, asked = torch.get_device_module(device), []
        module.reset_peak_memory_stats = asked.append
        module.max_memory_allocated = lambda where: 7 if asked == [where] else 0
        steps.reset_peak(device)
        return steps.peak_of(device)


@pytest.mark.slow
@pytest.mark.dist
def test_peak_memory_is_the_devices():
    assert run_ranks(memory, 1) == [{"peak_bytes": 7.0, "peak_of": "tensors"}]
    assert steps.peak_of(torch.device("cpu"))["peak_bytes"] > 1e7
