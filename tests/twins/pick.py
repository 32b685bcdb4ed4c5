"""Parts of the twin of `least_move`: where items are, and how a sum of items is taken from a list.

Items are (weight, id) tuples in ascending lists; loads are Python integers. See cpp/placement.hpp
and cpp/pick.hpp.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

INFINITE = 2**63 - 1
Item = tuple[int, int]  # (weight, id)


def at_least(items: list[Item], weight: int) -> int:
    """Index of the first item with at least this weight."""
    return bisect_left(items, (weight, -1))


@dataclass
class Budget:
    left: int

    def spend(self, operations: int) -> bool:
        self.left -= operations
        return self.left >= 0


@dataclass
class Placement:
    """Where every item is, and what that makes of each rank. Loads, sent and received are per rank;
    sent and received count transfers between nodes only."""

    weight: list[int]
    home: list[int]
    move_cost: list[int]
    num_ranks: int
    width: int  # ranks per node
    cap: int
    tight: bool
    budget: Budget
    exact: bool = False  # the cap is the lower bound
    unit: int = 1  # all weights are multiples of it
    base: list[int] = field(default_factory=list)  # of each rank beside the items; empty: none
    rank_of: list[int] = field(init=False)
    send_limit: int = 0
    receive_limit: int = INFINITE

    def __post_init__(self) -> None:
        self.rank_of = list(self.home)
        self.base = self.base or [0] * self.num_ranks
        self.load = list(self.base)
        self.sent, self.received = [0] * self.num_ranks, [0] * self.num_ranks
        for weight, rank in zip(self.weight, self.home, strict=True):
            self.load[rank] += weight
        self.total = sum(self.load)
        positive = sum(weight > 0 for weight in self.weight)
        self.typical = max(1, sum(self.weight) // max(1, positive))
        self.ascending = sorted(range(len(self.weight)), key=lambda i: (self.weight[i], i))

    def ranks(self, node: int) -> range:
        return range(node * self.width, min(self.num_ranks, (node + 1) * self.width))

    @property
    def nodes(self) -> range:
        return range(-(-self.num_ranks // self.width))

    def foreign(self, item: Item, rank: int) -> bool:
        return self.home[item[1]] // self.width != rank // self.width

    def move(self, item: Item, to: int) -> None:
        source = self.rank_of[item[1]]
        for rank, sign in ((source, -1), (to, 1)):
            self.load[rank] += sign * item[0]
            if self.foreign(item, rank):
                self.received[rank] += sign * item[0]
        self.rank_of[item[1]] = to


class AnyItem:
    """A rule says which items may go, and of two such items whether both may; `take` hears of each
    that went."""

    def admits(self, item: Item) -> bool:
        return True

    def admits_both(self, a: Item, b: Item) -> bool:
        return True

    def take(self, item: Item) -> None:
        pass


class ReceiveRule:
    """Which items a rank may get: its own node's always, others while it has received little."""

    def __init__(self, s: Placement, rank: int):
        self.s, self.rank, self.taken = s, rank, 0

    def counted(self, item: Item) -> int:
        return item[0] if self.s.foreign(item, self.rank) else 0

    def fits(self, weight: int) -> bool:
        s = self.s
        return weight == 0 or s.received[self.rank] + self.taken + weight <= s.receive_limit

    def admits(self, item: Item) -> bool:
        return self.fits(self.counted(item))

    def admits_both(self, a: Item, b: Item) -> bool:
        return self.fits(self.counted(a) + self.counted(b))

    def take(self, item: Item) -> None:
        self.taken += self.counted(item)


def find_pair(items, low, high, rule, start=0):
    """(i, j), i < j, admitted and low <= sum <= high; one sweep of both ends. None if none."""
    i, j = start, len(items) - 1
    while i < j:
        total = items[i][0] + items[j][0]
        if total > high or not rule.admits(items[j]):
            j -= 1
        elif total < low or not rule.admits(items[i]):
            i += 1
        elif not rule.admits_both(items[i], items[j]):
            j -= 1
        else:
            return i, j
    return None


class Picker:
    """Empties `items` into `out` until the sum is inside [low, high]; low and high are what is
    left to take."""

    def __init__(self, items, low, high, budget, out):
        self.items, self.low, self.high, self.budget, self.out = items, low, high, budget, out

    @property
    def done(self) -> bool:
        return self.low <= 0

    def take(self, index, rule) -> None:
        item = self.items.pop(index)
        rule.take(item)
        self.out.append(item)
        self.low -= item[0]
        self.high -= item[0]

    def take_bulk(self, typical, rule) -> None:
        top = len(self.items)
        while top > 0 and self.low > 2 * typical:
            top = min(top, at_least(self.items, self.low - typical + 1))
            if top > 0:
                top -= 1
                if rule.admits(self.items[top]):
                    self.take(top, rule)

    def take_exact(self, rule) -> bool:
        items = self.items
        for i in range(at_least(items, self.low), len(items)):
            if items[i][0] > self.high:
                break
            if rule.admits(items[i]):
                self.take(i, rule)
                return True
        pair, third = find_pair(items, self.low, self.high, rule), None
        if pair is None and len(items) <= 128:
            third = at_least(items, self.high)
            for _ in range(64):
                if pair is not None or third == 0:
                    break
                if not self.budget.spend(len(items)):
                    return False
                third -= 1
                if rule.admits(items[third]):
                    pair = find_pair(items, self.low - items[third][0],
                                     self.high - items[third][0], rule, third + 1)
        if pair is None:
            return False
        self.take(pair[1], rule)
        self.take(pair[0], rule)
        if third is not None:
            self.take(third, rule)
        return True

    def take_sum(self, typical, rule) -> None:
        self.take_bulk(typical, rule)
        while not self.done and not self.take_exact(rule):
            fits = at_least(self.items, self.high + 1)
            while fits > 0 and not rule.admits(self.items[fits - 1]):
                fits -= 1
            if fits == 0:
                return
            self.take(fits - 1, rule)
