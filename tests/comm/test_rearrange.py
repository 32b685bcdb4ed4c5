"""Algebra of rearrangements, and their execution by real ranks: every byte arrives, and returns."""

from __future__ import annotations

import sys
from datetime import timedelta
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from orchmllm.comm.exchange import _summed, exchange_rows, gloo_group, node_group
from orchmllm.comm.exchange_bytes import exchange_bytes
from orchmllm.plan.rearrange import Rearrangement
from tests.lib.ranks import run_ranks


@st.composite
def rearrangements(draw):
    d = draw(st.integers(1, 6))
    sizes = draw(st.lists(st.integers(0, 5), min_size=d, max_size=d))
    n = sum(sizes)
    ranks = draw(st.lists(st.integers(0, d - 1), min_size=n, max_size=n))
    return Rearrangement.from_rank_of(np.array(ranks, np.int64), np.array(sizes, np.int64))


@given(rearrangements(), st.randoms(use_true_random=False))
def test_inverse_then_and_expand(move, random):
    n = len(move.order)
    x = np.arange(n)
    assert np.array_equal(x[move.order][move.inverse.order], x)
    back = move.then(move.inverse)
    assert np.array_equal(back.order, x)
    assert np.array_equal(back.target_sizes, move.source_sizes)
    counts = np.array([random.randint(0, 4) for _ in range(n)], np.int64)
    wide = move.expand(counts)
    rows = np.repeat(x, counts)  # item of each row
    assert np.array_equal(rows[wide.order], np.repeat(move.order, counts[move.order]))
    assert wide.source_sizes.sum() == wide.target_sizes.sum() == counts.sum()
    for rank in range(len(move.source_sizes)):
        items = np.flatnonzero(move.target_rank == rank)
        assert wide.target_sizes[rank] == counts[move.order[items]].sum()
        assert np.all(np.diff(move.order[items]) > 0)  # ascending source order inside a rank


@given(rearrangements(), st.randoms(use_true_random=False))
def test_exchanges_of_all_ranks_carry_out_the_rearrangement(move, random):
    """Simulates the all-to-all in one process from every rank's view."""
    d = len(move.source_sizes)
    rows = np.array([random.randint(0, 3) for _ in range(len(move.order))], np.int64)
    wide = move.expand(rows)
    x = np.split(np.arange(rows.sum()), np.cumsum(wide.source_sizes)[:-1])
    views = [move.exchange(rows, r) for r in range(d)]
    sent = [np.split(x[r][v.send_index], np.cumsum(v.input_splits)[:-1])
            for r, v in enumerate(views)]
    for r, v in enumerate(views):
        received = np.concatenate([sent[source][r] for source in range(d)])
        assert [len(sent[s][r]) for s in range(d)] == v.output_splits.tolist()
        want = np.split(np.arange(rows.sum())[wide.order], np.cumsum(wide.target_sizes)[:-1])[r]
        assert np.array_equal(received[v.recv_index], want)
    crossing = any(len(sent[s][r]) for s in range(d) for r in range(d) if s != r)
    assert all(v.moves == crossing for v in views)


def test_composition_checks_its_ends():
    a = Rearrangement.from_rank_of(np.array([0, 1, 1]), np.array([2, 1]))
    with pytest.raises(ValueError, match="cannot compose"):
        a.then(Rearrangement.from_rank_of(np.array([0, 1, 1]), np.array([2, 1])))


def round_trip(world, num_items: int, seed: int) -> dict[str, bool]:
    rng = np.random.default_rng(seed)
    d = world.world_size
    sizes = np.bincount(rng.integers(0, d, num_items), minlength=d).astype(np.int64)
    move = Rearrangement.from_rank_of(rng.integers(0, d, num_items), sizes)
    rows = rng.integers(0, 6, num_items)
    rows[rng.random(num_items) < 0.2] = 0
    there = move.exchange(rows, world.rank)
    back = move.inverse.exchange(rows[move.order], world.rank)
    generator = torch.Generator().manual_seed(world.rank)
    fine = {}
    for name, shape, dtype in (("uint8", (7,), torch.uint8), ("float32", (3, 2), torch.float32),
                               ("bfloat16", (), torch.bfloat16)):
        values = torch.rand((len(there.send_index), *shape), generator=generator) * 255
        x = values.to(dtype)
        moved = exchange_rows(x, there)
        assert len(moved) == len(there.recv_index) and moved.dtype == dtype
        fine[name] = torch.equal(exchange_rows(moved, back), x)
        total = moved.double().sum().reshape(1), x.double().sum().reshape(1)
        for t in total:
            dist.all_reduce(t)
        fine[f"{name} total"] = bool(torch.isclose(*total, rtol=1e-12))
    return fine


@pytest.mark.dist
@pytest.mark.parametrize("num_items", [
    pytest.param(0, marks=pytest.mark.slow), pytest.param(5, marks=pytest.mark.slow), 60])
def test_round_trip_on_eight_ranks(num_items):
    for rank, fine in enumerate(run_ranks(round_trip, 8, num_items, 3)):
        assert all(fine.values()), (rank, fine)


def gradient_of_exchange(world) -> tuple[float, bool]:
    """Largest error of a gradient; whether rows arrive in another order than they are kept in."""
    rng = np.random.default_rng(1)
    sizes = np.full(world.world_size, 4)
    before, after = (Rearrangement.from_rank_of(
        rng.integers(0, world.world_size, sizes.sum()), sizes) for _ in range(2))
    rows = rng.integers(0, 5, sizes.sum())
    move = before.inverse.then(after)  # as features travel: what comes is put in another order
    exchange = move.exchange(rows[before.order], world.rank)
    x = torch.randn(len(exchange.send_index), 3, dtype=torch.float64, requires_grad=True)
    (exchange_rows(x, exchange) ** 2).sum().backward()
    error = float((x.grad - 2 * x).abs().max()) if len(x) else 0.0
    return error, bool((np.diff(exchange.recv_index) < 0).any())


@pytest.mark.dist
def test_gradients_return_to_their_rows():
    errors, reordered = zip(*run_ranks(gradient_of_exchange, 4), strict=True)
    assert max(errors) == 0.0 and any(reordered)


def test_gradients_of_a_row_of_many_ranks_are_not_rounded_one_by_one():
    """In bfloat16 256 and 1 are 256."""
    found = _summed(torch.ones(300, 1).bfloat16(), torch.zeros(300).long(), [1] * 300, 1)
    assert found.dtype is torch.bfloat16 and float(found) == 300


def sent_bytes(world) -> list:
    """Two items to every rank; the first one of rank 1's is not there."""
    d, r = world.world_size, world.rank
    move = Rearrangement.from_rank_of(np.tile(np.repeat(np.arange(d), 2), d), np.full(d, 2 * d))
    items = [lambda k=k: None if (r, k % 2) == (1, 0) else np.full(3 * r + k, 10 * r + k, np.uint8)
             for k in range(2 * d)]
    came = exchange_bytes(items, move, r, gloo_group(range(d), 60.0))
    return [x.tolist() if isinstance(x, np.ndarray) else x for x in came]


@pytest.mark.dist
def test_an_item_that_its_sender_lacks_shifts_no_other():
    for rank, came in enumerate(run_ranks(sent_bytes, 3)):
        want = [[10 * r + k] * (3 * r + k) for r in range(3) for k in (2 * rank, 2 * rank + 1)]
        want[2] = None
        want[2 * rank: 2 * rank + 2] = [2 * rank, 2 * rank + 1]  # stay: their places
        assert came == want


class Group(dist.ProcessGroupGloo):
    """That of rank 7 in a world that is not there: it gets threes."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), 0, 1, timedelta(seconds=60))
        self.sent: list = []

    def rank(self) -> int:
        return 7

    def send(self, parts, rank, tag):
        self.sent.append((rank, parts[0].tolist()))
        return SimpleNamespace(wait=lambda: None)

    def recv(self, parts, rank, tag):
        parts[0][:] = 3
        return SimpleNamespace(wait=lambda: None)


def test_bytes_between_few_of_many_ranks_take_no_call_for_each_rank():
    d, group, calls = 2560, Group(), []
    move = Rearrangement(np.roll(np.arange(d), 1), *[np.ones(d, np.int64)] * 2)
    sys.setprofile(lambda frame, event, arg: calls.append(event))
    came = exchange_bytes([lambda: np.arange(5, dtype=np.uint8)], move, 7, group)
    sys.setprofile(None)
    assert [x.tolist() for x in came] == [[3] * 3]
    assert group.sent == [(8, [5]), (8, [0, 1, 2, 3, 4])] and len(calls) < d


def wrong_number_of_rows(world) -> str:
    move = Rearrangement.from_rank_of(np.array([1, 0]), np.array([1, 1]))
    exchange = move.exchange(np.array([2, 3]), world.rank)
    with pytest.raises(ValueError, match="rows and lengths of a segment disagree"):
        exchange_rows(torch.zeros(9, 2), exchange)
    return "raised"


@pytest.mark.dist
def test_rows_that_change_places_on_their_rank_need_no_collective():
    move = Rearrangement(np.array([2, 0, 1]), np.array([3]), np.array([3]))
    found = exchange_rows(torch.arange(6), move.exchange(np.array([1, 2, 3]), 0))
    assert found.tolist() == [3, 4, 5, 0, 1, 2]


def test_wrong_number_of_rows_is_an_error_before_any_collective():
    assert run_ranks(wrong_number_of_rows, 2) == ["raised"] * 2


def test_groups_of_nodes_are_made_by_one_collective_of_nccl(monkeypatch):
    """dist.new_group would make one of all ranks for each node."""
    asked = []
    monkeypatch.setattr(dist, "split_group", lambda **how: asked.append(how["split_ranks"]))
    node_group([range(2), range(2), range(2, 3)], torch.device("cuda"), 9.0)
    assert asked == [[[0, 1], [2]]]
