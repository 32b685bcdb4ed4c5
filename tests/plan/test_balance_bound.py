"""lower_bound(): equal to its twin and never above the optimum."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from orchmllm.plan.balance import core
from tests.twins.core import lower_bound


def optimum(weight: np.ndarray, d: int) -> int:
    """Least max load on 2 or 3 ranks, from all reachable pairs of loads."""
    total = int(weight.sum())
    reached = np.zeros((total + 1, total + 1 if d == 3 else 1), bool)
    reached[0, 0] = True
    for w in weight:
        before = reached.copy()  # the item goes to the last rank, or
        reached[w:] |= before[: total + 1 - w]
        if d == 3:
            reached[:, w:] |= before[:, : total + 1 - w]
    a, b = np.nonzero(reached)
    return int(np.maximum(np.maximum(a, b), total - a - b).min())


@st.composite
def awkward(draw):
    """(weights, ranks): multiples of a step but for a few, or heavy items among light ones."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    d, n = draw(st.integers(2, 3)), draw(st.integers(1, 22))
    if draw(st.booleans()):
        step = draw(st.sampled_from([6, 8, 12, 15]))
        weight = step * rng.integers(1, 4, n)
        odd = rng.permutation(n)[: n // 16]
        weight[odd] += rng.integers(1, step, len(odd))
        return weight, d
    weight = rng.integers(10, 24, n)
    weight[: d] = rng.integers(80, 120, d)[: n]
    return weight, d


@settings(max_examples=150)
@given(awkward())
def test_bound_is_below_the_optimum(problem) -> None:
    weight, d = problem
    bound = core().lower_bound(weight, d)
    assert bound == lower_bound(weight, d)
    assert bound <= optimum(weight, d)
