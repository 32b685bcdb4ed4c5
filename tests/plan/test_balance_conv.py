"""Policy `conv_transformer`: equal to its twin, never worse than longest first, near what the
configuration LP allows; and the LP's bound is one."""


import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchmllm.estimate.workload import sample_layout
from orchmllm.plan.balance import core
from orchmllm.plan.layout import AUDIO
from tests.lib.balancing import brute_force, loads, problems, thorough
from tests.lib.commands import ROOT
from tests.twins import conv_transformer as reference_conv

SCRIPTS = ROOT / "scripts"


def conv_cost(weight: np.ndarray, pad: np.ndarray, rank_of: np.ndarray, num_ranks: int) -> int:
    longest = np.zeros(num_ranks, np.int64)
    np.maximum.at(longest, rank_of, pad)
    count = np.bincount(rank_of, minlength=num_ranks)
    return int((loads(weight, rank_of, num_ranks) + count * longest).max())


def longest_first(weight: np.ndarray, pad: np.ndarray, num_ranks: int) -> int:
    """What `conv_transformer` costs without prices."""
    order = [i for i in np.argsort(-weight, kind="stable") if weight[i]]
    mean = -(-int((weight + pad)[order].sum()) // num_ranks)
    batches = reference_conv._longest_first(weight, pad, order, num_ranks,
                                            max(mean, int((weight + pad)[order[0]])))
    return max(int(weight[batch].sum() + len(batch) * pad[batch].max())
               for batch in batches if batch)


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
    if weight.any():
        own = weight > 0
        cost = conv_cost(weight[own], pad[own], got[own], d)
        assert cost <= longest_first(weight, pad, d)


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


def audio(num_ranks: int, batch_size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(weight, pad, home): the natural mix's clips, lambda 1.3e-4."""
    layout = sample_layout("10b", num_ranks=num_ranks, batch_size=batch_size, seed=seed)
    segments = layout.segments_of(AUDIO)
    weight = layout.attn_len[segments]
    home = layout.rank_of_example[layout.example_of_segment[segments]]
    return weight, (1.3e-4 * weight * weight).astype(np.int64), home


@pytest.mark.parametrize(("batch_size", "seed"), [(30, 0), (30, 1), (60, 2)])
def test_conv_equals_its_twin_on_audio(batch_size: int, seed: int) -> None:
    weight, pad, home = audio(24, batch_size, seed)
    assert np.array_equal(core().conv_transformer(weight, pad, home, 24),
                          reference_conv.conv_transformer(weight, pad, home, 24))


@pytest.mark.parametrize(("num_ranks", "batch_size", "most"), [
    (512, 30, 1.0065), (2560, 30, 1.0061), (2560, 60, 1.0030), (2560, 80, 1.0024)])
def test_conv_nears_what_is_possible(num_ranks: int, batch_size: int, most: float) -> None:
    """Longest first alone is at 1.0075, 1.0073, 1.0036 and 1.0027 times the bound or more."""
    for seed in range(2):
        weight, pad, home = audio(num_ranks, batch_size, seed)
        got = core().conv_transformer(weight, pad, home, num_ranks)
        assert conv_cost(weight, pad, got, num_ranks) * num_ranks <= most * (weight + pad).sum()


@pytest.mark.skipif(not SCRIPTS.is_dir(), reason="a copy of the package without scripts/")
@pytest.mark.parametrize("seed", range(8))
def test_lp_bound_is_below_every_assignment(seed: int, monkeypatch) -> None:
    pytest.importorskip("highspy")
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from prove_conv_bound import Search

    rng = np.random.default_rng(seed)
    d, n = int(rng.integers(2, 4)), int(rng.integers(4, 8))
    weight = np.sort(rng.integers(5, 40, n))
    pad = weight * weight // 50

    def cost(own):
        return own @ weight + own.sum(axis=1) * (own * pad).max(axis=1)

    length, first, items = np.unique(weight, return_index=True, return_counts=True)
    search = Search(length, pad[first], items, d)
    search.run(20.0)
    optimum = brute_force(weight, d, cost)
    assert search.low == search.high <= optimum <= search.first
    assert search.low >= (weight + pad).sum() / d
