"""Sleeping stages on four gloo ranks of torch.distributed.pipelining beside the simulator."""

from __future__ import annotations

import numpy as np
import pytest

from orchmllm.papers.pipeline import inter_reorder, simulate
from tests.lib.ranks import run_ranks
from tests.lib.schedules import times
from tests.papers.pipelining import timed


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_measured_is_simulated():
    slots = 16
    forward, backward = (30.0 * x for x in times(4, slots, seed=1))  # ms
    orders = {"sampled": np.arange(slots), "Algorithm 3": inter_reorder(forward, backward)}
    seconds = [(forward / 1e3).tolist(), (backward / 1e3).tolist()]
    runs = [(slots, seconds, order.tolist()) for order in orders.values()]
    ranks = run_ranks(timed, 4, runs, timeout_s=300)
    for k, (name, order) in enumerate(orders.items()):
        measured = 1e3 * max(r[k]["seconds"] for r in ranks)
        expected = simulate(forward, backward, order=order)
        print(f"{name}: measured {measured:.0f} ms, simulated {expected:.0f} ms, ratio "
              f"{measured / expected:.3f}")
        assert 0.95 <= measured / expected <= 1.35
        for rank in ranks:  # the order changes no gradient
            np.testing.assert_allclose(rank[k]["gradients"], rank[0]["gradients"], rtol=1e-5)
