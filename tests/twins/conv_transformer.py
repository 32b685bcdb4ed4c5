"""Slow, obvious twin of policy `conv_transformer` of the C++ core (cpp/conv_transformer.hpp,
cpp/priced_conv.hpp)."""

from __future__ import annotations

import numpy as np

UNIT = 64  # price of one unit of weight
LARGEST = 2**44  # of costs: above it the core would overflow
PASSES, WORK = 48, 580_000
MOST_VALUES = 2**13
FIRST_STEP, LAST_STEP = 1024, 16384
TRIED = 3  # patterns that are built
REACH = 2  # values to each side that share a price's change


def conv_transformer(
    weight: np.ndarray, pad: np.ndarray, home: np.ndarray, num_ranks: int
) -> np.ndarray:
    """OrchMLLM Algorithm 5, repaired: small max of sum(weight) + count * longest pad."""
    rank_of = np.array(home, np.int64)
    items = sorted((i for i in range(len(weight)) if weight[i] > 0),
                   key=lambda i: (-weight[i], i))
    if not items:
        return rank_of
    mean = -(-sum(int(weight[i]) + int(pad[i]) for i in items) // num_ranks)
    least = max(mean, int(weight[items[0]]) + int(pad[items[0]]))
    batches = _longest_first(weight, pad, items, num_ranks, least)
    of_value: dict[int, list[int]] = {}
    for i in items:
        of_value.setdefault(int(weight[i]), []).append(i)
    pads = [max(int(pad[i]) for i in own) for own in of_value.values()]
    high = max(sum(int(weight[i]) for i in batch) + len(batch) * max(int(pad[i]) for i in batch)
               for batch in batches if batch)
    found = None
    if pads == sorted(pads, reverse=True):
        found = PricedConv(list(of_value), pads, [len(own) for own in of_value.values()],
                           num_ranks).run(max(least, next(iter(of_value)) + pads[0]), high)
    if found is not None:
        left = [iter(own) for own in of_value.values()]
        batches = [[next(left[k]) for k in batch] for batch in found]
    for rank, batch in enumerate(batches):
        rank_of[batch] = rank
    return rank_of


def _longest_first(
    weight: np.ndarray, pad: np.ndarray, items: list[int], num_ranks: int, low: int
) -> list[list[int]]:
    """Batches opened with the heaviest item left that take the heaviest that still fits, under
    about the lowest bound that does for num_ranks."""

    def fill(bound: int) -> list[list[int]] | None:
        left, batches = list(items), []
        while left and len(batches) < num_ranks:
            extra, room, batch = int(pad[left[0]]), bound, []
            for i in left:
                if int(weight[i]) + extra <= room:
                    batch.append(i)
                    room -= int(weight[i]) + extra
            chosen = set(batch)
            left = [i for i in left if i not in chosen]
            batches.append(batch)
        return None if left else batches

    step = max(1, low // 64)
    high = low + step
    while fill(high) is None:
        low, step = high + 1, 2 * step
        high = low + step
    while low < high and high - low > high >> 20:
        middle = low + (high - low) // 2
        if fill(middle) is not None:
            high = middle
        else:
            low = middle + 1
    return fill(high)


def _quotient(a: int, b: int) -> int:
    """a / b rounded towards zero, as in C++."""
    return a // b if a >= 0 else -(-a // b)


class PricedConv:
    """Batches of `value` indices (values descending), opened with the heaviest value left and
    filled by the pattern (count, lead) that loses least by prices, which passes adjust."""

    def __init__(self, value: list[int], pad: list[int], items: list[int], num_ranks: int):
        self.value, self.pad, self.items, self.num_ranks = value, pad, items, num_ranks
        self.work = 0

    def run(self, low: int, high: int) -> list[list[int]] | None:
        """Batches that cost less than `high`, if any are found."""
        if high >= LARGEST or low >= high or len(self.value) > MOST_VALUES:
            return None
        bound, best = max(low, high - 1 - high // FIRST_STEP), None
        self.start(high)
        for step in range(PASSES):
            if self.work >= WORK or low >= high:
                break
            batches = self.fill(bound)
            self.learn(batches, step)
            over = sum(n * (v + p)
                       for n, v, p in zip(self.left, self.value, self.pad, strict=True))
            if over:
                bound += over // self.num_ranks + 1
            else:
                best, high = [values for values, _, _ in batches], bound
                free = sum(room for _, _, room in batches)
                free += (self.num_ranks - len(batches)) * bound
                bound -= free // self.num_ranks + 1
            bound = min(max(bound, low), max(low, high - 1 - high // LAST_STEP))
        return best

    def heaviest(self, limit: int) -> int | None:
        """The first value <= limit of which an item is left."""
        return next((k for k, v in enumerate(self.value) if v <= limit and self.left[k]), None)

    def start(self, bound: int) -> None:
        self.left, self.price, self.highest = list(self.items), [], []
        for value, pad in zip(self.value, self.pad, strict=True):
            count, room = divmod(bound, value + pad)
            filler = self.heaviest(room - pad)
            loss = room if filler is None else room - self.value[filler] - self.pad[filler]
            self.highest.append(UNIT * loss // count)
            self.price.append(UNIT * loss * 9 // (10 * (count + (filler is not None))))
        self.lowest = -(UNIT * bound // 512)

    def worth(self, k: int) -> int:
        return UNIT * self.pad[k] + self.price[k]

    def fill(self, bound: int) -> list[tuple[list[int], int, int]]:
        """(values, loss, room) of each batch; self.left is what is left over."""
        self.left, batches = list(self.items), []
        last, pattern, accepted = None, (), 0
        while any(self.left) and len(batches) < self.num_ranks:
            first = self.heaviest(self.value[0])
            built = self.build(bound, *pattern) if first == last else None
            if built is None or built[1] > accepted:
                built, pattern = self.choose(bound, first)
                accepted = built[1] + UNIT * bound // 16384
            batches.append(built)
            last = first
            for k in built[0]:
                self.left[k] -= 1
        return batches

    def choose(self, bound: int, first: int):
        """The batch with the least loss among the best patterns, and its pattern."""
        least = max(1, bound // (self.value[first] + self.pad[first]))
        patterns = self.estimates(bound, first, least) + self.estimates(bound, first, least + 1)
        best = None
        for loss, *pattern in sorted(patterns, key=lambda p: p[0])[:TRIED] or [(0, 1, 1)]:
            if best and loss >= best[0][1]:
                break
            built = self.build(bound, *pattern)
            if not best or built[1] < best[0][1]:
                best = built, pattern
        return best

    def estimates(self, bound: int, first: int, count: int) -> list[tuple[int, int, int]]:
        """(loss, count, lead) if what shares the room left by the `lead` heaviest all has the
        heaviest value <= its share."""
        pad, longest, stride = self.pad[first], self.value[first], 1 + count // 12
        room, gain, out = bound - count * pad, 0, []
        heaviest = (k for k, n in enumerate(self.left) for _ in range(n))
        for lead, k in zip(range(1, count + 1), heaviest, strict=False):
            if self.value[k] > room:
                break
            self.work += 1
            room -= self.value[k]
            gain += self.worth(k)
            rest = count - lead
            if rest % stride != 1 % stride:
                continue
            loss = UNIT * count * pad - gain
            if rest == 0:
                loss += UNIT * room
            else:
                share = min(longest, room // rest)
                other = self.heaviest(share)
                if other is None:
                    continue
                loss -= rest * self.worth(other)
                loss += UNIT * (room - rest * share) if share == longest else 0
            out.append((loss, count, lead))
        return out

    def build(self, bound: int, count: int, lead: int) -> tuple[list[int], int, int]:
        """(values, loss, room) of the next batch by a pattern; takes nothing away."""
        first = self.heaviest(self.value[0])
        pad, before, batch = self.pad[first], list(self.left), []
        room = bound - count * pad

        def take(limit: int) -> bool:
            nonlocal room
            k = self.heaviest(limit)
            if k is None or self.value[k] > room:
                return False
            batch.append(k)
            room -= self.value[k]
            self.left[k] -= 1
            return True

        while len(batch) < lead and take(self.value[first]):
            pass
        while len(batch) < count and take(room // (count - len(batch))):
            pass
        room += (count - len(batch)) * pad
        while room > pad and take(min(room - pad, self.value[first])):
            room -= pad
        self.left = before
        self.work += len(batch)
        loss = UNIT * (room + len(batch) * pad) - sum(self.worth(k) for k in batch)
        return batch, loss, room

    def learn(self, batches: list[tuple[list[int], int, int]], step: int) -> None:
        """Moves prices by the mean loss of the values next to each, by less in later passes."""
        lost = [0] * len(self.value)
        for values, loss, _ in batches:
            for k in values:
                lost[k] += _quotient(loss, len(values))
        taken = [n - left for n, left in zip(self.items, self.left, strict=True)]
        for k in range(len(self.value)):
            near = slice(max(0, k - REACH), k + REACH + 1)
            if items := sum(taken[near]):
                change = _quotient(_quotient(sum(lost[near]), items) * 16, 10 + step)
                self.price[k] = min(max(self.price[k] + change, self.lowest), self.highest[k])
