"""Slow twin of `orchmllm._core.least_move`: minimal movement, in the order in which one would
explain it. See cpp/least_move.hpp for the idea of each stage, and tests/twins/core.py for the other
twins."""

from __future__ import annotations

import heapq
from math import gcd

import numpy as np

from tests.twins.bound import common_step, lower_bound
from tests.twins.core import greedy, near_home
from tests.twins.lift import Lift, may_fit
from tests.twins.pick import INFINITE, Budget, Item, Picker, Placement
from tests.twins.ranks import EvenRanks


def even_nodes(s: Placement) -> None:
    """Stage 1: nodes above their target give their surplus to nodes below it."""
    slack = s.cap * s.num_ranks - s.total
    if slack < 0:
        return
    reserve = min(slack // (1 if s.tight else 2) // s.num_ranks, s.typical // 8)
    surplus = {k: sum(s.load[r] for r in s.ranks(k)) - (s.cap - reserve) * len(s.ranks(k))
               for k in s.nodes}
    surplus = {k: 0 if v > 0 and max(s.load[r] for r in s.ranks(k)) <= s.cap else v
               for k, v in surplus.items()}
    over = sorted([-min(s.total, v), k] for k, v in surplus.items() if v > 0)
    under = sorted([-min(s.total, -v), k] for k, v in surplus.items() if v < 0)
    spare = max(0, -sum(surplus.values()))
    most_under = max((-(a // len(s.ranks(k))) for a, k in under), default=0)
    if over and under and spare:
        spare -= _level_rooms(under, -over[0][0], spare // 2)
        most_under = min(most_under, -(under[0][0] // len(s.ranks(under[0][1]))))
    most_over = max((-(a // len(s.ranks(k))) for a, k in over), default=0)
    s.send_limit = most_over + most_over // 16
    most = max(most_over, min(most_under, 2 * most_over))
    s.receive_limit = most + most // 16
    if not over or not under:
        return
    waste = min(s.total, spare // 2 // len(under))
    lists = [_cheap_and_rest(s, -amount, node) for amount, node in over]
    to = 0
    for source, (cheap, rest) in zip(over, lists, strict=True):
        while source[0] < 0 and to < len(under):
            if not _transfer(s, source, under[to], cheap, rest, reserve, waste):
                to += 1


def _level_rooms(under: list[list[int]], lowest: int, most: int) -> int:
    """Lowers the largest rooms (kept negative) to one level >= lowest, by at most `most` in all."""
    left, level = most, -under[0][0]
    while level > lowest and left > 0:
        same = sum(-room >= level for room, _ in under)
        following = max([lowest] + [-room for room, _ in under[same:]])
        drop = min(level - following, left // same)
        if drop == 0:
            break
        level, left = level - drop, left - drop * same
    for side in under:
        side[0] = max(side[0], -level)
    return most - left


def _cheap_and_rest(s: Placement, surplus: int, node: int) -> tuple[list[Item], list[Item]]:
    items = [(s.weight[i], i) for i in s.ascending
             if s.home[i] // s.width == node and s.weight[i] > 0]
    if not s.move_cost:
        return items, []
    heap = [(s.move_cost[i] / w, k) for k, (w, i) in enumerate(items)]
    heapq.heapify(heap)
    keep, held = set(), -(surplus // 4)
    while heap and held < surplus:
        k = heapq.heappop(heap)[1]
        keep.add(k)
        held += items[k][0]
    return ([item for k, item in enumerate(items) if k in keep],
            [item for k, item in enumerate(items) if k not in keep])


def _transfer(s, source, target, cheap, rest, reserve, waste) -> bool:
    """Moves items between two nodes, whose amounts are kept negative; False when the target takes
    no more."""
    give, extra = (len(s.ranks(k)) * reserve // 4 for k in (source[1], target[1]))
    finishes = -source[0] <= -target[0]
    low = -source[0] - give if finishes else -target[0] - waste
    moved: list[Item] = []
    left = _pick(s, low, -target[0] + extra, cheap, rest, moved)
    _receive(s, target[1], moved)
    source[0] = 0 if finishes and left <= 0 else source[0] + (low - left)
    target[0] += low - left
    return finishes and target[0] < 0 and left <= 0


class SendRule:
    """Items of ranks that send no more than the limit and, if wanted, stay about full."""

    def __init__(self, s: Placement, limit: int, only_full: bool = False):
        self.s, self.limit, self.only_full = s, limit, only_full

    def admits(self, item: Item) -> bool:
        s, rank = self.s, self.s.home[item[1]]
        return (s.sent[rank] + item[0] <= self.limit
                and (not self.only_full or s.load[rank] - item[0] >= s.cap - s.typical))

    def admits_both(self, a: Item, b: Item) -> bool:
        s, rank = self.s, self.s.home[a[1]]
        return rank != s.home[b[1]] or s.sent[rank] + a[0] + b[0] <= self.limit

    def take(self, item: Item) -> None:
        self.s.sent[self.s.home[item[1]]] += item[0]
        self.s.load[self.s.home[item[1]]] -= item[0]


def _pick(s, low, high, cheap, rest, moved) -> int:
    full, even = SendRule(s, s.send_limit, True), SendRule(s, s.send_limit)
    relaxed = SendRule(s, s.send_limit + s.send_limit // 16)
    any_ = SendRule(s, INFINITE)
    picker = Picker(cheap, low, high, s.budget, moved)
    picker.take_bulk(s.typical, full)
    if picker.done or picker.take_exact(full):
        return picker.low
    picker.take_bulk(s.typical, even)
    if picker.done or picker.take_exact(even) or picker.take_exact(relaxed):
        return picker.low
    wider = SendRule(s, s.send_limit + s.send_limit // 8)
    for items, rule in ((cheap, even), (rest, even), (cheap, wider), (cheap, any_), (rest, any_)):
        picker = Picker(items, picker.low, picker.high, s.budget, moved)
        picker.take_sum(s.typical, rule)
        if picker.done:
            break
    return picker.low


def _receive(s: Placement, node: int, moved: list[Item]) -> None:
    for item in sorted(moved, reverse=True):
        def key(rank, item=item):
            full = s.received[rank] + item[0] > s.receive_limit
            return full, s.received[rank] if full else s.load[rank]
        best = min(s.ranks(node), key=key)
        s.load[s.home[item[1]]] += item[0]
        s.move(item, best)


def least_move(
    weight: np.ndarray, home: np.ndarray, move_cost: np.ndarray, num_ranks: int,
    ranks_per_node: int, cap: int,
) -> np.ndarray:
    """rank_of (n,) with loads at or near the cap and little movement; move_cost may be empty."""
    weights, homes = [int(w) for w in weight], [int(h) for h in home]
    costs = [int(c) for c in move_cost]
    width = num_ranks if ranks_per_node == 1 else min(ranks_per_node, num_ranks)
    step, n = common_step(weights), len(weights)
    mean = -(-sum(weights) // num_ranks)
    best: list = [max(_loads(weights, homes, num_ranks)), homes]
    if best[0] <= cap:
        return np.array(homes, np.int64)
    budget = max(20000000, 450 * n)
    exact = cap <= lower_bound(weight, num_ranks)

    def tight(cap):
        return cap // step * step < mean

    def solve(s, between_nodes=True):
        nonlocal budget
        budget -= s.budget.left
        if between_nodes:
            even_nodes(s)
        EvenRanks(s)
        budget += s.budget.left
        keep_if_lower(s.rank_of)

    def keep_if_lower(rank_of):
        reached = max(_loads(weights, rank_of, num_ranks))
        if reached < best[0]:
            best[:] = [reached, rank_of]

    def attempt(target, start, between_nodes=True):
        share = budget // 6 if tight(target) else budget // 3 * 2
        solve(Placement(weights, start, costs, num_ranks, width, target, tight(target),
                        Budget(share), exact, max(1, gcd(*weights))), between_nodes)

    if step > 1 and (not exact or tight(cap)):
        for target in range(cap, cap // step * step + step if exact else cap + 1):
            if target < best[0] and may_fit(weights, step, target, num_ranks):
                lift = Lift(weights, homes, num_ranks, width, target, step)
                if lift.possible:
                    solve(Placement(lift.weight, lift.home, costs, num_ranks, width, lift.cap,
                                    False, Budget(budget // 3), exact, 1, lift.base))
    target = cap // step * step
    if tight(cap):
        target = target + step if exact else cap
    low = min(target, cap) - 1
    for _ in range(8):
        if best[0] <= cap or not low < target < best[0]:
            break
        attempt(target, homes)
        if exact and best[0] - low <= cap // 4000:
            break
        if not exact and tight(cap) and best[0] <= cap // step * step + step:
            break
        if best[0] > target:
            low = max(low, target)
        above = (low + low // 4000 // 2) // step * step + step
        target = above if not tight(low) and above < best[0] else low + (best[0] - low) // 2
    if best[0] > cap:
        batch = greedy(weight, home, num_ranks)
        rank_of_batch = near_home(home, batch, weight, num_ranks, width)
        start = [int(rank_of_batch[b]) if w else h
                 for b, w, h in zip(batch, weights, homes, strict=True)]
        keep_if_lower(start)
        budget = max(budget, 100 * n)
        attempt(cap, start, False)
    return np.array(best[1], np.int64)


def _loads(weights: list[int], rank_of: list[int], num_ranks: int) -> list[int]:
    load = [0] * num_ranks
    for weight, rank in zip(weights, rank_of, strict=True):
        load[rank] += weight
    return load
