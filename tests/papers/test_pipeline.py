"""The pipeline simulator: a table worked by hand, its twin, torch's orders, bounds and searches."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from orchmllm.papers.pipeline import (
    inter_reorder,
    search_order,
    simulate,
)
from orchmllm.papers.schedule import operations
from tests.lib.ranks import run_ranks
from tests.lib.schedules import times
from tests.twins import pipeline as twin

SHAPES = [("gpipe", 3, 5, 1), ("1f1b", 4, 6, 1), ("1f1b", 4, 2, 1), ("1f1b", 1, 3, 1),
          ("interleaved", 4, 8, 2), ("interleaved", 3, 3, 2), ("interleaved", 4, 10, 3),
          ("interleaved", 2, 4, 1), ("interleaved", 1, 3, 2)]


def test_hand_worked_table():
    # Two stages, three microbatches, forward 1 and backward 2; frozen first stage: no backward.
    made = simulate(np.ones((2, 3)), np.full((2, 3), 2.0))
    assert made.start.tolist() == [[[0, 1, 6], [1, 4, 7]], [[4, 7, 10], [2, 5, 8]]]
    assert made.total_ms == 12
    frozen = simulate(np.ones((2, 3)), np.array([[0.0] * 3, [2.0] * 3]), comm_ms=0.5)
    assert frozen.start[1, 1].tolist() == [2.5, 5.5, 8.5] and frozen.total_ms == 11


@pytest.mark.parametrize("schedule, p, l, v", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_twin(schedule, p, l, v, seed):  # noqa: E741
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((2, p * v, l))
    comm, order = rng.random(p * v - 1), rng.permutation(l)
    made = simulate(forward, backward, schedule=schedule, num_chunks=v, comm_ms=comm, order=order)
    expected = twin.run(twin.device_lists(schedule, p, l, v), forward, backward, comm, order)
    assert len(expected) == 2 * p * v * l
    for (kind, s, slot), (start, end) in expected.items():
        at = int(kind == "B"), s, order[slot]
        assert (made.start[at], made.end[at]) == pytest.approx((start, end), abs=1e-12)
    assert made.total_ms == pytest.approx(made.end.max(), abs=1e-12)


@pytest.mark.parametrize("p, l", [(2, 5), (3, 5), (4, 12), (3, 4), (5, 8), (3, 16), (2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_algorithm_3_equals_twin(p, l, seed):  # noqa: E741
    forward, backward = times(p, l, seed, cv=1.0)
    comm = 0.4 * (1 + seed)
    order = inter_reorder(forward, backward, comm_ms=comm)
    assert order.tolist() == twin.inter_reorder(forward, backward, [comm] * (p - 1))
    assert sorted(order) == list(range(l))


@pytest.mark.parametrize("seed", range(30))
def test_search_reaches_brute_force(seed):
    forward, backward = times(3, 6, seed, cv=(0.3, 0.6, 1.0)[seed % 3])
    best = min(simulate(forward, backward, order=np.array(o)).total_ms
               for o in permutations(range(6)))
    found = search_order(forward, backward, max_evaluations=1000)
    assert simulate(forward, backward, order=found).total_ms <= 1.01 * best


def test_search_is_deterministic_and_never_worse_than_its_starts():
    for seed in range(10):
        forward, backward = times(4, 16, seed)
        found = [search_order(forward, backward, seed=s) for s in (1, 1, 2)]
        assert (found[0] == found[1]).all() and sorted(found[2]) == list(range(16))
        start = simulate(forward, backward, order=inter_reorder(forward, backward)).total_ms
        assert simulate(forward, backward, order=found[0]).total_ms <= start
    fewer = simulate(forward, backward, order=search_order(forward, backward, max_evaluations=3))
    assert simulate(forward, backward, order=found[0]).total_ms <= fewer.total_ms


@pytest.mark.parametrize("call, message", [
    (lambda: simulate(np.ones((2, 3)), np.ones((3, 2))), "one shape"),
    (lambda: simulate(np.ones((2, 3)), -np.ones((2, 3))), "finite and >= 0"),
    (lambda: simulate(np.ones((3, 4)), np.ones((3, 4)), schedule="interleaved", num_chunks=2),
     "do not divide"),
    (lambda: simulate(np.ones((2, 3)), np.ones((2, 3)), order=np.array([0, 0, 1])), "permutation"),
    (lambda: simulate(np.ones((2, 3)), np.ones((2, 3)), comm_ms=[1.0, 2.0]), "give a number or 1"),
    (lambda: operations("1f1b", 2, 4, 2), "num_chunks to 1"),
    (lambda: operations("zb", 2, 4), "choose one of gpipe"),
    (lambda: operations("interleaved", 2, 5, 2), "multiple of 2"),
])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def _codes(schedule: str, p: int, l: int, v: int) -> list[list[tuple[str, int, int]]]:  # noqa: E741
    table = operations(schedule, p, l, v)
    return [[("FB"[c // l // (p * v)], int(c // l % (p * v)), int(c % l)) for c in row]
            for row in table]


@pytest.mark.parametrize("schedule, p, l, v", SHAPES)
def test_operations_equal_the_twins(schedule, p, l, v):  # noqa: E741
    assert _codes(schedule, p, l, v) == twin.device_lists(schedule, p, l, v)


RUNS = [("gpipe", 4, 1), ("1f1b", 6, 1), ("interleaved", 8, 2), ("interleaved", 10, 2)]


@pytest.mark.slow  # the twins have the same orders
@pytest.mark.dist
def test_orders_are_torchs():
    """What four gloo ranks really run, operation by operation; the order of the microbatches
    changes no gradient."""
    from tests.papers.pipelining import record

    for (schedule, l, v), ranks in zip(RUNS, zip(*run_ranks(record, 4, RUNS), strict=True),  # noqa: E741
                                       strict=True):
        assert [r["ops"] for r in ranks] == _codes(schedule, 4, l, v)
        for r in ranks:
            np.testing.assert_allclose(r["gradients"][1], r["gradients"][0], rtol=1e-5)
            assert np.abs(r["gradients"][0]).sum() > 0
