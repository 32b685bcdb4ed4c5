"""Policy `conv_transformer`: equal to its twin, and near its lower bound on audio."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchmllm.papers.mixes import MODELS
from orchmllm.plan.balance import core
from orchmllm.plan.layout import AUDIO
from orchmllm.tools.predict.workload import sample_layout
from tests.plan.test_balance_properties import loads, problems, thorough
from tests.twins import conv_transformer as reference_conv


def conv_cost(weight: np.ndarray, pad: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> int:
    longest = np.zeros(num_ranks, np.int64)
    np.maximum.at(longest, rank_of, pad)
    count = np.bincount(rank_of, minlength=num_ranks)
    return int((loads(weight, rank_of, num_ranks) + count * longest).max())


@settings(thorough, max_examples=80)
@given(problems(), st.sampled_from([1, 3, 40]), st.booleans())
def test_conv_equals_its_twin(problem, share, squared) -> None:
    weight, home, d, _ = problem
    pad = weight * weight // (share * 5000) if squared and weight.max(initial=0) < 2**20 else (
        weight // share)
    if not squared:
        pad += np.argsort(np.lexsort((np.arange(len(weight)), weight))) // 4  # ties differ
    got = core().conv_transformer(weight, pad, home, d)
    assert np.array_equal(got, reference_conv.conv_transformer(weight, pad, home, d))
    assert np.array_equal(got[weight == 0], home[weight == 0])


def test_pads_that_do_not_grow_and_costs_without_end() -> None:
    rng = np.random.default_rng(0)
    for _ in range(100):
        n, d = int(rng.integers(1, 40)), int(rng.integers(1, 6))
        weight, pad = rng.integers(1, 60, n), rng.integers(0, 60, n)
        home = rng.integers(0, d, n)
        assert np.array_equal(core().conv_transformer(weight, pad, home, d),
                              reference_conv.conv_transformer(weight, pad, home, d))
    with pytest.raises(ValueError, match="padded_cost.* 2\\^61"):
        core().conv_transformer(np.array([1000] + [1] * 100), np.array([2**57] + [0] * 100),
                    np.zeros(101, np.int64), 1)


@pytest.mark.parametrize(("num_ranks", "batch_size", "most"), [
    (24, 30, 1.02), (512, 30, 1.0085), (2560, 60, 1.0042)])
def test_conv_nears_its_bound_on_audio(num_ranks: int, batch_size: int, most: float) -> None:
    """The natural mix's clips, lambda 1.3e-4; the bound is the mean without padding."""
    layout = sample_layout(MODELS["10b"], num_ranks=num_ranks, batch_size=batch_size, seed=0)
    segments = layout.segments[AUDIO]
    weight = layout.attn_len[segments]
    home = layout.rank_of_example[layout.example_of_segment[segments]]
    pad = (1.3e-4 * weight * weight).astype(np.int64)
    got = core().conv_transformer(weight, pad, home, num_ranks)
    if num_ranks == 24:
        assert np.array_equal(got, reference_conv.conv_transformer(weight, pad, home, num_ranks))
    assert conv_cost(weight, pad, got, num_ranks) * num_ranks <= most * (weight + pad).sum()
