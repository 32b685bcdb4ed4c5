"""What times the phases of a model on one device: a block that is measured stands for others."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from orchmllm.config.recipe import load_recipe
from orchmllm.data.text.processor import Processor
from orchmllm.encoders.planned import PlannedEncoders
from orchmllm.models.families import model_class, read_config
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.layout import ENCODERS
from scripts.whole_runner import Clock, WholeRunner
from tests.lib.whole_folders import write_model

pytestmark = pytest.mark.whole


class Counter:
    """Counts FLOP in place of seconds."""

    def best(self, run: Callable[[], object], repeat: int) -> int:
        with FlopCounterMode(display=False) as counted:
            run()
        return counted.get_total_flops()


def both_passes(forward: Callable[[], torch.Tensor]) -> None:
    out = forward()
    assert out.isfinite().all()
    out.backward(torch.ones_like(out))


def write(name: str, folder: Path) -> Path:
    write_model(name, folder)
    path = folder / "recipe.yaml"
    path.write_text(f"model: {{pretrained: {folder}}}\ndata: {{path: none}}\n"
                    "fsdp: {compute_dtype: float32}\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("name, kinds", [
    ("qwen2_5_vl", {"vision": [1, 1], "llm": [2]}),  # one block with windows, one without
    *(pytest.param(name, kinds, marks=pytest.mark.slow) for name, kinds in (
        ("gemma3", {"vision": [3], "llm": [2]}),
        ("qwen3_5", {"vision": [2], "llm": [1, 1]}),  # linear attention and attention
        ("qwen3_vl_moe", {"vision": [2], "llm": [2]}),
        ("internvl", {"vision": [2], "llm": [2]}),
        ("qwen2_5_omni", {"vision": [1, 1], "audio": [2], "llm": [2]})))])
def test_what_is_measured_is_the_work_of_the_model(name, kinds, tmp_path):
    """In FLOP instead of seconds: as much as forward and backward of all blocks of the model."""
    recipe = load_recipe(write(name, tmp_path))
    runner = WholeRunner(recipe, torch.device("cpu"), torch.float32, 0)
    config = read_config(tmp_path)
    whole = WholeModel(model_class(config)._from_config(config), torch.float32).train()
    for name, buffer in whole.hf.named_buffers():
        torch.testing.assert_close(runner.whole.hf.get_buffer(name), buffer)
    encoders, processor = PlannedEncoders(whole.hf), Processor(tmp_path)
    runner._clock = Counter()
    for phase, counts in kinds.items():
        if phase == "llm":
            measured, plain, given = runner.whole, whole, (runner.text([20] * 3),)
        else:
            measured, plain = runner.encoders.features, encoders.features
            given = phase, [runner.medium(processor, ENCODERS[phase], 40)[1]] * 3
        alike = runner.blocks.called_in(partial(measured, *given))
        assert sorted(one.count for one in alike) == counts
        wanted = Counter().best(partial(both_passes, partial(plain, *given)), 1)
        assert sum(runner.seconds(partial(measured, *given), 1)) == wanted > 0


def test_a_gpu_is_kept_busy_until_what_is_timed_is_in_its_queue(monkeypatch):
    """torch.cuda is a stand-in."""
    did = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.record, self.synchronize = (partial(did.append, n) for n in ("record", "wait"))

        def elapsed_time(self, end: object) -> float:
            return 1.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: did.append(cycles))
    assert Clock(torch.device("cuda", 0)).best(lambda: time.sleep(0.01), 2) == 1e-3
    first, *fills = did[::4]
    assert first == 0 and len(fills) == 2 and all(n >= 0.01 * 1.5e9 for n in fills)
    assert [did[k:k + 3] for k in (1, 5, 9)] == [["record", "record", "wait"]] * 3
