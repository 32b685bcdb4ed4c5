"""Batches that collate pads: what a plan, its log line and its advice say of them is what a count of
padded tokens says."""

from __future__ import annotations

import logging
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist

from orchmllm import BalancedDataLoader, CostModel
from tests.lib.dropin import Texts, collate, length_of
from tests.lib.ranks import run_ranks

pytestmark = pytest.mark.dist
SIZE = 96
LENGTHS = [length_of(i) for i in range(SIZE)]
LINE = re.compile(r"llm ([\d.]+)->([\d.]+); predicted gain (-?[\d.]+)%")


def messages() -> list[str]:
    """Grows by what the loader's logger says from now on."""
    lines: list[str] = []
    log, handler = logging.getLogger("orchmllm.loader"), logging.Handler(logging.INFO)
    handler.emit = lambda record: lines.append(record.getMessage())
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    return lines


def by_rank(sizes: list[int]) -> torch.Tensor:
    """(ranks, steps) of what each rank counted."""
    out = [torch.zeros(len(sizes), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(out, torch.tensor(sizes))
    return torch.stack(out)


def counted(world, how: dict) -> tuple[list, list, list[str]]:
    """Entries of the batches by rank and step, as sampled and as planned; what the log says."""
    sizes, lines = [], messages()
    for enabled in (False, True):
        del lines[:]
        loader = BalancedDataLoader(Texts(SIZE), 4, shuffle=True, collate_fn=collate, log_every=1,
                                    lengths=LENGTHS, enabled=enabled, check_loss=False, **how)
        sizes.append(by_rank([batch["input_ids"].numel() for batch in loader]).tolist())
    return *sizes, lines


def test_a_padded_plan_is_measured_in_padded_tokens():
    before, after, lines = run_ranks(counted, 4, dict(policy="padded"))[0]
    off, on = np.array(before), np.array(after)
    said = [[float(x) for x in LINE.search(line).groups()] for line in lines]
    assert len(said) == off.shape[1] and on.max(0).sum() < 0.8 * off.max(0).sum()
    for t, (sampled, planned, gain) in enumerate(said):
        assert sampled == pytest.approx(off[:, t].max() / off[:, t].mean(), abs=0.0051)
        assert planned == pytest.approx(on[:, t].max() / on[:, t].mean(), abs=0.0051)
        assert gain == pytest.approx(100 * (1 - on[:, t].max() / off[:, t].max()), abs=0.051)
    skipping = run_ranks(counted, 4, dict(policy="padded", min_gain=0.02))[0]
    assert skipping[1] == after  # what is worth it is not skipped


def refused(world) -> str:
    with pytest.raises(ValueError) as error:
        BalancedDataLoader(Texts(), 4, lengths=LENGTHS[:48], phases=CostModel(0, 0))
    return str(error.value)


def test_a_small_cost_balances_as_a_large_one():
    """CostModel(1, 0) is the length; in whole kFLOP it would be 0 for every item."""
    assert "is 0 for every item" in run_ranks(refused, 1)[0]
    def said(phases: CostModel) -> tuple[list, list[tuple]]:
        _, planned, lines = run_ranks(counted, 2, dict(policy="greedy", phases=phases))[0]
        return planned, [LINE.search(line).groups() for line in lines]

    assert said(CostModel(1, 0)) == said(CostModel(1000, 0)) != said(CostModel(0, 1))
    assert max(float(before) for before, *_ in said(CostModel(0, 1))[1]) > 1.1
