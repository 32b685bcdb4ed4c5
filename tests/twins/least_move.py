"""Slow twin of `orchmllm._core.least_move`: the same steps on plain lists. What a unit (a rank, or
a node) holds is looked up anew for every trade. See cpp/least_move.hpp and docs/balancing.md.

Operations are counted as in the core: where they run out, both stop at the same trade.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction

import numpy as np

from tests.twins.core import greedy, lower_bound, near_home, nearer_home

NO_LIMIT = 2**63 - 1
TOLERANCES = (.001, .002, .005, .01, .02, .05, .1, .2, .5, 1)
ROUNDS, FEW = 8, 4096
PARTNERS, REFUSALS = 24, 16
BUNDLED = 24  # items of a unit that bundles are made of
MANY = 512  # bundles, to which no item is added any more
SINGLE, PAIRS, HEAVY, BUNDLES, WHAT_FITS = range(5)
HOME, PLAN, GREEDY = range(3)  # what an attempt starts from
Item = tuple[int, int]  # (weight, id)


class Placement:
    """Which rank every item is on, and what that makes of the ranks."""

    def __init__(self, weight: list[int], home: list[int], price: list[int], num_ranks: int,
                 width: int, rank_of: list[int], cap: int, operations: int, held: list[int]):
        self.weight, self.home, self.price, self.rank_of = weight, home, price, rank_of
        self.num_ranks, self.width, self.cap, self.operations = num_ranks, width, cap, operations
        self.ascending = sorted((w, i) for i, w in enumerate(weight) if w > 0)
        self.total = sum(weight)
        self.typical = max(1, self.total // max(1, len(self.ascending)))
        self.send_limit = self.receive_limit = NO_LIMIT
        self.load = list(held)
        for w, rank in zip(weight, rank_of, strict=True):
            self.load[rank] += w

    def move(self, item: Item, rank: int) -> None:
        self.load[self.rank_of[item[1]]] -= item[0]
        self.load[rank] += item[0]
        self.rank_of[item[1]] = rank

    def cost(self, item: Item) -> int:
        return self.price[item[1]] if self.price else item[0]

    def foreign(self, item: Item, rank: int) -> bool:
        return self.home[item[1]] // self.width != rank // self.width

    def moved(self) -> Iterator[Item]:
        """Items on another node than their home."""
        return (item for item in self.ascending if self.foreign(item, self.rank_of[item[1]]))

    def may_receive(self, rank: int, items: Sequence[Item]) -> bool:
        """As far as the limit goes; items of its own node always, if all are."""
        if self.receive_limit == NO_LIMIT:
            return True
        extra = sum(self.cost(i) for i in items if self.foreign(i, rank))
        return extra == 0 or extra <= self.receive_limit - self.received(rank)

    def received(self, rank: int) -> int:
        return sum(self.cost(i) for i in self.moved() if self.rank_of[i[1]] == rank)

    def may_send(self, items: Sequence[Item]) -> bool:
        for rank in {self.home[i[1]] for i in items} if self.send_limit < NO_LIMIT else ():
            sent = sum(self.cost(i) for i in self.moved() if self.home[i[1]] == rank)
            extra = sum(self.cost(i) for i in items if self.home[i[1]] == rank)
            if extra > self.send_limit - sent:
                return False
        return True

    def roomiest(self, ranks: range, item: Item) -> int:
        """The least loaded that may receive the item, else the one that has received least."""
        def key(rank: int) -> tuple[bool, int]:
            received = self.received(rank)
            full = self.cost(item) > self.receive_limit - received
            return full, received if full else self.load[rank]
        return min(ranks, key=key)

    def spend(self, operations: int) -> bool:
        self.operations -= operations
        return self.operations >= 0


class Trading:
    """Units of `width` ranks above their cap trade with units below it."""

    def __init__(self, s: Placement, width: int, cap: int,
                 takes_part: Callable[[int], bool] = lambda _: True):
        self.s, self.width, self.cap, self.takes_part = s, width, cap, takes_part
        self.kept_free: dict[int, int] = {}  # by unit: room that counts as load
        self.first_pass = [0 if width > 1 else 2] * -(-s.num_ranks // width)  # of give(), by unit

    def ranks(self, unit: int) -> range:
        return range(unit * self.width, min(self.s.num_ranks, (unit + 1) * self.width))

    def items(self, unit: int) -> list[Item]:
        return [item for item in self.s.ascending if self.takes_part(item[1])
                and self.s.rank_of[item[1]] // self.width == unit]

    def excess(self, unit: int) -> int:
        load = self.kept_free.get(unit, 0) + sum(self.s.load[rank] for rank in self.ranks(unit))
        return max(load - self.cap * len(self.ranks(unit)), -self.s.total)

    def even(self, units: Sequence[int],
             ways: Sequence[int] = (SINGLE, PAIRS, HEAVY, BUNDLES), at_once: bool = False) -> bool:
        """The fullest trades first; False if nothing helped one, with `at_once` then and there."""
        if not self.s.spend(64 * len(units)):
            return False
        slack = -sum(self.excess(u) for u in units)
        self.waste = max(0, slack // (2 * len(units)))
        helpless: set[int] = set()
        while True:
            ranked = sorted((self.excess(u), u) for u in units if u not in helpless)
            if not ranked or ranked[-1][0] <= 0:
                return not helpless
            if not self.s.spend(64):
                return False
            if not self.relieve(ranked, ways):
                if at_once:
                    return False
                helpless.add(ranked[-1][1])

    def relieve(self, ranked: list[tuple[int, int]], ways: Sequence[int]) -> bool:
        need, a = ranked[-1]
        step = max(0, -need - ranked[0][0]) // PARTNERS
        for way in ways:
            if self.s.operations < 0:
                return False
            outs = self.bundles(self.items(a), way) if way in (PAIRS, BUNDLES) else []
            if outs is None:
                return False
            last = (-NO_LIMIT, 0)
            for _ in range(PARTNERS):
                last = next((unit for unit in ranked if unit > last), (0, 0))
                if last[0] >= 0:
                    break
                if self.trade(a, last[1], need, -last[0], way, outs):
                    return True
                last = (last[0] + step, last[1])
        return False

    def trade(self, a: int, b: int, need: int, room: int, way: int, outs: list) -> bool:
        if not self.s.spend(16):
            return False
        amount = min(need, room)
        if way == WHAT_FITS:
            return self.give(a, b, amount, 0)
        if way == SINGLE and amount > self.s.typical:
            return self.give(a, b, amount, self.s.typical)
        if way == SINGLE and self.width > 1 and room < need // 4:
            return False
        low = need if need <= room else max(1, room - self.waste)
        mine, theirs = self.items(a), self.items(b)
        if way == SINGLE:
            found = (self.s.spend(len(theirs) + 16)
                     and self.match([(i,) for i in mine], [()] + [(i,) for i in theirs], low, room,
                                    a, b))
        elif way == HEAVY:
            found = self.heavy(mine, theirs, 1 + amount // 2, room)
        else:
            backs = self.bundles(theirs, way)
            found = (backs is not None and self.s.spend(len(outs) + len(backs))
                     and (self.match(outs, backs, low, room, a, b, lightest=True)
                          or self.match(outs, backs, 1 + amount // 2, room, a, b, lightest=True)))
        if not found:
            return False
        for unit, items in ((b, found[0]), (a, found[1])):
            for item in items:
                self.move(item, unit)
        for items, before, after in ((found[0], mine, theirs), (found[1], theirs, mine)):
            self.pass_on(items, before, after)
        return True

    def match(self, outs, backs, low: int, high: int, a: int, b: int, lightest: bool = False):
        """The first (out, back), by the weight going back, whose difference is from low to high:
        of all out, or only the lightest. None after so many refusals."""
        refused = 0
        for back in backs:
            returned = sum(w for w, _ in back)
            for out in outs:
                if low <= sum(w for w, _ in out) - returned <= high:
                    if self.allows(a, b, out, back):
                        return out, back
                    refused += 1
                    if refused == REFUSALS or not self.s.spend(8):
                        return None
                    if lightest:
                        break
        return None

    def allows(self, a: int, b: int, out: Sequence[Item], back: Sequence[Item]) -> bool:
        if self.width > 1:
            return self.s.may_send(out) and self.s.may_send(back)
        return self.s.may_receive(b, out) and self.s.may_receive(a, back)

    def heavy(self, mine: list[Item], theirs: list[Item], low: int, high: int):
        """One item of more than `high` against several, the heaviest that fit first."""
        for k, item in enumerate(mine):
            if item[0] <= high or (k > 0 and mine[k - 1][0] == item[0]):
                continue
            if not self.s.spend(len(theirs) + 8):
                return None
            back: list[Item] = []
            for other in reversed(theirs):
                left = item[0] - sum(w for w, _ in back)
                if left > high and other[0] <= left - low:
                    back.insert(0, other)
            if item[0] - sum(w for w, _ in back) <= high:
                return (item,), back
        return None

    def bundles(self, items: list[Item], way: int) -> list[tuple[Item, ...]] | None:
        """Of up to two items, or of any number; one of each weight, ascending. None where
        operations ran out."""
        if way == PAIRS:
            items_of = [i for k, i in enumerate(items) if k < 2 or items[k - 2][0] != i[0]]
            most, count = 2, min(BUNDLED // 2, len(items_of))
        else:
            items_of, most, count = items, BUNDLED, min(BUNDLED, len(items))
        found: dict[int, tuple[Item, ...]] = {0: ()}
        for k in range(count):
            if len(found) >= MANY:
                break
            if not self.s.spend(2 * len(found)):
                return None
            item = items_of[k * len(items_of) // count]
            for weight, bundle in sorted(found.items()):
                if len(bundle) < most:
                    found.setdefault(weight + item[0], (*bundle, item))
        if not self.s.spend(len(items)):
            return None
        return [bundle for _, bundle in sorted(found.items())]

    def give(self, a: int, b: int, amount: int, enough: int) -> bool:
        """The heaviest that fit, until `enough` or less is missing; with 0 one item."""
        s, mine, theirs = self.s, self.items(a), self.items(b)
        given: list[Item] = []
        for care in range(self.first_pass[a], 3):
            scanned, had = 0, len(given)
            for item in reversed(mine):
                if amount <= enough:
                    break
                scanned += 1
                full = s.load[s.rank_of[item[1]]] - item[0] >= self.cap - s.typical
                if (item[0] <= amount and item not in given
                        and (self.width > 1 or s.may_receive(b, [item]))
                        and (care == 2 or s.may_send([item])) and (care > 0 or full)):
                    self.move(item, b)
                    given.append(item)
                    amount = amount - item[0] if enough else 0
            s.spend(4 * scanned)
            if len(given) == had and care == self.first_pass[a] and enough > 0 and care < 2:
                self.first_pass[a] += 1
        if given:
            self.pass_on(sorted(given), mine, theirs)
        return bool(given)

    def move(self, item: Item, unit: int) -> None:
        rank = self.s.roomiest(self.ranks(unit), item) if self.width > 1 else unit
        self.s.move(item, rank)

    def pass_on(self, items: Sequence[Item], mine: list[Item], theirs: list[Item]) -> None:
        """Counts what it costs to move items from one sorted list to another."""
        tail = sum(item >= items[0] for item in mine) if items else 0
        self.s.spend((len(mine) + len(theirs)) // 8 if len(items) <= 2 else tail + len(theirs))
        for item in items:
            mine.remove(item)
            theirs.append(item)


class PriceLimit:
    """The price per weight up to which there is about twice the weight that has to move."""

    def __init__(self, weight: list[int], price: list[int], surplus: int):
        self.weight, self.price = weight, price
        stride = max(1, len(weight) // 4096)
        sample = [i for i in range(0, len(weight), stride) if weight[i] > 0]
        self.dearest, held = -1, 0
        for i in sorted(sample, key=lambda i: (Fraction(price[i], weight[i]), i)):
            self.dearest = i
            held += weight[i] * stride
            if held >= 2 * surplus:
                break

    def covers(self, i: int) -> bool:
        d = self.dearest
        return d >= 0 and self.price[i] * self.weight[d] <= self.price[d] * self.weight[i]


def even_share(items: list[int], surplus: int) -> int:
    """The least limit under which ranks with items of so much can send `surplus` together; where
    that is more than all of them, what all can send."""
    if surplus <= 0:
        return 0
    for k, load in enumerate(sorted(items)):
        share = surplus // (len(items) - k)
        if load >= share:
            return share
        surplus -= load
    return max(items)


class Search:
    """See cpp/least_move.hpp."""

    def __init__(self, weight, home, price, num_ranks: int, ranks_per_node: int, cap: int, held):
        self.weight, self.home = [int(w) for w in weight], [int(h) for h in home]
        self.price, self.held = [int(p) for p in price], [int(h) for h in held] or [0] * num_ranks
        self.num_ranks, self.cap, self.node_width = num_ranks, cap, min(ranks_per_node, num_ranks)
        self.width = num_ranks if ranks_per_node == 1 else self.node_width
        self.num_nodes = -(-num_ranks // self.width)
        self.n = sum(w > 0 for w in self.weight)
        self.operations = min(32000000, 4000 * self.n) + 80 * self.n
        self.best, self.high, self.spent = self.home, self.max_load(self.home), 0
        self.moved, self.crowding = NO_LIMIT, 0
        self.greedy: list[int] = []

    def run(self) -> list[int]:
        if self.high <= self.cap:
            return self.best
        bound = lower_bound(np.array(self.weight), self.num_ranks, self.held)
        caps = [bound + int(bound * tolerance) for tolerance in TOLERANCES]
        cap = max(self.cap, caps[0])
        self.plan_for(cap)
        for c in reversed(caps):
            if c < cap and self.has_to_move(c) < self.moved:
                self.plan_for(c)
        for c in caps:
            if c > cap and self.moved == NO_LIMIT:
                self.plan_for(c)
        if self.n <= FEW and self.greedy_load() <= cap:
            self.offer(self.greedy)
        if self.high > cap:
            self.match_greedy()
        if self.high > self.cap:
            self.tighten(max(self.cap if self.cap < caps[0] else bound, self.crowding))
        if self.high > self.cap:
            self.match_greedy()
        return self.best

    def max_load(self, rank_of: list[int]) -> int:
        load = list(self.held)
        for weight, rank in zip(self.weight, rank_of, strict=True):
            load[rank] += weight
        return max(load)

    def away(self, item: int, rank: int) -> bool:
        return self.home[item] // self.node_width != rank // self.node_width

    def has_to_move(self, cap: int) -> int:
        width = self.node_width
        nodes = [sum(self.held[k:k + width]) for k in range(0, self.num_ranks, width)]
        for weight, home in zip(self.weight, self.home, strict=True):
            nodes[home // width] += weight
        return sum(max(0, load - cap * min(width, self.num_ranks - k * width))
                   for k, load in enumerate(nodes))

    def plan_for(self, cap: int) -> None:
        trial = list(self.home)
        if cap >= self.crowding:
            self.attempt(trial, cap, self.operations, HOME)
        if self.max_load(trial) <= cap:
            if 2 * self.offer(trial) <= 3 * self.has_to_move(cap):
                return
        elif self.crowding == 0:
            self.crowding = crowding_bound(self.weight, self.num_ranks)
        if cap < self.crowding or self.greedy_load() > cap + cap // 1024:
            return
        plan = self.near_greedy(cap)
        if self.max_load(plan) <= cap:
            self.offer(plan)

    def near_greedy(self, cap: int) -> list[int]:
        trial = nearer_home(self.greedy, self.weight, self.home, self.node_width)
        self.spent += 8 * self.n
        if self.max_load(trial) > cap:
            self.attempt(trial, cap, self.operations, GREEDY)
        return trial

    def offer(self, rank_of: list[int]) -> int:
        moved = sum(w for i, w in enumerate(self.weight) if self.away(i, rank_of[i]))
        if moved < self.moved:
            self.moved = moved
            self.take(rank_of)
        return moved

    def take(self, rank_of: list[int]) -> None:
        self.best, self.high = list(rank_of), self.max_load(rank_of)

    def attempt(self, trial: list[int], cap: int, operations: int, start: int = PLAN) -> int:
        """Operations that are left."""
        s = Placement(self.weight, self.home, self.price, self.num_ranks, self.width, trial, cap,
                      operations - 4 * self.n, self.held)
        slack = max(0, cap * self.num_ranks - s.total - sum(self.held))
        room = min(slack // 2 // self.num_ranks, s.typical // 64)

        # What may move is settled when a Trading begins.
        def trading(width: int, target: int, always: bool = False) -> Trading:
            stays = set() if start == HOME or always else {
                i for i, rank in enumerate(s.rank_of) if self.away(i, rank)}
            return Trading(s, width, target, lambda i: i not in stays)

        target = cap if start == GREEDY else cap - room
        if start == HOME and self.num_nodes > 1:
            self.limit_moves(s, target)
        nodes = trading(self.width, target)

        def even() -> list[int]:
            nodes.even(range(self.num_nodes))
            ranks = trading(1, cap, always=self.node_width > 1)
            return [k for k in range(self.num_nodes) if not ranks.even(self.ranks(k))]

        crowded, left = even(), slack // 4
        for _ in range(ROUNDS):
            made = False
            for k in crowded:
                more = 8 * room + sum(max(0, s.load[r] - cap) for r in self.ranks(k))
                if self.num_nodes > 1 and more <= left:
                    left -= more
                    nodes.kept_free[k] = nodes.kept_free.get(k, 0) + more
                    made = True
            if not made:
                break
            crowded = even()
        s.receive_limit = NO_LIMIT
        if crowded:
            trading(1, cap).even(range(self.num_ranks), at_once=True)
        self.spent += operations - s.operations
        return s.operations

    def ranks(self, node: int) -> range:
        return range(node * self.width, min(self.num_ranks, (node + 1) * self.width))

    def limit_moves(self, s: Placement, target: int) -> None:
        """To an even share of the largest surplus; what is cheap to move goes at once."""
        means, widths, share = [], [], 0
        for k in range(self.num_nodes):
            ranks = range(k * self.width, min(self.num_ranks, (k + 1) * self.width))
            means.append(sum(s.load[r] // len(ranks) for r in ranks))
            widths.append(len(ranks))
            share = max(share, even_share([s.load[r] - self.held[r] for r in ranks],
                                          (means[-1] - target) * len(ranks)))
        most, room = max(0, max(means) - target), max(0, target - min(means))
        room = max(most, min(room, most + most // 2))

        def cost_of(weight: int) -> int:
            return (min(NO_LIMIT, sum(self.price) * weight // max(1, s.total)) if self.price
                    else weight)

        s.send_limit = cost_of(max(share + share // 16, s.typical))
        s.receive_limit = cost_of(max(room + room // 16, s.typical))
        if self.price:
            surplus = sum(max(0, m - target) * w for m, w in zip(means, widths, strict=True))
            cheap = PriceLimit(self.weight, self.price, surplus)
            Trading(s, self.width, target, cheap.covers).even(range(self.num_nodes), (WHAT_FITS,))

    def go_on(self, cap: int, operations: int) -> int:
        trial = list(self.best)
        left = self.attempt(trial, cap, operations)
        if self.max_load(trial) < self.high:
            self.take(trial)
        return left

    def tighten(self, cap: int) -> None:
        low, fine, operations = cap, 1 + cap // 65536, self.operations
        while self.high > max(cap, self.cap) and operations > 0:
            near = self.high - low <= fine
            if near and low > cap:
                return
            following = cap if near else low + (self.high - low) // 2
            part = operations // 4
            operations -= part - self.go_on(following, part)
            if near:
                return
            if self.high > following:
                low = following

    def match_greedy(self) -> None:
        if self.high > self.greedy_load():
            self.go_on(self.greedy_load(), self.operations)
        if self.high > self.greedy_load():
            self.take(self.greedy)

    def greedy_load(self) -> int:
        if not self.greedy:
            self.spent += 60 * self.n
            home, weight = np.array(self.home, np.int64), np.array(self.weight)
            batch = greedy(weight, home, self.num_ranks, self.held)
            rank_of_batch = (range(self.num_ranks) if any(self.held) else
                             near_home(home, batch, weight, self.num_ranks, self.width))
            self.greedy = [int(rank_of_batch[b]) if w else h
                           for b, w, h in zip(batch, self.weight, self.home, strict=True)]
        return self.max_load(self.greedy)


def crowding_bound(weight: list[int], num_ranks: int) -> int:
    """Of q * num_ranks + 1 items some rank gets q + 1."""
    heaviest = sorted(weight, reverse=True)
    return max((sum(heaviest[: q * num_ranks + 1][-q - 1:])
                for q in range(1, -(-len(weight) // num_ranks)) if q * num_ranks < len(weight)),
               default=0)


def least_move_counted(
    weight: np.ndarray, home: np.ndarray, move_cost: np.ndarray, num_ranks: int,
    ranks_per_node: int, cap: int, held: Sequence[int] = (),
) -> tuple[np.ndarray, int]:
    """(rank_of (n,) with loads at or near the cap and little movement, the operations that it
    took); move_cost and held may be empty."""
    search = Search(weight, home, move_cost, num_ranks, ranks_per_node, cap, held)
    return np.array(search.run(), np.int64), search.spent
