"""Whole models: what a step waits for, and how often it attends, on a device without values and on
a GPU."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch

from orchmllm.batch import Microbatch, PackedExamples, ProcessedExample, on_device
from orchmllm.comm.pieces import Media
from orchmllm.config.recipe import DataConfig, FsdpConfig, TrainConfig
from orchmllm.data.stream import open_dataset
from orchmllm.encoders import planned
from orchmllm.models import towers, whole_model
from orchmllm.models.families import model_class, read_config
from orchmllm.models.packing import attend
from orchmllm.models.whole_model import WholeModel
from orchmllm.plan.assign import PHASES
from orchmllm.plan.layout import ENCODERS, TEXT, BatchLayout
from orchmllm.plan.step import plan_step
from orchmllm.sharding.blocks import recompute
from orchmllm.sharding.fsdp import shard_all
from orchmllm.sharding.load_whole import ordered
from orchmllm.sharding.optimizer import clip_gradients, learning_parts, make_optimizer
from tests.lib import composed
from tests.lib import whole_models as models
from tests.lib.fake_cuda import fake_cuda, run_with_guard
from tests.lib.no_sync import NoSync
from tests.lib.whole_models import Item
from tests.sharding.test_composed import write_rows


class Case(NamedTuple):
    """Of a step of the first of two ranks. absent: no media, those of this rank, or all."""

    name: str
    recomputes: str = "none"
    reshard: str = "full"
    dispatch: str = "load"
    absent: str = ""


COMPOSED = "qwen2_vl_packed_whisper_qwen2"
CASES = [Case("qwen3_vl"), Case(COMPOSED, "full", "none", "tensors", "here")]
ALL = [*(Case(*case) for case in product(
    ("qwen3_vl", COMPOSED), ("none", "selective", "full"), ("full", "node", "none"),
    ("load", "tensors"), ("", "here", "all"))),
    Case("qwen2_5_vl", "selective", "none", "tensors"),
    Case("internvl", "full", "full", "tensors", "here"), Case("gemma3", absent="all")]


class Watch(NoSync):
    """Also counts kernels of attention for packed sequences. device: that is watched."""

    def __init__(self, device: str) -> None:
        super().__init__(device, [])
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "adamw" in func.__name__:
            self.kernels["fused AdamW"] += 1
        if "varlen" in func.__name__:
            self.kernels["backward" if "backward" in func.__name__ else "forward"] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def arguments(name: str, model) -> list[dict]:
    """Of stock forward: images of several sizes, no media, one image."""
    kind = models.kinds_of(name)[0]
    sets = [[Item(kind, 5), Item(kind, 3)], [], [Item(kind, 1)], [Item(kind, 2)]]
    return [models.sample(name, model, items, 7 + i) for i, items in enumerate(sets)]


def planned_batch(whole: WholeModel, inputs: list[dict]) -> PackedExamples:
    """Of one rank."""
    whole.encoders = planned.PlannedEncoders(whole.hf)
    examples = [models.as_example(i, one) for i, one in enumerate(inputs)]
    layout = BatchLayout.concat([e.lengths for e in examples], [len(examples)])
    return models.planned_row(whole, [models.parts_of(e, np.flatnonzero(
        e.lengths.modality != TEXT).tolist()) for e in examples], layout)


def examples_of(case: Case, folder: Path) -> tuple[WholeModel, list[ProcessedExample]]:
    """The model, and examples of two ranks, two each, with their media."""
    media = {"": [True, False, True, True], "here": [False, False, True, False],
             "all": [False] * 4}[case.absent]
    if case.name != COMPOSED:
        model, kind = models.build(case.name), models.kinds_of(case.name)[0]
        made = [models.as_example(i, models.sample(
            case.name, model, [Item(kind, 5), Item(kind, 3)] * has, 7 + i))
            for i, has in enumerate(media)]
        return WholeModel(model, torch.bfloat16), [models.parts_of(e, np.flatnonzero(
            e.lengths.modality != TEXT).tolist()) for e in made]
    config = read_config(folder)
    data = DataConfig(path=str(folder / "data.jsonl"), index_dir=str(folder / "index"))
    rows = open_dataset(data, str(folder), seed=0)
    layouts = {i: rows.layout(i) for i in range(len(rows))}
    found: list[int] = []
    for has in media:  # of both kinds, or of none
        found.append(next(i for i, one in layouts.items() if i not in found and (
            len(np.unique(one.modality)) == 1 + 2 * has)))
    return WholeModel(model_class(config)._from_config(config), torch.bfloat16), [
        rows.load(i, segments=np.flatnonzero(layouts[i].modality != TEXT).tolist())
        for i in found]


def batch_of(whole: WholeModel, examples: list[ProcessedExample], dispatch: str) -> PackedExamples:
    """The first rank's, whose media may still have to come."""
    whole.encoders = planned.PlannedEncoders(whole.hf)
    layout = BatchLayout.concat([e.lengths for e in examples], [2, 2])
    spec = replace(models.SPEC, balance=replace(models.SPEC.balance, dispatch=dispatch))
    plan = plan_step(layout, spec)
    micro, media = Microbatch(plan, plan.for_rank(0), positions=np.arange(4)), {}
    for phase, move in plan.encode.items():
        def described(at, phase=phase):
            return [whole.encoders.described(phase, examples[e].parts[s]) for e, s in at]

        own = [(i, s) for i, e in enumerate(examples)
               for s in np.flatnonzero(e.lengths.modality == ENCODERS[phase]).tolist()]
        if own:
            pieces = described(micro.rank_plan.media[phase].tolist())
            media[phase] = Media.here(pieces or described(own[:1])) if dispatch == "load" else (
                Media.elsewhere(pieces, described(at for at in own if at[0] < 2), move, 0,
                                lambda own=own: described(own[:1])[0]))
    return whole.join([replace(examples[e], parts={}) for e in micro.rank_plan.examples], media,
                      micro)


def fake_step(case: Case, folder: Path) -> tuple[list[str], dict[str, int], dict[str, int]]:
    """What a step waited for, kernels, and blocks: everything that the trainer does on a device
    with a batch, under FSDP2."""
    whole, examples = examples_of(case, folder)
    batch = batch_of(whole, examples, case.dispatch)
    fsdp = FsdpConfig(compute_dtype="bfloat16", prefetch=1, vision_reshard=case.reshard,
                      audio_reshard=case.reshard, llm_reshard=case.reshard,
                      loss_chunk_rows=16 * (case.dispatch == "tensors"))
    whole.loss_chunk_rows = fsdp.loss_chunk_rows
    recompute(whole, dict.fromkeys(PHASES, case.recomputes))
    with fake_cuda(2) as device:
        whole.to(device)
        shard_all(whole, ordered(whole, fsdp), fsdp, device, ranks_per_node=1)
        with patch.object(torch.cuda, "is_available", lambda: True):
            optimizer = make_optimizer(whole, TrainConfig())
        # What reads a fake tensor is noted, and fails then.
        with Watch("cuda") as watch, suppress(RuntimeError, NotImplementedError):
            loss = whole(batch.to(device).exchanged(None))
            loss.backward()
            norms = clip_gradients(learning_parts(whole), 1.0, device)
            optimizer.step()
            assert loss.device == norms.device == device
    blocks = {part: len(stack) for part, stack in whole.blocks().items()
              if part == "llm" or part in batch.phases}
    return [str(e) for e in watch.noted], watch.kernels, blocks


PLANTED = {  # and what of a step differs then
    "token ids on the device": (lambda: patch.object(whole_model, "Mirrored", on_device), "waits"),
    "grids on the device": (lambda: patch.object(planned, "mirrored", on_device), "waits"),
    "a batch on the host": (
        lambda: patch.object(PackedExamples, "to", lambda batch, device: batch), "takes tensors"),
    "another attention": (lambda: patch.object(towers, "NAME", "sdpa"), "forward"),
    "an optimizer of many kernels": (
        lambda: patch.object(torch.optim.AdamW, "__init__", unfused), "fused AdamW")}


def unfused(self, *given, fused=None, plain=torch.optim.AdamW.__init__, **keys) -> None:
    plain(self, *given, **keys)


def fake_steps(folder: str, some: bool) -> tuple[list, dict[str, list]]:
    """Of cases; of the first one with what is planted, each by its name. some: a wait alone, as the
    kernels of each case are counted."""
    plain = [fake_step(case, Path(folder)) for case in (CASES if some else ALL)]
    found = {}
    for name in [*PLANTED][:1] if some else PLANTED:
        with PLANTED[name][0]():
            found[name] = fake_step(CASES[0], Path(folder))
    return plain, found


@pytest.mark.whole
@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_step_waits_for_nothing_and_attends_once_a_block(some, tmp_path):
    """Gemma 3 attends by masks, and the tower of InternVL in batches of one size."""
    folder = tmp_path / "model"
    composed.write_composed(COMPOSED, folder)
    write_rows(folder, COMPOSED)
    steps, planted = run_with_guard(tmp_path, __name__, "fake_steps", str(folder), some)
    for case, (waits, kernels, blocks) in zip(CASES if some else ALL, steps, strict=True):
        assert waits == [], case
        packed = {"internvl": blocks["llm"], "gemma3": 0}.get(
            case.name, sum(blocks.values()))
        again = 2 if case.recomputes == "full" else 1
        assert kernels["fused AdamW"] and kernels.get("backward", 0) == packed, case
        assert kernels.get("forward", 0) == packed * again, case
    kernels = steps[0][1]
    assert planted
    for name, (waits, found, _) in planted.items():
        what = PLANTED[name][1]
        assert any(what in wait for wait in waits) or found.get(what, 0) < kernels.get(what, 0), (
            name, waits, found)


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
        batch = planned_batch(whole, inputs) if is_planned else whole.join(
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
