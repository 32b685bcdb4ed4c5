"""What ranks hold before any item is assigned: `held` of least_move, and place_shares, which says
where examples that ranks share are placed first."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchmllm.plan.balance import CapError, balance, core, load_cap
from tests.lib.balancing import assignments, loads, problems, some_held, thorough
from tests.plan.test_balance_properties import random_case
from tests.twins import core as reference
from tests.twins.least_move import least_move_counted

NOTHING = np.zeros(0, np.int64)


@settings(thorough, max_examples=80)
@given(problems(max_items=60, max_ranks=12), st.sampled_from([0, .001, .02, .5]), st.booleans(),
       st.integers(0, 2**32))
def test_least_move_equals_its_twin(problem, tolerance, priced, seed) -> None:
    weight, home, d, c = problem
    price = np.arange(len(weight)) * 7919 % 1000 if priced else NOTHING
    held = some_held(np.random.default_rng(seed), weight, d)
    assert core().lower_bound(weight, d, held) == reference.lower_bound(weight, d, held.tolist())
    cap = load_cap(weight, d, tolerance, held)
    got, operations = core().least_move_counted(weight, home, price, d, c, cap, held)
    twin, counted = least_move_counted(weight, home, price, d, c, cap, held)
    assert np.array_equal(got, twin) and operations == counted
    assert np.array_equal(got[weight == 0], home[weight == 0])
    before = (held + loads(weight, home, d)).max()
    assert (held + loads(weight, got, d)).max() <= max(before, cap)
    if before <= cap:
        assert np.array_equal(got, home)


@pytest.mark.parametrize(("ranks", "times", "share", "seed"), [(3, 1, 12, 29), (4, 2, 4, 1)])
def test_what_full_ranks_send_equals_the_twin(ranks: int, times: int, share: int,
                                              seed: int) -> None:
    """Most or all ranks of a node have no room: what a rank is to send counts only its items."""
    weight = np.random.default_rng(seed).lognormal(5, 1, 12 * share).astype(np.int64) + 1
    home = np.arange(12 * share) // share
    held = np.where(np.arange(12) < ranks, times * weight.sum() // 12, 0)
    cap = load_cap(weight, 12, .001, held)
    got, operations = core().least_move_counted(weight, home, NOTHING, 12, 4, cap, held)
    twin, counted = least_move_counted(weight, home, NOTHING, 12, 4, cap, held)
    assert np.array_equal(got, twin) and operations == counted
    assert (held + loads(weight, got, 12)).max() <= cap


def test_large_loads_are_not_taken_for_small_ones() -> None:
    """Ranks that hold about 2**44, as in FLOP of long examples."""
    rng = np.random.default_rng(0)
    for _ in range(10):
        weight, home = rng.integers(1, 2**36, 20), rng.integers(0, 6, 20)
        held = 2**44 + rng.integers(-2**36, 2**36, 6)
        cap = load_cap(weight, 6, 0, held)
        got, operations = core().least_move_counted(weight, home, NOTHING, 6, 2, cap, held)
        twin, counted = least_move_counted(weight, home, NOTHING, 6, 2, cap, held)
        assert np.array_equal(got, twin) and operations == counted


def test_zeros_change_nothing() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        weight, home, price, d, c = random_case(rng)
        cap, zeros = load_cap(weight, d, .001), np.zeros(d, np.int64)
        assert load_cap(weight, d, .001, zeros) == cap
        plan, operations = core().least_move_counted(weight, home, price, d, c, cap)
        with_zeros, counted = core().least_move_counted(weight, home, price, d, c, cap, zeros)
        assert np.array_equal(plan, with_zeros) and operations == counted


def test_excess_over_the_optimum() -> None:
    """Of 1 to 9 items on 2 or 3 ranks, by brute force: what is claimed where nothing is held. The
    lower bound is not above the optimum, and is the optimum of equal weights."""
    rng, ratios = np.random.default_rng(3), []
    for case in range(150):
        d, n = int(rng.integers(2, 4)), int(rng.integers(1, 10))
        weight, home = rng.integers(1, 100, n), rng.integers(0, d, n)
        if case % 5 == 0:
            weight[:] = weight[0]
        held = some_held(rng, weight, d)
        ranks = assignments(n, d)
        optimum = np.max([held[r] + (ranks == r) @ weight for r in range(d)], axis=0).min()
        bound = core().lower_bound(weight, d, held)
        assert bound <= optimum
        assert bound == optimum or case % 5
        got = balance(weight, num_ranks=d, policy="least_move", home=home, tolerance=0, held=held)
        ratios.append((held + loads(weight, got, d)).max() / optimum)
    print(f"mean {np.mean(ratios):.4f}, worst {max(ratios):.4f} of the optimum, "
          f"{np.mean(np.array(ratios) == 1):.0%} optimal")
    assert max(ratios) <= 4 / 3 and np.mean(ratios) < 1.02


@pytest.mark.parametrize("kind", ["some ranks", "whole nodes"])
def test_a_mix_is_within_the_tolerance(kind: str) -> None:
    """With up to the mean load on a hundredth of the ranks, or on all ranks of two nodes; little
    more moves between nodes than has to."""
    d, rng = 512, np.random.default_rng(0)
    length = rng.lognormal(6, 1, d * 15).astype(np.int64) + 1
    weight, home = length * 1000 + length * length, np.arange(d * 15) // 15
    held = np.zeros(d, np.int64)
    if kind == "some ranks":
        held[rng.permutation(d)[:5]] = weight.sum() / d * np.linspace(.2, 1, 5)
    else:
        held.reshape(-1, 8)[[3, 40]] = weight.sum() // d
    cap = load_cap(weight, d, .001, held)
    got = core().least_move(weight, home, NOTHING, d, 8, cap, held)
    assert (held + loads(weight, got, d)).max() <= cap
    moved = weight[got // 8 != home // 8].sum()
    nodes = (held + loads(weight, home, d)).reshape(-1, 8).sum(axis=1)
    assert moved <= 1.1 * np.maximum(0, nodes - 8 * cap).sum()
    price = length * rng.choice([8, 7168], d * 15)
    priced = core().least_move(weight, home, price, d, 8, cap, held)
    assert (held + loads(weight, priced, d)).max() <= cap


@thorough
@given(problems(max_items=60), st.floats(1, 2), st.integers(0, 2**32))
def test_token_cap_counts_held_lengths(problem, room, seed) -> None:
    weight, home, d, c = problem
    tokens, rng = np.arange(len(weight)) % 50 + 1, np.random.default_rng(seed)
    held, held_lengths = some_held(rng, weight, d), some_held(rng, tokens, d)
    cap = int(max(50, held_lengths.max(), (tokens.sum() + held_lengths.sum()) / d * room + 1))
    try:
        rank_of = balance(tokens, num_ranks=d, policy="quadratic", home=home, cost=weight,
                          ranks_per_node=c, max_rank_tokens=cap, held=held,
                          held_lengths=held_lengths)
    except CapError as error:
        assert f"max_rank_tokens = {cap}: no plan found" in str(error)
    else:
        assert (held_lengths + loads(tokens, rank_of, d)).max() <= cap


def test_a_plan_that_keeps_to_the_cap_but_for_what_is_held_is_none() -> None:
    with pytest.raises(CapError, match="max_rank_tokens = 5: no plan found"):
        balance([4, 4], num_ranks=2, policy="least_move", home=[0, 1], max_rank_tokens=5,
                held=[2, 0], held_lengths=[2, 0])


@pytest.mark.parametrize(("change", "message"), [
    ({"policy": "greedy"}, "'greedy' does not honour held"),
    ({"policy": "none", "held": None, "held_lengths": [0, 9]}, "'none' does not honour held_len"),
    ({"held": [1]}, "held has 1 entries, expected 2"),
    ({"held": [0, -1]}, r"held\[1\] = -1 is negative"),
    ({"held": [0., 1.]}, "held must be integers"),
    ({"cost": [2**60] * 3, "held": [2**61, 0]}, "the sum of weight and held overflows int64"),
    ({"max_rank_tokens": 20}, "held_lengths must be given with held and max_rank_tokens, and only"),
    ({"held_lengths": [0, 9]}, "held_lengths must be given with held and max_rank_tokens"),
    ({"held": None, "held_lengths": [0, 9], "max_rank_tokens": 20}, "held_lengths must be given"),
    ({"held_lengths": [0], "max_rank_tokens": 20}, "held_lengths has 1 entries, expected 2"),
    ({"held_lengths": [0, 9], "max_rank_tokens": 8}, r"= 8 is below held_lengths\[1\] = 9"),
    ({"held_lengths": [0, 9], "max_rank_tokens": 10},
     "= 10: no plan found; the mean is 11 tokens per rank"),
])
def test_bad_held(change: dict, message: str) -> None:
    arguments = {"num_ranks": 2, "policy": "least_move", "held": [0, 9]} | change
    with pytest.raises(ValueError, match=message):
        balance([3, 4, 5], **arguments)


def test_held_is_balanced_around() -> None:
    """By hand: what one rank holds is as much as three of the items."""
    assert balance([3, 3, 3, 3, 3], num_ranks=2, policy="least_move", home=[0] * 5,
                   held=[9, 0]).tolist().count(1) == 4
    assert core().lower_bound(np.full(5, 3), 2, np.array([9, 0])) == 12
    # The room of all ranks together is beyond int64.
    assert core().lower_bound(np.array([2**61, 1]), 24, np.full(24, 1)) == 2**61 + 1


@thorough
@given(st.integers(2, 40), st.sampled_from([2, 3, 4, 8, 64]), st.integers(0, 40),
       st.integers(0, 400), st.integers(0, 2**32))
def test_place_shares(d: int, c: int, k: int, room: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    share = rng.integers(0, 100, k) if seed % 2 else rng.choice([1, 2, 4], k)
    count, home = rng.integers(2, min(c, d) + 1, k), rng.integers(0, d, k)
    got = core().place_shares(share, count, home, d, c, room)
    assert np.array_equal(got, reference.place_shares(share, count, home, d, c, room))
    load = np.zeros(d, np.int64)
    for s, h, ranks in zip(share, home, np.split(got, np.cumsum(count))[:k], strict=True):
        assert (np.diff(ranks) > 0).all() and len(set(ranks // c)) <= 1
        own = np.sort(load[h // c * c:h // c * c + c])
        stays = len(own) >= len(ranks) and own[len(ranks) - 1] + s <= room
        assert ranks[0] // c == h // c or not stays
        load[ranks] += s
    assert load.sum() == share @ count


def test_place_shares_by_hand() -> None:
    """Two nodes of 2 ranks, and one of 1, into which none of the examples fits."""
    def placed(share, home, room):
        return core().place_shares(np.array(share, np.int64), np.full(len(share), 2),
                                   np.array(home, np.int64), 5, 2, room).reshape(-1, 2).tolist()

    assert placed([5, 5, 5], [0, 1, 4], 10) == [[0, 1], [0, 1], [2, 3]]
    assert placed([5, 5, 5], [2, 2, 2], 9) == [[2, 3], [0, 1], [2, 3]]
    assert placed([], [], 0) == []


@pytest.mark.parametrize(("change", "message"), [
    ({"count": [2, 1]}, r"count\[1\] = 1 must be >= 2"),
    ({"count": [2, 5]}, r"count\[1\] = 5: no node has so many ranks"),
    ({"num_ranks": 3, "count": [2, 4], "home": [0, 0]}, r"count\[1\] = 4: no node has so many"),
    ({"count": [2]}, "count has 1 entries, expected 2"),
    ({"share": [1, -1]}, r"share\[1\] = -1 is negative"),
    ({"share": [2**62, 1]}, r"share\[0\] = .*overflows int64"),
    ({"home": [0, 8]}, r"home\[1\] = 8 is not a rank of 8"),
    ({"room": -1}, "room must be >= 0"),
    ({"ranks_per_node": 0}, "ranks_per_node = 0 must be >= 1"),
])
def test_place_shares_refuses(change: dict, message: str) -> None:
    arguments = {"share": [1, 1], "count": [2, 2], "home": [0, 1], "num_ranks": 8,
                 "ranks_per_node": 4, "room": 9} | change
    arrays = {k: np.array(v) for k, v in arguments.items() if isinstance(v, list)}
    with pytest.raises(ValueError, match=message):
        core().place_shares(**arguments | arrays)
