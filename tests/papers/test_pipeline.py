"""The pipeline simulator: a table worked by hand, its twin, torch's orders, and Algorithm 3."""

from __future__ import annotations

import numpy as np
import pytest

from orchmllm.papers.pipeline import Pipeline, inter_reorder, operations, simulate
from tests.lib.ranks import run_ranks
from tests.lib.schedules import times
from tests.twins import pipeline as twin

SHAPES = [(4, 6), (4, 2), (1, 3), (3, 5)]


def test_hand_worked_table():
    # Two stages, three microbatches, forward 1 and backward 2; frozen first stage: no backward.
    made = Pipeline(np.ones((2, 3)), np.full((2, 3), 2.0), 0.0)
    made.run([0, 1, 2])
    assert made.ends == [[1, 2, 7], [2, 5, 8], [6, 9, 12], [4, 7, 10]]
    frozen = np.array([[0.0] * 3, [2.0] * 3])
    assert simulate(np.ones((2, 3)), frozen, comm_ms=0.5) == 11


@pytest.mark.parametrize("p, l", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_equals_twin(p, l, seed):  # noqa: E741
    rng = np.random.default_rng(seed)
    forward, backward = rng.random((2, p, l))
    comm, order = rng.random(p - 1), rng.permutation(l)
    made = Pipeline(forward, backward, comm)
    made.run(order.tolist())
    expected = twin.run(twin.device_lists(p, l), forward, backward, comm, order)
    assert len(expected) == 2 * p * l
    for (kind, s, slot), (_, end) in expected.items():
        assert made.ends[p * (kind == "B") + s][slot] == pytest.approx(end, abs=1e-12)
    last = max(end for _, end in expected.values())
    assert simulate(forward, backward, comm_ms=comm, order=order) == pytest.approx(last, abs=1e-12)


@pytest.mark.parametrize("p, l", [(2, 5), (3, 5), (4, 12), (3, 4), (5, 8), (3, 16), (2, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_algorithm_3_equals_twin(p, l, seed):  # noqa: E741
    forward, backward = times(p, l, seed, cv=1.0)
    comm = 0.4 * (1 + seed)
    order = inter_reorder(forward, backward, comm_ms=comm)
    assert order.tolist() == twin.inter_reorder(forward, backward, [comm] * (p - 1))
    assert sorted(order) == list(range(l))


@pytest.mark.parametrize("call, message", [
    (lambda: simulate(np.ones((2, 3)), np.ones((3, 2))), "one shape"),
    (lambda: simulate(np.ones((2, 3)), -np.ones((2, 3))), "finite and >= 0")])
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def named(p: int, l: int) -> list[list[tuple[str, int, int]]]:  # noqa: E741
    return [[("FB"[row // p], row % p, slot) for row, slot in mine] for mine in operations(p, l)]


@pytest.mark.parametrize("p, l", SHAPES)
def test_operations_equal_the_twins(p, l):  # noqa: E741
    assert named(p, l) == twin.device_lists(p, l)


@pytest.mark.slow  # the twin has the same order
@pytest.mark.dist
def test_orders_are_torchs():
    """What four gloo ranks really run, operation by operation; the order of the microbatches
    changes no gradient."""
    from tests.papers.pipelining import record

    slots = [6, 4]  # torch takes no fewer than ranks
    for l, ranks in zip(slots, zip(*run_ranks(record, 4, slots), strict=True), strict=True):  # noqa: E741
        assert [r["ops"] for r in ranks] == named(4, l)
        for r in ranks:
            np.testing.assert_allclose(r["gradients"][1], r["gradients"][0], rtol=1e-5)
            assert np.abs(r["gradients"][0]).sum() > 0
