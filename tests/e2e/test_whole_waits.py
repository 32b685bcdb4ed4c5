"""Whole models on a device without values: what a step waits for, and which kernels attend."""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from pathlib import Path

import pytest
import torch

from orchmllm.models.hf import WholeModel
from orchmllm.plan.assign import PHASES
from orchmllm.sharding.blocks import recompute
from tests.lib import whole_models as models
from tests.lib.fake_cuda import fake_cuda, library
from tests.lib.no_sync import NoSync
from tests.lib.ranks import run_ranks
from tests.lib.whole_models import Item

pytestmark = pytest.mark.whole


class Watch(NoSync):
    """Also counts calls of attention, and says where it waited."""

    def __init__(self) -> None:
        super().__init__("cuda", [])
        self.where: list[str] = []
        self.calls: Counter = Counter()

    def _tell(self, error: Exception) -> None:
        self.where.append("".join(traceback.format_stack(limit=12)))
        super()._tell(error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "attn" in func.__name__ or "attention" in func.__name__:
            self.calls[func.__name__.split(".")[0]] += 1
        return super().__torch_dispatch__(func, types, args, kwargs)


def examples(name: str, model) -> list:
    kinds = models.kinds_of(name)
    sets = [[Item(kinds[0], 5), Item(kinds[-1], 3)], [], [Item(kinds[0], 1)]]
    return [models.as_example(i, models.sample(name, model, items, 7 + i))
            for i, items in enumerate(sets)]


def step(world, built: Path, cases: list[tuple[str, str]]) -> list:
    found = []
    for name, kind in cases:
        with torch.device("cpu"):
            model = models.build(name)
        whole = WholeModel(copy.deepcopy(model), torch.bfloat16)
        batch = whole.join(examples(name, model))
        recompute(whole, dict.fromkeys(PHASES, kind))
        blocks = {part: len(stack) for part, stack in whole.blocks().items()}
        with fake_cuda(built) as device, Watch() as watch:
            whole.to(device, torch.bfloat16)
            watch.noted.clear()
            watch.where.clear()
            loss = whole(batch.to(device))
            forward = Counter(watch.calls)
            loss.backward()
        found.append((blocks, [str(e) for e in watch.noted], watch.where, forward,
                      watch.calls - forward))
    return found


@pytest.mark.dist
def test_whole(tmp_path):
    for x in run_ranks(step, 1, library(tmp_path), [("qwen3_vl","none"),("qwen2_5_vl","selective"),("internvl","full"),("gemma3","none"),("llava_onevision","none"),("qwen2_5_omni","none")], timeout_s=280.0)[0]:
        print(x[0], x[1], x[3], x[4])
        for w in x[2]: print(w)
