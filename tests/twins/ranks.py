"""Stages 2 and 3 of the slow twin of `least_move`: ranks trade until none is above the cap. See
cpp/even_ranks.hpp, cpp/trade.hpp and cpp/deal.hpp."""

from __future__ import annotations

from bisect import insort

from tests.twins.pick import (
    INFINITE,
    AnyItem,
    Item,
    Picker,
    Placement,
    ReceiveRule,
    at_least,
    find_pair,
)

WALKS = 400


class EvenRanks:
    """Stages 2 and 3: ranks above the cap trade with ranks below it, in their node, then anywhere.
    """

    def __init__(self, s: Placement):
        self.s = s
        self.lists: list[list[Item]] = [[] for _ in range(s.num_ranks)]
        for i in s.ascending:
            if s.weight[i] > 0:
                self.lists[s.rank_of[i]].append((s.weight[i], i))
        self.lightest = min((w for w in s.weight if w > 0), default=0)
        self.walks = self.turn = 0
        self.half = s.budget.left // 2
        done = []
        for node in s.nodes:
            if s.exact:
                self.settle_heavy(s.ranks(node))
            done.append(self.even(s.ranks(node)))
        s.receive_limit = INFINITE
        self.walks = WALKS
        if not all(done):
            self.even(range(s.num_ranks))

    def settle_heavy(self, ranks: range) -> None:
        """Ranks with room for one item at most beside their heaviest get the best one first."""
        s = self.s
        rooms = ((s.cap - s.base[r] - self.lists[r][-1][0], r) for r in ranks if self.lists[r])
        heavy = sorted((room, r) for room, r in rooms if room < 2 * self.lightest)
        others = sorted(set(ranks) - {r for _, r in heavy})
        if not others or all(s.load[r] <= s.cap for r in ranks):
            return
        for room, r in heavy:
            if s.budget.spend(len(others)):
                self.settle(r, room, others)

    def settle(self, rank: int, room: int, others: list[int]) -> None:
        s = self.s

        def beside(r):
            return max((item for item in self.lists[r] if item[0] <= room), default=(0, -1))

        heaviest = self.lists[rank].pop()
        owner = max([rank, *others], key=lambda r: beside(r)[0])
        item, target = beside(owner), min(others, key=lambda r: s.load[r])
        rest = s.load[rank] - s.base[rank] - heaviest[0] - (item[0] if owner == rank else 0)
        if s.load[target] + rest <= max(s.cap, s.load[rank]):
            if item[0]:
                self.lists[owner].remove(item)
            passed_on, self.lists[rank] = self.lists[rank], []
            for other in passed_on:
                self.put(other, target)
            if item[0]:
                self.put(item, rank)
        self.put(heaviest, rank)

    def even(self, ranks: range) -> bool:
        s = self.s
        slack = sum(s.cap - s.load[r] for r in ranks)
        self.waste = max(0, slack // (2 * len(ranks)))
        while True:
            ranked = sorted((s.load[r], r) for r in ranks)
            if ranked[-1][0] <= s.cap:
                return True
            levels = (0, 1, 2, 6, 3, 4, 5) if s.budget.left < self.half else range(7)
            levels = levels if s.budget.left >= 0 else (0,)
            if not any(self.step(ranked, level) for level in levels):
                self.walks -= 1
                if self.walks < 0 or not self.walk(ranked[-1][1]):
                    return False

    def walk(self, a: int) -> bool:
        """A swap with a rank of the node that lowers no load but may suit others."""
        s, node = self.s, self.s.ranks(a // self.s.width)
        need = s.load[a] - s.cap
        for _ in node:
            b = self.next_of(node)
            if b == a or s.load[b] > s.cap:
                continue
            trade = self.swap(self.lists[a], self.lists[b], 1, need, AnyItem(), AnyItem())
            if trade:
                self.apply(trade, a, b)
                return True
        light = at_least(self.lists[a], need)
        for _ in node if light < len(self.lists[a]) else ():
            b = self.next_of(node)
            if (len(self.lists[b]) > 2 * len(self.lists[a])
                    and s.load[b] + self.lists[a][light][0] < s.load[a]):
                self.put(self.lists[a].pop(light), b)
                return True
        return False

    def next_of(self, node: range) -> int:
        self.turn += 1
        return node[(self.turn - 1) % len(node)]

    def step(self, ranked: list[tuple[int, int]], level: int) -> bool:
        s, limit = self.s, (16, 8, 3, 3, 16, 16, 3)[level]
        few = (1, 1, 2, 2, 1, 1, 2)[level]
        partners = [b for load, b in ranked[:-1] if load < s.cap
                    and (len(self.lists[b]) > few or s.cap - load >= self.lightest)]
        return any(self.relieve(ranked[-1][1], b, level) for b in partners[:limit])

    def put(self, item: Item, rank: int) -> None:
        self.s.move(item, rank)
        insort(self.lists[rank], item)

    def relieve(self, a: int, b: int, level: int) -> bool:
        s = self.s
        need, room = s.load[a] - s.cap, s.cap - s.load[b]
        low, high = need if need <= room else max(1, room - self.waste), room
        progress = False
        if level == 0:
            moved: list[Item] = []
            picker = Picker(self.lists[a], low, high, s.budget, moved)
            picker.take_sum(s.typical, ReceiveRule(s, b))
            low, high, progress = picker.low, picker.high, bool(moved)
            for item in moved:
                self.put(item, b)
            if low <= 0:
                return True
        elif level in (2, 6):
            apart = a // s.width != b // s.width
            return apart == (level == 6) and (s.exact or not apart) and (
                self.deal(a, b, low, high, 16) or self.deal(a, b, low, high, INFINITE))
        elif level >= 4:
            low = (min(need, room) + 1) // 2 if level == 4 else 1
        for search in ((self.swap,), (self.uneven,), (), (self.double,), (self.swap, self.uneven),
                       (self.swap, self.uneven))[level]:
            trade = search(self.lists[a], self.lists[b], low, high,
                           ReceiveRule(s, b), ReceiveRule(s, a))
            if trade:
                self.apply(trade, a, b)
                return True
        return self.bulk(a, b, low, high) if level >= 4 else progress

    def apply(self, trade: tuple[list[int], list[int]], a: int, b: int) -> None:
        out = [self.lists[a].pop(i) for i in sorted(trade[0], reverse=True)]
        back = [self.lists[b].pop(j) for j in sorted(trade[1], reverse=True)]
        for item in out:
            self.put(item, b)
        for item in back:
            self.put(item, a)

    def deal(self, a: int, b: int, low: int, high: int, most: int) -> bool:
        """Deals at most `most` items of each rank anew: a gives a sum inside the window, and of the
        first items that have one, keeps the least such."""
        x, y = self.lists[a], self.lists[b]
        if most != INFINITE and max(len(x), len(y)) <= most:
            return False  # all are dealt next
        mine, theirs = ([items[k * len(items) // count] for k in range(count)]
                        for items in (x, y) for count in [min(most, len(items))])
        pool, held, unit = mine + theirs, sum(w for w, _ in mine), self.s.unit
        low, high = held - high, held - low
        if low < 0 or high // unit >= 2**16:
            return False
        if not self.s.budget.spend(len(pool) * (high // unit // 64 + 1) // 4):
            return False
        sums = [1]  # bit k: k units can be reached with the items so far
        inside = range(-(-low // unit), high // unit + 1)
        for weight, _ in [*pool, (0, -1)]:
            target = next((k for k in inside if sums[-1] >> k & 1), None)
            if target is not None:
                break
            sums.append(sums[-1] | sums[-1] << weight // unit)
        else:
            return False
        for item in mine:
            x.remove(item)
        for item in theirs:
            y.remove(item)
        for before, item in reversed(list(zip(sums, pool, strict=False))):
            stays = not before >> target & 1
            target -= item[0] // unit if stays else 0
            self.put(item, a if stays else b)
        for item in pool[len(sums):]:
            self.put(item, b)
        return True

    def swap(self, x, y, low, high, out, back):
        if not self.s.budget.spend(len(x) + len(y)):
            return None
        for j, item in enumerate(y):
            i = at_least(x, item[0] + low)
            if i == len(x):
                return None
            if x[i][0] <= item[0] + high and out.admits(x[i]) and back.admits(item):
                return [i], [j]
        return None

    def uneven(self, x, y, low, high, out, back):
        for j, item in enumerate(y):
            if not self.s.budget.spend(len(x)):
                break
            pair = back.admits(item) and find_pair(x, low + item[0], high + item[0], out)
            if pair:
                return list(pair), [j]
        for i, item in enumerate(x):
            if not self.s.budget.spend(len(y)):
                break
            if item[0] - low < 0 or not out.admits(item):
                continue
            pair = find_pair(y, item[0] - high, item[0] - low, back)
            if pair:
                return [i], list(pair)
        return None

    def double(self, x, y, low, high, out, back):
        sweeps = 0
        for j in range(1, len(y)):
            for k in range(j):
                sweeps += 1
                if sweeps > 200 or not self.s.budget.spend(len(x)):
                    return None
                if not back.admits_both(y[k], y[j]):
                    continue
                both = y[j][0] + y[k][0]
                pair = find_pair(x, low + both, high + both, out)
                if pair:
                    return list(pair), [k, j]
        return None

    def bulk(self, a: int, b: int, low: int, high: int) -> bool:
        s, x, y = self.s, self.lists[a], self.lists[b]
        for i in range(at_least(x, high + 1), len(x)):
            if not s.budget.spend(len(y)):
                return False
            if i > 0 and x[i][0] == x[i - 1][0]:
                continue
            back: list[Item] = []
            picker = Picker(y, x[i][0] - high, x[i][0] - low, s.budget, back)
            picker.take_sum(s.typical, ReceiveRule(s, a))
            if picker.done:
                heavy = x.pop(i)
                for item in back:
                    self.put(item, a)
                self.put(heavy, b)
                return True
            for item in back:
                insort(y, item)
        return False
