"""The published methods of scripts/peer_methods.py: known answers, and ranks for all items."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))  # as for a script that is started
from peer_methods import METHODS  # noqa: E402

WEIGHT = np.array([8, 7, 6, 5, 4])


@pytest.mark.parametrize(("name", "loads"), [
    ("Karmarkar-Karp", [14, 16]),  # the textbook's example; longest first ends at 17
    ("heap LPT", [13, 17]), ("sorted snake", [13, 17]), ("Algorithm 1 as printed", [0, 30])])
def test_known_answers(name: str, loads: list[int]) -> None:
    rank_of = METHODS[name](WEIGHT, np.zeros(5, np.int64), 2, 1.0)
    assert sorted(np.bincount(rank_of, WEIGHT, 2).tolist()) == loads


@pytest.mark.parametrize("name", [name for name in METHODS if "CVXPY" not in name])
def test_every_item_has_a_rank(name: str) -> None:
    weight = np.random.default_rng(0).integers(1, 100, 64)
    rank_of = METHODS[name](weight, np.arange(64) // 8, 8, 1.0)
    assert rank_of.shape == (64,) and rank_of.min() >= 0 and rank_of.max() < 8
    if name in ("equal-size KK", "equal-count LPT"):
        assert np.bincount(rank_of).tolist() == [8] * 8


def test_algorithm_3_as_printed_is_refused() -> None:
    pytest.importorskip("cvxpy")
    with pytest.raises(ValueError, match="Incompatible dimensions"):
        METHODS["Algorithm 3 as printed, CVXPY"](np.ones(64, np.int64), np.arange(64) // 4, 16, 1.0)
