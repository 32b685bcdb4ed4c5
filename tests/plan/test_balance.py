"""balance(): input checks and the policy x option table; costs of items by their lengths.
(tests/models/test_whole_flops.py compares those of the model's phases with counted FLOP.)"""

from __future__ import annotations

import numpy as np
import pytest

from orchmllm.config.balance import PhaseConfig
from orchmllm.loader.setup import make_spec
from orchmllm.plan.balance import DEFAULT_TOLERANCE, balance
from orchmllm.plan.cost import CostModel
from orchmllm.plan.step import imbalance


def test_none_returns_home() -> None:
    home = np.array([2, 0, 1])
    assert np.array_equal(balance([5, 6, 7], num_ranks=3, policy="none", home=home), home)


def test_default_tolerance_is_a_thousandth() -> None:
    """Everywhere: balance(), recipes and the drop-in loader. Policies without one ignore it."""
    weight = np.random.default_rng(0).integers(1, 1000, 2000)
    default, same, half = (balance(weight, num_ranks=32, policy="least_move", **given)
                           for given in ({}, {"tolerance": .001}, {"tolerance": .005}))
    assert np.array_equal(default, same) and not np.array_equal(default, half)
    assert PhaseConfig().tolerance == DEFAULT_TOLERANCE == .001
    spec = make_spec("least_move", None, 0, cost=None, ranks_per_node=8, dispatch="load",
                     min_gain=0.0)
    assert spec.balance.llm.tolerance == .001
    assert list(PhaseConfig("greedy").conflicts()) == []
    assert len(list(PhaseConfig("greedy", tolerance=.1).conflicts())) == 1


def test_each_microbatch_waits_for_its_slowest_rank() -> None:
    assert imbalance([1, 3]) == imbalance([[1, 3], [3, 1]]) == imbalance([[2, 6], [3, 1]]) == 1.5
    assert imbalance([[2, 2], [1, 1]]) == imbalance([0, 0]) == 1


def test_greedy_balances_cost() -> None:
    rank_of = balance([1, 1, 1], num_ranks=2, policy="greedy", cost=[1, 9, 8])
    assert rank_of.tolist() == [1, 0, 1]


@pytest.mark.parametrize(("change", "message"), [
    ({"policy": "lpt"}, "unknown policy 'lpt'"),
    ({"policy": "none", "cost": [1, 2, 3]}, "'none' does not honour cost"),
    ({"tolerance": 0.1}, "'greedy' does not honour tolerance"),
    ({"num_ranks": 0}, "num_ranks must be"),
    ({"ranks_per_node": 0}, "ranks_per_node must be"),
    ({"lengths": [1, -2, 3]}, r"lengths\[1\] = -2 is negative"),
    ({"lengths": [1.0, float("nan"), 3.0]}, "lengths must be integers.*nan at index 1"),
    ({"lengths": [[1, 2, 3]]}, "lengths must be 1-D"),
    ({"lengths": np.array([1, 2**63, 3], np.uint64)}, r"lengths\[1\] = .* overflows"),
    ({"lengths": [2**62, 2**62, 1]}, "sum of lengths overflows"),
    ({"cost": [1, 2]}, "cost has 2 entries, expected 3"),
    ({"home": [0, 1, 2]}, r"home\[2\] = 2 is not a rank of 2"),
    ({"home": [0, -1, 0]}, r"home\[1\] = -1 is negative"),
])
def test_bad_input_names_argument_and_index(change: dict, message: str) -> None:
    arguments = {"lengths": [1, 2, 3], "num_ranks": 2, "policy": "greedy"} | change
    with pytest.raises(ValueError, match=message):
        balance(arguments.pop("lengths"), **arguments)


def test_cost_models() -> None:
    """By hand; an item's cost is rounded down once."""
    assert CostModel(7000, 3000)([0, 1, 2, 1000]).tolist() == [0, 10, 26, 3_007_000]
    assert CostModel(1999, 0, constant=500)([0, 1, 2]).tolist() == [0, 2, 4]
    assert CostModel(7, 3, unit=1, padded=True).of_ranks(
        [1, 2, 5], np.array([2, 2, 0]), 3).tolist() == [5 * 7 + 25 * 3, 0, 2 * (2 * 7 + 4 * 3)]
    for padded, held in ((True, [5, 0, 4]), (False, [5, 0, 3])):  # of 1 and 2, padded to 2
        assert CostModel(7, 3, padded=padded).positions.of_ranks(
            [1, 2, 5], np.array([2, 2, 0]), 3).tolist() == held
    with pytest.raises(ValueError, match=r"lengths\[0\].*overflows"):
        CostModel(1, 1)([2**32])


@pytest.mark.parametrize("terms, says", [
    ({"linear": float("nan")}, "linear = nan: must be a whole number >= 0"),
    ({"quadratic": float("inf")}, "quadratic = inf: must be"), ({"linear": .5}, "linear = 0.5: "),
    ({"window": -1}, "window = -1: must be"), ({"unit": 0}, "unit = 0: must be .* >= 1")])
def test_what_no_term_of_a_cost_can_be(terms: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        CostModel(**{"linear": 1, "quadratic": 1} | terms)


def test_terms_of_any_number_type_cost_the_same() -> None:
    """Those of numpy would overflow unseen, and the core takes no floats."""
    model = CostModel(np.int64(10**9), np.float32(2**20))
    assert repr(model) == repr(CostModel(10**9, 2**20)) and model == CostModel(1e9, 2**20)
    with pytest.raises(ValueError, match="its cost overflows int64"):
        model([2**25, 10])


def test_frames_and_windows_limit_attention() -> None:
    model = CostModel(1000, 3000)
    assert model([12]).tolist() == [12 + 3 * 144]
    assert model([12], frames=np.array([3])).tolist() == [12 + 3 * 12 * 4]
    assert CostModel(1000, 3000, window=5)([12, 4]).tolist() == [12 + 3 * 12 * 5, 4 + 3 * 16]
    assert (model.linear_part([7]) + model.quadratic_part([7])).tolist() == model([7]).tolist()


def test_what_no_length_and_no_cap_can_be() -> None:
    with pytest.raises(ValueError, match="a length is -3: must be >= 0"):
        CostModel(1, 0)(np.array([5, -3]))
    with pytest.raises(ValueError, match="max_rank_tokens must be an integer >= 1 and below 2"):
        balance([1, 2], num_ranks=2, policy="least_move", max_rank_tokens=2**63)
