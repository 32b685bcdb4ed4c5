"""lower_bound(): equal to its twin, never above the optimum, and equal to what `least_move` reaches
where the mean cannot be reached by any assignment."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchmllm.estimate.workload import sample_layout, synthetic_lengths
from orchmllm.plan.balance import balance, core
from orchmllm.plan.layout import VISION
from tests.twins.bound import lower_bound, most_gained


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


@settings(max_examples=150, deadline=None)
@given(awkward())
def test_bound_is_below_the_optimum(problem) -> None:
    weight, d = problem
    bound = core().lower_bound(weight, d)
    assert bound == lower_bound(weight, d)
    assert bound <= optimum(weight, d)


@pytest.mark.parametrize("seed", range(40))
def test_bound_equals_its_twin_at_size(seed: int) -> None:
    rng = np.random.default_rng(seed)
    d, n = int(rng.integers(2, 60)), int(rng.integers(60, 600))
    step = int(rng.choice([2, 5, 24, 32, 64]))
    weight = step * rng.integers(1, 30, n) + (rng.random(n) < .06) * rng.integers(0, step, n)
    if seed % 2:
        weight = synthetic_lengths("pareto", n, seed) // int(rng.integers(1, 4))
    assert core().lower_bound(weight, d) == lower_bound(weight, d)


def test_gain_of_remainders() -> None:
    """A large remainder gains nothing alone, two of them or one with a small one a whole step."""
    assert most_gained([3, 5], 4) == 4 and most_gained([5], 4) == 0
    assert most_gained([1, 5], 4) == 4 and most_gained([1, 5, 5], 4) == 5
    assert most_gained([1, 1, 2], 4) == 4


def test_worked_examples() -> None:
    # 15 of 16 items are multiples of 10: the odd rank may hold 81, the other only 80 of 80.5.
    assert core().lower_bound(np.array([10] * 15 + [11]), 2) == 81
    # Beside 95 nothing but 10 fits below 107, and there are three ranks of 104 in the mean.
    heavy = np.array([95, 95, 95, 10, 18])
    assert core().lower_bound(heavy, 3) == optimum(heavy, 3) == 113


def test_images_of_32_patches_reach_the_bound() -> None:
    """19 images a rank: most loads are multiples of 32, the mean is not, and the bound knows."""
    exact = 0
    for seed in range(6):
        layout = sample_layout("10b", num_ranks=128, batch_size=30, seed=seed)
        segments = layout.segments_of(VISION)
        weight = layout.attn_len[segments]
        home = layout.rank_of_example[layout.example_of_segment[segments]]
        rank_of = balance(weight, num_ranks=128, policy="least_move", home=home, tolerance=0)
        bound = core().lower_bound(weight, 128)
        assert bound > -(-int(weight.sum()) // 128)
        exact += np.bincount(rank_of, weight).max() == bound
    assert exact >= 5
