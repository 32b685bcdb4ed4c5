"""Whole models: what a step waits for, and how often it attends, on a device without values and on
a GPU."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from contextlib import suppress
from unittest.mock import patch

import numpy as np
import pytest
import torch

from orchmllm.batch import PackedExamples, on_device
from orchmllm.encoders import planned
from orchmllm.models import hf, towers
from orchmllm.models.hf import WholeModel
from orchmllm.models.packing import attend
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import TEXT, BatchLayout
from orchmllm.sharding.blocks import recompute
from tests.lib import whole_models as models
from tests.lib.fake_cuda import fake_cuda, run_with_guard
from tests.lib.no_sync import NoSync
from tests.lib.whole_models import Item

CASES = [("qwen3_vl", "none"), ("qwen2_5_vl", "selective"), ("internvl", "full"),
         ("gemma3", "none")]


class Watch(NoSync):
    """Also counts kernels of attention for packed sequences. device: that is watched."""

    def __init__(self, device: str) -> None:
        super().__init__(device, [])
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "varlen" in func.__name__:
            self.kernels["backward" if "backward" in func.__name__ else "forward"] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def arguments(name: str, model) -> list[dict]:
    """Of stock forward: images of several sizes, no media, one image."""
    kind = models.kinds_of(name)[0]
    sets = [[Item(kind, 5), Item(kind, 3)], [], [Item(kind, 1)], [Item(kind, 2)]]
    return [models.sample(name, model, items, 7 + i) for i, items in enumerate(sets)]


def planned_batch(whole: WholeModel, inputs: list[dict], per_rank: list[int]) -> PackedExamples:
    """The first rank's. per_rank: examples of each."""
    whole.encoders = planned.PlannedEncoders(whole.hf)
    examples = [models.as_example(i, one) for i, one in enumerate(inputs)]
    return models.planned_row(
        whole, [models.parts_of(e, np.flatnonzero(e.lengths.modality != TEXT).tolist())
                for e in examples], BatchLayout.concat([e.lengths for e in examples], per_rank))


def fake_step(name: str, kind: str) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """What a step of one of two ranks waited for, kernels, and blocks."""
    whole = WholeModel(models.build(name), torch.bfloat16)
    batch = planned_batch(whole, arguments(name, whole.hf), [2, 2])
    recompute(whole, dict.fromkeys(PHASES, kind))
    with fake_cuda(2) as device:
        whole.to(device, torch.bfloat16)
        # What reads a fake tensor is noted, and fails then.
        with Watch("cuda") as watch, suppress(RuntimeError, NotImplementedError):
            whole(batch.to(device)).backward()
    return ([str(e) for e in watch.noted], watch.kernels,
            {part: len(stack) for part, stack in whole.blocks().items()})


PLANTED = {
    "token ids on the device": lambda: patch.object(hf, "Mirrored", on_device),
    "grids on the device": lambda: patch.object(planned, "mirrored", on_device),
    "another attention": lambda: patch.object(towers, "NAME", "sdpa")}


def fake_steps() -> tuple[list, dict[str, list]]:
    """Of all cases; of the first one with each of what is planted."""
    plain = [fake_step(*case) for case in CASES]
    found = {}
    for name, plant in PLANTED.items():
        with plant():
            found[name] = fake_step(*CASES[0])
    return plain, found


@pytest.mark.whole
def test_a_step_waits_for_nothing_and_attends_once_a_block(tmp_path):
    """Gemma 3 attends by masks, and the tower of InternVL in batches of one size."""
    steps, planted = run_with_guard(tmp_path, __name__, "fake_steps")
    for (name, kind), (waits, kernels, blocks) in zip(CASES, steps, strict=True):
        assert waits == [], name
        packed = {"qwen3_vl": sum(blocks.values()), "qwen2_5_vl": sum(blocks.values()),
                  "internvl": blocks["llm"], "gemma3": 0}[name]
        assert kernels.get("backward", 0) == packed
        assert kernels.get("forward", 0) == packed * (2 if kind == "full" else 1)
    for name, (waits, kernels, blocks) in planted.items():
        assert waits or kernels["forward"] < sum(blocks.values()), name


@pytest.mark.whole
@pytest.mark.parametrize("name", [
    "glm4v", "qwen2_5_omni", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"])
def test_towers_that_attend_once_a_block_have_the_gradients_of_stock(name, monkeypatch):
    """In float64, packed and planned; GLM-4V's table of positions is interpolated in float32."""
    model = models.build(name)
    inputs = arguments(name, model)
    wanted = models.stock(model, inputs)[1]
    for is_planned in (False, True):
        whole, calls = WholeModel(copy.deepcopy(model), torch.float64), []
        monkeypatch.setattr(towers, "attend", lambda *given, calls=calls, **keys: (
            calls.append(len(given[3].lengths)), attend(*given, **keys))[1])
        batch = planned_batch(whole, inputs, [4]) if is_planned else whole.join(
            [models.as_example(i, one) for i, one in enumerate(inputs)])
        whole(batch).backward()
        found = models.gradients(whole.hf)
        table = {n: found.pop(n) - wanted[n] for n in wanted
                 if n.endswith("position_embedding.weight")}
        assert len(calls) == len(whole.blocks()["vision"]) and min(calls) > 1
        assert models.difference(found, {n: wanted[n] for n in found}) <= models.EXACT
        assert all(float(d.abs().max()) < 1e-6 for d in table.values())


def relative(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The difference of all gradients, over their size."""
    assert found.keys() == wanted.keys()
    square = sum(float((found[n].cpu().double() - wanted[n]).square().sum()) for n in wanted)
    return (square / sum(float(g.square().sum()) for g in wanted.values())) ** 0.5


def bfloat16_step(name: str, kind: str, device: str) -> tuple[float, list[str], dict]:
    """(Difference to stock transformers in float64 on the host, what was waited for, kernels) of a
    step on a device, from the same rounded weights and media, whose encoders are not planned."""
    model = models.build(name).bfloat16().double()
    inputs = [{k: v.bfloat16().double() if v.is_floating_point() else v for k, v in one.items()}
              for one in arguments(name, model)]
    wanted = models.stock(model, inputs)[1]
    whole = WholeModel(copy.deepcopy(model), torch.bfloat16)
    batch = whole.join([models.as_example(i, one) for i, one in enumerate(inputs)])
    recompute(whole, dict.fromkeys(PHASES, kind))
    whole.to(device)
    for p in whole.parameters():
        p.data = p.data.bfloat16()
    with Watch(device) as watch:  # the first step chooses kernels, which waits
        whole(batch.to(torch.device(device))).backward()
    whole.zero_grad()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            whole(batch.to(torch.device(device))).backward()
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in told if "synchroniz" in str(w.message)]
    return relative(models.gradients(whole.hf), wanted), waits, watch.kernels


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: only CUDA counts its syncs")
@pytest.mark.parametrize("name, kind", [("qwen2_5_vl", "none"), ("qwen3_vl", "full")])
def test_a_step_on_a_gpu_is_close_to_stock_and_hardly_waits(name, kind):
    """Two blocks of vision and two of text; the log of a step waits once more."""
    difference, waits, kernels = bfloat16_step(name, kind, "cuda")
    print(name, kind, "difference", difference, "waits", waits, "kernels", dict(kernels))
    assert difference < 0.02
    assert kernels == {"forward": 8 if kind == "full" else 4, "backward": 4}
    assert len(waits) <= 1, waits
