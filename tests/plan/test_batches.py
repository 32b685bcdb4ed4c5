"""plan_batches: what trainers of reinforcement learning check of their own partitions, held on
random lengths: every index once, caps, groups, equal sizes, equally many microbatches a rank."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orchmllm import CostModel, plan_batches
from tests.lib.commands import ROOT
from tests.plan.test_balance_properties import thorough

QUADRATIC = CostModel(24_576, 1)  # of a dense model of 7B parameters, in units of a token's share


def sums(plan: list, values: np.ndarray) -> np.ndarray:
    """(microbatches, ranks) sum of the values of each list."""
    return np.array([[int(values[ranks].sum()) for ranks in micro] for micro in plan])


def waiting(held: np.ndarray) -> float:
    return held.max(axis=1).sum() / held.mean(axis=1).sum()


def first_fit_decreasing(lengths: np.ndarray, cap: int) -> int:
    """Bins of at most `cap`."""
    room: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        at = next((k for k, free in enumerate(room) if free >= length), len(room))
        room += [cap] * (at == len(room))
        room[at] -= length
    return len(room)


@thorough
@given(st.integers(1, 6), st.integers(1, 4), st.booleans(), st.sampled_from([0, 1, 3]),
       st.integers(0, 2**32))
def test_invariants(ranks: int, count: int, capped: bool, group: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(0, 40))
    lengths = rng.lognormal(3, 1, n).astype(int) + 1
    keys = (rng.permutation(n) // group).tolist() if group else None
    items = len({*keys}) if group else n
    of_item = np.bincount(keys, lengths) if group else lengths
    cap = int(max(of_item.max(initial=1), rng.integers(1, 300)))
    how = {"groups": keys, "cost": None if seed % 2 else QUADRATIC,
           **({"max_tokens": cap} if capped else {"num_microbatches": count})}
    plan = plan_batches(lengths.tolist(), ranks, **how)
    assert all(len(micro) == ranks for micro in plan) and (capped or len(plan) == count)
    assert sorted(i for micro in plan for one in micro for i in one) == list(range(n))
    assert all(one == sorted(one) for micro in plan for one in micro)
    if capped:
        assert sums(plan, lengths).max(initial=0) <= cap
        fewest = -(-first_fit_decreasing(of_item, cap) // ranks)
        assert -(-lengths.sum() // (cap * ranks)) <= len(plan) <= max(1, fewest)
        as_many = plan_batches(lengths, ranks, num_microbatches=max(1, fewest), **how)
        assert len(as_many) == max(1, fewest) and sums(as_many, lengths).max(initial=0) <= cap
    if items >= len(plan) * ranks:
        assert all(one for micro in plan for one in micro)
    if group:
        places = {(keys[i], k, r) for k, micro in enumerate(plan) for r, one in enumerate(micro)
                  for i in one}
        assert len(places) == items
    assert plan == plan_batches(np.array(lengths), ranks, **how)


@pytest.mark.parametrize("group", [1, 4])
def test_equal_sizes(group: int) -> None:
    """Of examples or of groups; no rank is 1% above the mean, or the longest item with the shortest
    others."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        lengths = rng.lognormal(6, 1, 16 * 8 * group).astype(int) + 1
        keys = np.repeat(np.arange(16 * 8), group)
        [ranks] = plan_batches(lengths, 8, groups=keys, equal_size=True)
        assert [len(one) for one in ranks] == [16 * group] * 8
        assert all(len({*keys[one]}) == 16 for one in ranks)
        items = np.sort(np.bincount(keys, lengths))
        least = max(lengths.sum() / 8, items[-1] + items[:15].sum())
        assert sums([ranks], lengths).max() <= 1.01 * least


def test_equal_keys_are_a_group_whatever_holds_them() -> None:
    """Tensors of equal numbers are not equal as keys."""
    keys = torch.arange(8) % 4
    plans = [plan_batches([5] * 8, 2, groups=groups) for groups in (
        keys.tolist(), keys, list(keys), keys.numpy())]
    assert plans == [[[[0, 1, 4, 5], [2, 3, 6, 7]]]] * 4


def test_the_setting_of_dynamic_batches() -> None:
    """16 ranks, 512 lognormal lengths, 16,384 tokens a rank and microbatch: as few microbatches as
    hold the tokens, none above the cap, and little waiting."""
    found = []
    for seed in range(20):
        lengths = np.minimum(np.random.default_rng(seed).lognormal(7.6, 1, 512).astype(int) + 16,
                             16_384)
        plan = plan_batches(lengths, 16, max_tokens=16_384, cost=QUADRATIC)
        assert sums(plan, lengths).max() <= 16_384
        assert len(plan) == -(-lengths.sum() // (16 * 16_384))
        found.append(waiting(sums(plan, QUADRATIC(lengths))))
    assert np.mean(found) <= 1.05 and max(found) <= 1.1


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("most", [2**61, sys.maxsize])
def test_a_cap_that_is_none(most: int) -> None:
    for count in (None, 2):
        plans = [plan_batches([5, 6, 7, 8, 9, 100, 3, 2], 4, num_microbatches=count, max_tokens=n)
                 for n in (10**6, most)]
        assert plans[0] == plans[1]


def test_costs_in_any_unit_give_the_same_plan() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, 64).astype(int)
    costs = QUADRATIC(lengths)
    plans = [plan_batches(lengths, 4, num_microbatches=3, cost=cost)
             for cost in (costs, costs * 2.0**-70, [int(c) << 80 for c in costs])]
    assert plans[0] == plans[1] == plans[2]
    long = plan_batches(lengths, 4, num_microbatches=3)
    assert waiting(sums(plans[0], costs)) < waiting(sums(long, costs))


@pytest.mark.parametrize("how, text", [
    (dict(max_tokens=7), r"example 2 has 8 tokens, more than max_tokens = 7"),
    (dict(max_tokens=9, groups="aabbcc"), "the group 'b' has 10 tokens, more than max_tokens = 9"),
    (dict(max_tokens=8, num_microbatches=1), "no plan was found for 26 tokens in 1 micro"),
    (dict(max_tokens=0), "max_tokens must be an integer >= 1"),
    (dict(num_microbatches=0), "num_microbatches must be an integer >= 1"),
    (dict(num_ranks=0), "num_ranks must be an integer >= 1"),
    (dict(lengths=[1, -2]), r"lengths\[1\] = -2 is negative"),
    (dict(groups=[1]), "groups has 1 entries, lengths 6"),
    (dict(cost=[1.0]), r"cost has the shape \(1,\), lengths \(6,\)"),
    (dict(cost=[1, 2, 3, 4, 5, np.nan]), r"cost\[5\] = nan: must be a finite number"),
    (dict(cost=CostModel(1, 0, padded=True)), "cost.padded: the cost of a rank has to be the sum"),
    (dict(equal_size=True, num_ranks=4), "6 items of 1 to 1 examples cannot be divided equally"),
    (dict(equal_size=True, groups="aabbbc"), "3 items of 1 to 3 examples cannot be"),
    (dict(equal_size=True, max_tokens=9), "equal_size is for one microbatch without max_tokens"),
])
def test_what_cannot_be_planned_is_named(how: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        plan_batches(**{"lengths": [5, 3, 8, 2, 7, 1], "num_ranks": 2, **how})


def test_no_torch_is_loaded() -> None:
    code = ("import sys, orchmllm; assert orchmllm.plan_batches([3, 1, 2], 2) == [[[0], [1, 2]]]; "
            "assert not {'torch', 'transformers'} & set(sys.modules)")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_the_schedule_of_the_docs() -> None:
    """Each rank's microbatches tile its examples, and ranks have equally many of them."""
    text = (ROOT / "docs/balancing.md").read_text()
    [code] = re.findall(r"```python\n(def schedule.*?)```", text, re.S)
    names: dict = {"plan_batches": plan_batches}
    exec(code, names)
    lengths = np.random.default_rng(0).integers(1, 50, 60)
    partitions, places, count = names["schedule"](lengths, 4, 120, QUADRATIC)
    assert sorted(sum(partitions, [])) == list(range(60))
    for mine, microbatches in zip(partitions, places, strict=True):
        assert sum(microbatches, []) == list(range(len(mine))) and len(microbatches) == count
        assert all(sum(lengths[mine[at]] for at in one) <= 120 for one in microbatches)
