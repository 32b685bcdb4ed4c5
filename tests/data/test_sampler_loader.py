"""Sampling by global index and the prefetch thread."""

from __future__ import annotations

import threading
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.data.loading.pipeline import Prefetcher
from orchmllm.data.loading.step_loader import StepLoader
from orchmllm.data.sampler import GlobalSampler, shuffled
from orchmllm.trainer import Trainer
from tests.lib.ranks import run_ranks
from tests.lib.synthetic import SyntheticDataset, recipe


def test_every_example_once_an_epoch_and_state_is_the_step():
    sampler = GlobalSampler(range(100, 110), 4, seed=3)
    drawn = np.concatenate([sampler.batch(s) for s in range(10)])
    for epoch in range(4):
        assert sorted(drawn[10 * epoch: 10 * epoch + 10]) == list(range(100, 110))
    again = GlobalSampler(range(100, 110), 4, seed=3)
    assert np.array_equal(again.batch(7), sampler.batch(7))
    assert not np.array_equal(drawn[:10], drawn[10:20])
    wide = GlobalSampler(range(3), 8, seed=0).batch(1)  # a batch larger than the dataset
    assert len(wide) == 8 and set(wide) == {0, 1, 2}


@pytest.mark.parametrize("window", [0, 1000])
def test_an_order_takes_four_bytes_of_each_row(window):
    """Every rank holds one, of hundreds of millions of rows."""
    rows = range(7, 1_000_007)
    tracemalloc.start()
    try:
        chosen = GlobalSampler(rows, 64, seed=0, window=window).batch(0)
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 4.2e6 and most < 12.2e6
    assert chosen.tolist() == [rows[i] for i in shuffled(len(rows), window, [0, 0])[:64]]


def test_shares_cover_the_batch_on_any_number_of_ranks():
    for d in range(1, 9):
        shares = GlobalSampler(range(7), 7).shares(0, d)
        assert np.array_equal(np.concatenate([np.arange(7)[s] for s in shares]), np.arange(7))
        sizes = [s.stop - s.start for s in shares]
        assert max(sizes) - min(sizes) <= 1


def test_in_order_without_shuffle():
    sampler = GlobalSampler(range(5), 2, shuffle=False)
    assert [sampler.batch(s).tolist() for s in range(len(sampler))] == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("bad, text", [
    (dict(indices=[], batch_size=1), "empty"), (dict(indices=[1], batch_size=0), "batch_size")])
def test_bad_arguments(bad, text):
    with pytest.raises(ValueError, match=text):
        GlobalSampler(**bad)


def batches(world, prefetch: int, accumulation: int, dispatch: str) -> list:
    base = recipe()
    run = replace(base, balance=replace(base.balance, ranks_per_node=2, dispatch=dispatch))
    data = SyntheticDataset()
    trainer = Trainer(run, world, dataset=data)
    loader = StepLoader(data, GlobalSampler(range(24), 6, seed=1), trainer.orchestrator,
                        num_steps=5, prefetch=prefetch, accumulation_steps=accumulation,
                        feed=trainer._feed,
                        flops_of=lambda layout: {"llm": float(layout.num_tokens.sum())})
    out = []
    for step in loader:
        assert step.useful_flop == step.layout.num_tokens.sum()
        for micro in step.micro:
            out.append([step.num_global_targets])
            loader.orchestrator.dispatch(micro).moved(lambda x: out[-1].append(x.tolist()) or x)
    return out, [t.name for t in threading.enumerate() if t.name == "orchmllm-prefetch"]


@pytest.mark.dist
def test_prefetching_changes_nothing_and_threads_end():
    results = [run_ranks(batches, 2, prefetch, 2, "tensors") for prefetch in (0, 1, 3)]
    assert results[0] == results[1] == results[2]
    assert all(threads == [] for r in results for _, threads in r)


@pytest.mark.dist
def test_a_stop_waits_for_the_steps_that_all_ranks_prepare():
    made, go = [], threading.Event()

    def items():
        for k in range(9):
            if k:
                go.wait()
            made.append(k)
            yield k

    prefetcher = Prefetcher(items(), 3)
    prefetcher.close(timeout_s=0.0)
    go.set()
    prefetcher.thread.join()
    assert made == [0, 1, 2]
