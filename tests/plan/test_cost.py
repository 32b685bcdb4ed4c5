"""Costs of items by their lengths. (tests/models/test_whole_flops.py compares those of the model's
phases with counted FLOP.)"""

import numpy as np
import pytest

from orchmllm.plan.balance import balance
from orchmllm.plan.cost import CostModel


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
