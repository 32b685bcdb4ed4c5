"""split_layers against brute force."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from orchmllm.papers.pipeline import simulate
from orchmllm.papers.split import split_layers


@pytest.mark.parametrize("seed", range(6))
def test_exact_and_search_equal_brute_force(seed):
    rng = np.random.default_rng(seed)
    forward = rng.uniform(1, 4, 9)
    moved = rng.uniform(0, 2e6, 8)
    longest, fastest = np.inf, np.inf
    for cuts in combinations(range(1, 9), 2):
        stage = np.add.reduceat(forward, [0, *cuts])
        times = np.repeat(stage[:, None], 5, axis=1)
        longest = min(longest, 3 * stage.max())
        fastest = min(fastest, simulate(times, 2 * times, comm_ms=moved[np.array(cuts) - 1] / 1e6))
    common = {"num_stages": 3, "num_microbatches": 5, "bytes_per_s": 1e9}
    exact = split_layers(forward, 2 * forward, moved, method="exact", **common)
    assert exact.stage_ms.max() == pytest.approx(longest)
    assert exact.stage_ms.sum() == pytest.approx(3 * forward.sum()) and sum(exact.layers) == 9
    search = split_layers(forward, 2 * forward, moved, radius=8, **common)
    assert search.simulated_ms == pytest.approx(fastest)
    for method in ("even", "parameters", "profile"):
        other = split_layers(forward, 2 * forward, moved, method=method,
                             parameters=np.arange(1, 10), **common)
        assert len(other.layers) == 3 and other.simulated_ms >= search.simulated_ms - 1e-9
    assert split_layers(forward, forward, method="even", **common).layers == (3, 3, 3)


def test_exact_keeps_the_longest_stage_short_first():
    rng, differs = np.random.default_rng(0), 0
    for _ in range(60):
        time = rng.integers(1, 20, 8).astype(float)
        stages = [np.add.reduceat(time, [0, *cuts]) for cuts in combinations(range(1, 8), 2)]
        longest = min(s.max() for s in stages)
        made = split_layers(time, 0 * time, num_stages=3, num_microbatches=2, method="exact")
        assert made.stage_ms.max() == longest
        differs += min(stages, key=lambda s: (s**2).sum()).max() > longest
    assert differs > 0  # the least sum of squares alone would not do


def test_exact_of_a_large_model_evens_out():
    # 45 ViT layers of 3 ms and 80 LLM layers of 4 ms, with a head of 6 ms on the last.
    time = np.array([3.0] * 45 + [4.0] * 79 + [10.0])
    made = split_layers(time, 2 * time, num_stages=8, num_microbatches=16, method="exact")
    assert made.stage_ms.max() <= 1.05 * made.stage_ms.mean() and sum(made.layers) == 125


@pytest.mark.parametrize("call, message", [
    ({"num_stages": 4}, "1 to 3"), ({"method": "best"}, "choose one of even")])
def test_bad_split(call, message):
    with pytest.raises(ValueError, match=message):
        split_layers([1, 1, 1], [1, 1, 1], **{"num_stages": 2, "num_microbatches": 2} | call)
