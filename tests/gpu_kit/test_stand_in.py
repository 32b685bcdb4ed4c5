"""The figures of the device's memory in the kit are asked of its own module."""

from __future__ import annotations

import pytest
import torch

from scripts.gpu import steps
from tests.lib.accelerator import accelerator
from tests.lib.ranks import run_ranks


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
